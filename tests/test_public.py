from __future__ import annotations

import subprocess
import sys
from importlib.metadata import metadata

import etcl_deploy


def test_public_names_are_sorted_and_documented() -> None:
    """Every name in __all__ exists and has a docstring."""
    assert etcl_deploy.__all__ == sorted(etcl_deploy.__all__)
    for name in etcl_deploy.__all__:
        assert getattr(etcl_deploy, name).__doc__, name
    assert set(etcl_deploy.__all__) == set(etcl_deploy._HOMES)
    assert set(etcl_deploy.__all__) <= set(dir(etcl_deploy))


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
