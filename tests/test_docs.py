"""What documents say of commands, options, settings and files is so."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from conftest import ROOT
from typer.core import TyperCommand, TyperGroup

from etcl_deploy.cli.commands.learning import BACKBONE_HELP, METHOD_HELP
from etcl_deploy.cli.doctor import PACKAGES
from etcl_deploy.cli.main import app
from etcl_deploy.config import Config
from etcl_deploy.learn.methods import METHODS
from etcl_deploy.network.backbones import BACKBONES
from etcl_deploy.settings import flat, tomllib

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "model_store" / "README.md",
    *(ROOT / "docs").glob("*.md"),
]
Command = TyperCommand | TyperGroup
COMMANDS = typer.main.get_command(app)
# Options of other programs that pages speak of.
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
    found = COMMANDS
    for word in words:
        if not isinstance(found, TyperGroup):
            break
        if word not in found.commands:
            return None
        found = found.commands[word]
    return found


def quoted(text: str) -> list[str]:
    """Lines of blocks of commands, and what stands between backticks elsewhere."""
    fenced = re.findall(r"^```(?:sh|text)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^    (etcl .*)$", text, re.MULTILINE)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [*(line for block in fenced for line in block.splitlines()), *indented, *re.findall(r"`([^`\n]+)`", prose)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_and_option_is_there(page: Path) -> None:
    """Of a command what stands behind it, of an option by itself one command at least."""
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
    """Whatever `--set` is shown with."""
    known = flat(Config().as_json())
    for name in re.findall(r"--set '?(\w+)=", page.read_text("utf-8")):
        assert name in (*known, "name"), f"{page.name}: --set {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_file_is_there(page: Path) -> None:
    """Links from the page's own folder; scripts, modules and pages from the root or the package."""
    text = page.read_text("utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), f"{page.name}: {target}"
    for name in re.findall(r"`(?:python )?((?:[\w-]+/)+[\w.-]+\.(?:py|md|toml|yaml|json|svg))\b", text):
        places = (ROOT / name, ROOT / "etcl_deploy" / name, page.parent / name)
        if name.split("/")[0] in ("config", "page", "photos", "model-store") or "NAME" in name:  # of no tree of ours
            continue
        assert any(place.exists() for place in places), f"{page.name}: {name}"


def test_help_names_every_method_and_network() -> None:
    """What `etcl train --help` lists is what there is."""
    assert set(re.findall(r"\w+", METHOD_HELP)) >= set(METHODS)
    assert set(re.findall(r"\w+", BACKBONE_HELP)) >= set(BACKBONES)


def test_doctor_looks_for_every_dependency() -> None:
    """Those pyproject.toml declares, whatever they are for."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    names = {re.split(r"[^\w-]", line)[0] for line in declared} - {"tomli", "onnxruntime-gpu"}
    assert set(PACKAGES) == names
