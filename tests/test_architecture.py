"""What may import what, read from the source: each folder is a layer."""

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
    **{"settings": 0, "recipes": 0},  # with errors and config
    "core": 1,
    **{"network": 2, "bundle": 2, "client": 2, "edge": 2},
    "runtime": 3,
    **{"learn": 4, "data": 4, "export": 4, "handlers": 4},
    **{"runs": 5, "serve": 5},
    **{"report": 6, "demo": 6},
    "cli": 7,
}
PURE = [
    *(
        "core.operations",
        "core.plan",
        "bundle.bits",
        "bundle.mask_coding",
        "bundle.rans",
        "bundle.float_coding",
        "bundle.layout",
    ),
    *("bundle.precision", "network.masks", "learn.metrics"),
    *("learn.projection", "learn.augment", "learn.similarity"),
]
READS_CONFIG = 4  # the first layer that may read the config; below it a function takes the values it uses


def sources() -> dict[str, Path]:
    """Module name without `etcl_deploy.` -> file, as installed."""
    found = {}
    for folder, prefix in (("etcl_deploy", ""), ("export", "export."), ("handlers", "handlers.")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[prefix + ".".join(part for part in parts if part != "__init__")] = path
    return {name.strip("."): path for name, path in found.items() if name.strip(".")}


SOURCES = sources()


def folder(module: str) -> str:
    """The folder a module lies in, or the file if it stands alone."""
    first = module.split(".")[0]
    return {"errors": "settings", "config": "settings", "__main__": "cli"}.get(first, first)


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


@pytest.mark.parametrize("module", SOURCES)
def test_folders_are_layers(module: str) -> None:
    """A folder imports only from folders below it, and only the upper layers read the config."""
    here = folder(module)
    for other in own(SOURCES[module]):
        there = folder(other)
        assert here == there or LAYERS[there] < LAYERS[here], f"{module} must not import {other}"
        reads = here == "settings" or LAYERS[here] >= READS_CONFIG
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
    """At their top main.py and the commands import nothing heavy, so `etcl --help` is quick."""
    tops = [path for name, path in SOURCES.items() if name == "cli.main" or name.startswith("cli.commands")]
    found = {name for path in tops for name in imports(path, top_only=True)}
    ours = {name.removeprefix("etcl_deploy.").split(".")[0] for name in found if name.startswith("etcl_deploy")}
    assert ours == {"cli", "errors", "report"}
    others = {name.split(".")[0] for name in found} - {"etcl_deploy"}
    light = {"__future__", "collections", "contextlib", "dataclasses", "json", "os", "pathlib", "shlex", "sys"}
    assert others <= light | {"typing", "typer", "rich"}


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_nothing_is_unpickled_or_executed(module: str) -> None:
    """No pickle, no torch.load, no eval, no exec."""
    assert not {"pickle", "marshal", "shelve"} & {name.split(".")[0] for name in imports(SOURCES[module])}
    tree = ast.parse(SOURCES[module].read_text("utf-8"))
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not calls & {"torch.load", "torch.save", "eval", "exec", "compile"}
