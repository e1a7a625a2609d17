from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

from conftest import ROOT

import etcl_deploy

FROZEN = ROOT / "tests" / "golden" / "public_api.txt"


# Of these the methods are promised, too; of the other classes how they are made.
WITH_METHODS = ("AsyncClient", "Bundle", "Client", "Config", "Prediction", "Predictor", "RunSummary", "StoredRun")


def public_api() -> str:
    """Every public name with its signature, and the methods people call."""
    lines = []
    for name in etcl_deploy.__all__:
        value = getattr(etcl_deploy, name)
        lines.append(name + _signature(value))
        if name in WITH_METHODS:
            methods = inspect.getmembers(value, lambda member: inspect.isfunction(member) or inspect.ismethod(member))
            lines += [f"    .{key}{_signature(method)}" for key, method in methods if not key.startswith("_")]
    return "\n".join(lines) + "\n"


def _signature(value: Any) -> str:
    """The parameters and the result, as they are written; a default that is an object of ours as three dots."""
    if value is etcl_deploy.EtclError:
        return ""
    plain = (bool, int, float, str, tuple, type(None), type(inspect.Parameter.empty))
    signature = inspect.signature(value)
    parameters = [
        parameter.replace(
            # The types of settings are objects, which config.py has.
            annotation=parameter.annotation if isinstance(parameter.annotation, str) else inspect.Parameter.empty,
            default=parameter.default if isinstance(parameter.default, plain) else ...,
        )
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters)).replace("'", "").replace("Ellipsis", "...")


def test_public_names_and_signatures_are_frozen() -> None:
    """A change here is a change for users: it belongs into CHANGELOG.md (docs/stability.md).

    To accept one: python -c "import test_public as t; t.FROZEN.write_text(t.public_api())", in tests/.
    """
    assert public_api() == FROZEN.read_text("utf-8")


def test_public_names_are_sorted_documented_and_typed() -> None:
    """Everything in __all__ exists, is documented, is in order, and type checkers see it."""
    assert etcl_deploy.__all__ == sorted(etcl_deploy.__all__)
    for name in etcl_deploy.__all__:
        assert getattr(etcl_deploy, name).__doc__, name
    assert set(etcl_deploy.__all__) <= set(dir(etcl_deploy))
    tree = ast.parse(Path(etcl_deploy.__file__).read_text("utf-8"))
    typed = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in typed.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: (node.module or "").removeprefix("etcl_deploy.") for node in imports for alias in node.names}
    assert homes == etcl_deploy._HOMES


def test_importing_the_package_is_light() -> None:
    """`import etcl_deploy` and the command line load neither torch nor numpy."""
    heavy = "{'torch', 'numpy', 'sklearn'}"
    code = f"import sys, etcl_deploy, etcl_deploy.cli.main; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_export_is_within_reach() -> None:
    """After `import etcl_deploy`, etcl_deploy.export.to_onnx.export_task can be used."""
    code = "import etcl_deploy; assert callable(etcl_deploy.export.to_onnx.export_task)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_version_is_the_distributions() -> None:
    """The package and its metadata state the same version."""
    assert metadata("etcl-deploy")["Version"] == etcl_deploy.__version__
