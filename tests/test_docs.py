"""Commands, options, settings and files that documents name exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from conftest import ROOT
from typer.core import TyperCommand, TyperGroup

from etcl_deploy.cli.commands.learning import BACKBONE_HELP, METHOD_HELP
from etcl_deploy.cli.main import app
from etcl_deploy.config import Config
from etcl_deploy.learn.methods import METHODS
from etcl_deploy.network.backbones import BACKBONES
from etcl_deploy.settings import flat

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "model_store" / "README.md",
    *(ROOT / "docs").glob("*.md"),
]
Command = TyperCommand | TyperGroup
COMMANDS = typer.main.get_command(app)
# Options of other programs that pages name.
FOREIGN = {
    "--data-binary",
    "--no-deps",
    "--bind",
    "--directory",
    "--start",
    "--no-config-snapshots",
    "--ts-config",
    "--logdir",
    "--minutes",  # this and the next: of scripts in benchmarks/ and tests/stress/
    "--record",
    "--work",
    "--parts",
    "--nproc-per-node",
    "--nnodes",
    "--node-rank",
    "--master-addr",
    "--",
}


def options(command: Command) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def command_of(words: list[str]) -> Command | None:
    """The command that words after `etcl` begin with."""
    command: Command = COMMANDS
    for word in words:
        if not isinstance(command, TyperGroup):
            break
        if word not in command.commands:
            return None
        command = command.commands[word]
    return command


def quoted(text: str) -> list[str]:
    """The lines of command blocks, and the text between backticks elsewhere."""
    fenced = re.findall(r"^```(?:sh|text)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^    (etcl .*)$", text, re.MULTILINE)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [*(line for block in fenced for line in block.splitlines()), *indented, *re.findall(r"`([^`\n]+)`", prose)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_and_option_is_there(page: Path) -> None:
    """A quoted command has the options quoted with it; an option quoted alone belongs to some command."""
    everything = {"--help"}.union(
        *(options(command_of([name]) or COMMANDS) for name in COMMANDS.commands), options(COMMANDS)
    )
    for text in quoted(page.read_text("utf-8")):
        words = shlex.split(text.replace("'", "") if text.count("'") % 2 else text)
        named = {word.partition("=")[0] for word in words if word.startswith("--")}
        if words[:1] == ["etcl"] and words[1:]:
            known = {"--help", "--debug", "--version"}
            command = command_of(words[1:])
            assert command or words[1] in known, f"{page.name}: {text}"
            if command:
                assert named <= options(command) | known, f"{page.name}: {text}"
        elif words[:1] == ["python"] and words[1].startswith(("benchmarks/", "tests/")) and "NAME" not in words[1]:
            script = (ROOT / words[1]).read_text("utf-8")
            assert all(f'"{name}"' in script for name in named - {"--record"}), f"{page.name}: {text}"
        else:
            assert named <= everything | FOREIGN, f"{page.name}: {text}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_is_there(page: Path) -> None:
    """Every name that `--set` is shown with is a setting."""
    known = flat(Config().as_json())
    for name in re.findall(r"--set '?(\w+)=", page.read_text("utf-8")):
        assert name in (*known, "name"), f"{page.name}: --set {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_file_is_there(page: Path) -> None:
    """Links lead from the folder of the page; scripts, modules and pages from the root or the package."""
    text = page.read_text("utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), f"{page.name}: {target}"
    for name in re.findall(r"`(?:python )?((?:[\w-]+/)+[\w.-]+\.(?:py|md|toml|yaml|json|svg))\b", text):
        places = (ROOT / name, ROOT / "etcl_deploy" / name, page.parent / name)
        if name.split("/")[0] in ("config", "page", "photos", "model-store") or "NAME" in name:  # not of this tree
            continue
        assert any(place.exists() for place in places), f"{page.name}: {name}"


def test_help_names_every_method_and_network() -> None:
    """`etcl train --help` lists every method and backbone."""
    assert set(re.findall(r"\w+", METHOD_HELP)) >= set(METHODS)
    assert set(re.findall(r"\w+", BACKBONE_HELP)) >= set(BACKBONES)
