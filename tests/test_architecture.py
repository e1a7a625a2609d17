"""What may import what, read from the source. A room imports only from rooms below its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from conftest import ROOT

import etcl_deploy
from etcl_deploy.export.to_mar import CARRIED
from etcl_deploy.settings import tomllib

# Lowest first. A module belongs to the longest prefix that fits; modules of one line do not see each other,
# except within one room.
ROWS: list[list[str]] = [
    ["errors", "prediction"],
    ["atomic", "config", "operations", "templates", "wire"],
    ["client", "settings", "plan", "preprocessing", "bundle.codec"],
    [
        "learn.masks",
        "learn.chooser",
        "learn.metrics",
        "learn.projection",
        "learn.augment",
        "learn.task",
        "learn.ranks",
        "learn.draft",
    ],
    ["pictures"],
    ["edge"],
    ["learn.similarity"],
    ["learn.workspace"],
    ["learn.layers", "learn.norms", "learn.backbones"],
    ["learn.state"],
    ["learn.network"],
    ["bundle"],
    ["runtime"],
    ["learn", "data", "export", "handlers", "serve"],
    ["build", "deploy", "devices", "doctor", "logs", "web"],
    ["origins"],
    ["train"],
    ["demo", "compare"],
    ["render"],
    ["bench", "progress", "report"],
    ["commands"],
    ["cli"],
    ["__main__"],
]
ROW = {room: number for number, rooms in enumerate(ROWS) for room in rooms}
PURE = [
    *("operations", "plan", "bundle.codec", "bundle.coded", "bundle.entropy", "bundle.values", "bundle.layout"),
    *("bundle.precision", "learn.masks", "learn.metrics"),
    *("learn.projection", "learn.augment", "learn.similarity"),
]
DOORS = ROW["learn"]  # the row from which on the config may be read


def sources() -> dict[str, Path]:
    """Module name without `etcl_deploy.` -> file, as installed."""
    found = {}
    for folder, prefix in (("etcl_deploy", ""), ("export", "export."), ("handlers", "handlers.")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[prefix + ".".join(part for part in parts if part != "__init__")] = path
    return {name.strip("."): path for name, path in found.items() if name.strip(".")}


SOURCES = sources()


def room(module: str) -> str:
    """The room a module belongs to."""
    return max((r for r in ROW if module == r or module.startswith(f"{r}.")), key=len)


def imports(path: Path, *, top_only: bool = False) -> set[str]:
    """Everything a file imports, also inside functions; `from a import b` counts as a.b when that is a module."""
    tree = ast.parse(path.read_text("utf-8"))
    nodes = tree.body if top_only else ast.walk(tree)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                # A public name counts as the module it comes from, a submodule as itself.
                home = etcl_deploy._HOMES.get(alias.name, alias.name) if node.module == "etcl_deploy" else alias.name
                whole = f"{node.module}.{home}"
                found.add(whole if whole.removeprefix("etcl_deploy.") in SOURCES else node.module or "")
    return found


def own(path: Path) -> set[str]:
    """Our own modules a file imports."""
    found = imports(path)
    assert not {name for name in found if name == "etcl_deploy"} or "__version__" in path.read_text("utf-8")
    return {name.removeprefix("etcl_deploy.") for name in found} & SOURCES.keys()


@pytest.mark.parametrize("module", [name for name in SOURCES if name != "recipes"])
def test_rooms_import_only_from_below(module: str) -> None:
    """And only the top two rows read the config."""
    here = room(module)
    for other in own(SOURCES[module]):
        there = room(other)
        assert ROW[there] < ROW[here] or there == here, f"{module} must not import {other}"
        reads = ROW[here] >= DOORS or here == "settings"
        assert other != "config" or reads, f"{module} must not read the config"


def test_every_folder_is_installed_and_says_what_it_is() -> None:
    """A folder that pyproject.toml does not list would be missing from a wheel, and only there."""
    folders = {name: path for name, path in SOURCES.items() if path.name == "__init__.py"}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    assert set(settings["packages"]) == {"etcl_deploy", *(f"etcl_deploy.{name}" for name in folders)}
    for name, path in folders.items():
        assert ast.get_docstring(ast.parse(path.read_text("utf-8"))), name


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_touch_nothing(module: str) -> None:
    """No files, no printing, no clock, no global random state."""
    allowed = {
        "__future__",
        "collections",
        "dataclasses",
        "functools",
        "itertools",
        "math",
        "statistics",
        "struct",
        "typing",
    }
    found = {name.split(".")[0] for name in imports(SOURCES[module])}
    assert found <= allowed | {"numpy", "torch", "scipy", "ot", "constriction", "etcl_deploy"}
    assert own(SOURCES[module]) <= {*PURE, "errors"}
    tree = ast.parse(SOURCES[module].read_text("utf-8"))
    calls = {
        ast.unparse(node.func)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and "generator" not in [keyword.arg for keyword in node.keywords]
    }
    forbidden = ("open", "print", "torch.rand", "torch.manual_seed", "np.random")
    assert not [call for call in calls if call.startswith(forbidden) or call.endswith(("_text", "_bytes"))]


def test_the_archive_carries_all_the_handler_needs() -> None:
    """Following the handler's imports never leads out of what is packed."""
    waiting, seen = ["handlers.etcl_handler"], set()
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += own(SOURCES[module])
    outside = {m for m in seen - {"handlers.etcl_handler"} if m.split(".")[0] not in CARRIED}
    assert not outside


def test_the_handler_defines_exactly_one_class() -> None:
    """TorchServe refuses a handler file with more."""
    tree = ast.parse(SOURCES["handlers.etcl_handler"].read_text("utf-8"))
    assert [node.name for node in tree.body if isinstance(node, ast.ClassDef)] == ["EtclHandler"]


def test_the_command_line_starts_light() -> None:
    """At their top cli.py and the commands import nothing heavy, so `etcl --help` is quick."""
    tops = [path for name, path in SOURCES.items() if name.split(".")[0] in ("cli", "commands")]
    found = {name for path in tops for name in imports(path, top_only=True)}
    ours = {name.removeprefix("etcl_deploy.").split(".")[0] for name in found if name.startswith("etcl_deploy")}
    assert ours == {"commands", "errors", "render"}
    others = {name.split(".")[0] for name in found} - {"etcl_deploy"}
    light = {"__future__", "collections", "dataclasses", "json", "os", "pathlib", "shlex", "sys"}
    assert others <= light | {"typing", "typer", "rich"}


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_nothing_is_unpickled_or_executed(module: str) -> None:
    """No pickle, no torch.load, no eval, no exec."""
    assert not {"pickle", "marshal", "shelve"} & {name.split(".")[0] for name in imports(SOURCES[module])}
    tree = ast.parse(SOURCES[module].read_text("utf-8"))
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not calls & {"torch.load", "torch.save", "eval", "exec", "compile"}
