"""The imports of every module, read from its source: each folder is a layer."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from conftest import ROOT

import etcl_deploy
from etcl_deploy.export.to_mar import CARRIED
from etcl_deploy.settings import tomllib

# A folder imports only from folders with a smaller number; folders with equal numbers do not see each other.
LAYERS = {
    0: ["settings", "presets", "recipes"],  # with errors and config
    1: ["core"],
    2: ["network", "bundle", "client", "edge"],
    3: ["runtime"],
    4: ["learn", "data", "export", "handlers"],
    5: ["runs", "serve"],
    6: ["report", "demo"],
    7: ["cli"],
}
LAYER = {folder: number for number, folders in LAYERS.items() for folder in folders}
STANDING_ALONE = {"errors": "settings", "config": "settings", "__main__": "cli"}  # a file -> the folder it counts to
READS_CONFIG = 4  # the first layer that may read the config; below it a function takes the values it uses
PURE = [
    *("core.operations", "core.plan", "network.masks"),
    *("bundle.bits", "bundle.mask_coding", "bundle.rans", "bundle.float_coding", "bundle.layout", "bundle.precision"),
    *("learn.metrics", "learn.projection", "learn.augment", "learn.similarity"),
]


def sources() -> dict[str, Path]:
    """Module name without `etcl_deploy.` -> file, as installed."""
    files = {}
    for folder, prefix in (("etcl_deploy", ()), ("export", ("export",)), ("handlers", ("handlers",))):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = (*prefix, *path.relative_to(ROOT / folder).with_suffix("").parts)
            files[".".join(part for part in parts if part != "__init__")] = path
    return {name: path for name, path in files.items() if name}


SOURCES = sources()
TREES = {name: ast.parse(path.read_text("utf-8")) for name, path in SOURCES.items()}


def imports(module: str, *, top_only: bool = False) -> set[str]:
    """The dotted names a module imports, also inside functions, or reads from `etcl_deploy` itself."""
    names: set[str] = set()
    for node in TREES[module].body if top_only else ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "etcl_deploy":
            names.add(f"etcl_deploy.{node.attr}")
    return names


def own_imports(module: str) -> set[str]:
    """Our own modules that a module imports; a public name counts as the module it comes from."""
    names = {name.partition(".")[2] for name in imports(module) if name.split(".")[0] == "etcl_deploy"}
    homes = {etcl_deploy._HOMES.get(name, name) for name in names - {"", "__version__"}}
    return {home if home in SOURCES else home.rpartition(".")[0] for home in homes}


def packages(module: str, *, top_only: bool = False) -> set[str]:
    """The packages a module imports from."""
    return {name.split(".")[0] for name in imports(module, top_only=top_only)}


def calls(module: str) -> list[ast.Call]:
    """Every call in a module."""
    return [node for node in ast.walk(TREES[module]) if isinstance(node, ast.Call)]


def folder(module: str) -> str:
    """The folder a module counts to."""
    first = module.split(".")[0]
    return STANDING_ALONE.get(first, first)


@pytest.mark.parametrize("module", SOURCES)
def test_folders_are_layers(module: str) -> None:
    """A folder imports only from folders below it, and only the upper layers read the config."""
    here = folder(module)
    for other in own_imports(module):
        there = folder(other)
        assert here == there or LAYER[there] < LAYER[here], f"{module} must not import {other}"
        reads = here == "settings" or LAYER[here] >= READS_CONFIG
        assert other != "config" or reads, f"{module} must not read the config"


def test_every_folder_is_installed_and_says_what_it_is() -> None:
    """A folder that pyproject.toml does not list would be missing from a wheel, and only there."""
    folders = [name for name, path in SOURCES.items() if path.name == "__init__.py"]
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    assert set(setuptools["packages"]) == {"etcl_deploy", *(f"etcl_deploy.{name}" for name in folders)}
    for name in folders:
        assert ast.get_docstring(TREES[name]), name


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_touch_nothing(module: str) -> None:
    """No files, no printing, no clock, no global random state."""
    standard = {"__future__", "collections", "dataclasses", "functools", "itertools", "math", "statistics", "struct"}
    others = {"typing", "numpy", "torch", "scipy", "ot", "constriction", "etcl_deploy"}
    assert packages(module) <= standard | others
    assert own_imports(module) <= {*PURE, "errors"}
    for call in calls(module):
        name, seeded = ast.unparse(call.func), "generator" in [keyword.arg for keyword in call.keywords]
        assert seeded or not name.startswith(("open", "print", "torch.rand", "torch.manual_seed", "np.random")), name
        assert not name.endswith(("_text", "_bytes")), name


def test_the_archive_carries_all_the_handler_needs() -> None:
    """The handler's imports, followed to their end, stay within what is packed."""
    waiting, seen = ["handlers.etcl_handler"], set()
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += own_imports(module)
    assert not {module for module in seen - {"handlers.etcl_handler"} if module.split(".")[0] not in CARRIED}


def test_the_handler_defines_exactly_one_class() -> None:
    """TorchServe refuses a handler file with more."""
    classes = [node.name for node in TREES["handlers.etcl_handler"].body if isinstance(node, ast.ClassDef)]
    assert classes == ["EtclHandler"]


def test_the_command_line_starts_light() -> None:
    """At their top main.py and the commands import nothing heavy, so `etcl --help` is quick."""
    light = {"__future__", "collections", "contextlib", "dataclasses", "json", "os", "pathlib", "shlex", "sys"}
    for module in SOURCES:
        if module == "cli.main" or module.startswith("cli.commands"):
            ours = {name.split(".")[1] for name in imports(module, top_only=True) if name.startswith("etcl_deploy")}
            assert ours <= {"cli", "errors", "report", "__version__"}, module
            assert packages(module, top_only=True) <= light | {"typing", "typer", "rich", "etcl_deploy"}, module


@pytest.mark.parametrize("module", SOURCES)
def test_nothing_is_unpickled_or_executed(module: str) -> None:
    """No pickle, no torch.load, no eval, no exec."""
    assert not {"pickle", "marshal", "shelve"} & packages(module)
    forbidden = {"torch.load", "torch.save", "eval", "exec", "compile"}
    assert not forbidden & {ast.unparse(call.func) for call in calls(module)}
