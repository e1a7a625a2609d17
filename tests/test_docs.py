"""Commands, options, settings and files that documents name exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from conftest import ROOT
from typer.core import TyperCommand, TyperGroup

from etcl_deploy.cli.commands.learning import BACKBONE_HELP, METHOD_HELP, PRESET_HELP
from etcl_deploy.cli.main import app
from etcl_deploy.config import Config
from etcl_deploy.learn.methods import METHODS
from etcl_deploy.network.backbones import BACKBONES
from etcl_deploy.settings import flat, load_recipe, parse_settings, preset_names, recipe_names, tomllib, with_preset

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


def tables_of(page: str) -> list[list[list[str]]]:
    """The tables of a page: rows of cells, the line under the head left out."""
    found = blocks((ROOT / page).read_text("utf-8"))
    rows = [[[cell.strip() for cell in line.strip("|").split("|")] for line in block] for block in found]
    return [[row for row in table if set(row[0]) != {"-"}] for table in rows]


def blocks(text: str) -> list[list[str]]:
    """Lines of tables that stand together."""
    return [found.strip().splitlines() for found in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)]


def recipe_table(name: str, preset: str) -> dict[str, object]:
    """What a recipe says of a preset."""
    recipe = tomllib.loads((ROOT / "etcl_deploy" / "recipes" / f"{name}.toml").read_text("utf-8"))
    table: dict[str, object] = recipe.get("presets", {}).get(preset, {})
    return table


def test_the_table_of_presets_is_the_code() -> None:
    """Every setting of a preset for all data has a row, and the row its values."""
    (head, *rows), _ = tables_of("docs/presets.md")
    presets = head[2:]
    assert sorted(presets) == preset_names()
    configs = [Config(), *(with_preset(Config(), preset) for preset in presets)]
    values = [flat(config.as_json()) for config in configs]
    for name, *cells in rows:
        assert [cell.strip("`") for cell in cells] == [str(found[name.strip("`")]) for found in values], name
    said = [row[0].strip("`") for row in rows]
    folder = ROOT / "etcl_deploy" / "presets"
    shared = [key for preset in presets for key in tomllib.loads((folder / f"{preset}.toml").read_text("utf-8"))]
    assert set(said) == set(shared) and len(said) == len(set(said))


def test_the_table_of_presets_by_recipe_is_the_code() -> None:
    """A row has all that the recipe's own tables say, and every recipe that has one has a row."""
    _, (head, *rows) = tables_of("docs/presets.md")
    for name, *cells in rows:
        numbers = parse_settings(f"{key.strip('`')}={cell}" for key, cell in zip(head[1:-2], cells[:-2], strict=True))
        also, authors = (parse_settings(re.findall(r"`(\w+=[^`]+)`", cell)) for cell in cells[-2:])
        for preset, said in (("paper", numbers | also), ("authors", authors)):
            own = recipe_table(name, preset)
            assert said == {key: value for key, value in own.items() if key != "sequence"}, (name, preset)
            assert ("sequence" in own) == (preset == "paper" and "`sequence`" in cells[-2]), name
        values = flat(load_recipe(name, preset="paper").as_json())
        assert all(values[key] == value for key, value in (numbers | also).items()), name
    assert {row[0] for row in rows} == {name for name in recipe_names() if recipe_table(name, "paper")}


def test_help_names_every_method_network_and_preset() -> None:
    """`etcl train --help` lists every method, backbone and preset."""
    assert set(re.findall(r"\w+", PRESET_HELP)) >= set(preset_names())
    assert set(re.findall(r"\w+", METHOD_HELP)) >= set(METHODS)
    assert set(re.findall(r"\w+", BACKBONE_HELP)) >= set(BACKBONES)
