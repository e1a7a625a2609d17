from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from conftest import Learned

from etcl_deploy.errors import BundleError, ExportError
from etcl_deploy.export.to_mar import archive


def test_an_archive_carries_bundle_handler_and_runtime(learned: Learned, tmp_path: Path) -> None:
    """Everything a server needs, nothing of training, and nothing pickled."""
    path = archive(learned.path, "digits", tmp_path / "store")
    assert path == tmp_path / "store" / "digits.mar"
    with zipfile.ZipFile(path) as opened:
        names = set(opened.namelist())
        assert opened.read("bundle.etcl") == learned.bundle.to_bytes("packed"), "a server maps its masks"
    assert {"etcl_handler.py", "model-config.yaml", "MAR-INF/MANIFEST.json"} <= names
    assert {"etcl_deploy/runtime/predictor.py", "etcl_deploy/core/plan.py"} <= names
    assert not [name for name in names if "learn/" in name or "data/" in name or name.endswith((".pt", ".pkl"))]
    assert [p.name for p in (tmp_path / "store").iterdir()] == ["digits.mar"]


def test_an_archive_is_written_again_only_when_needed(learned: Learned, tmp_path: Path) -> None:
    """Same bundle: the same file stays. Another bundle, or a damaged archive: a new one."""
    path = archive(learned.path, "digits", tmp_path)
    stamp = path.stat().st_mtime_ns
    assert archive(learned.path, "digits", tmp_path).stat().st_mtime_ns == stamp
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[whole.index(b"etcl_handler.py") + 200] ^= 1
    for damaged in (whole[:1000], bytes(flipped), b""):
        path.write_bytes(damaged)
        archive(learned.path, "digits", tmp_path)
        assert zipfile.ZipFile(path).testzip() is None


@pytest.mark.parametrize("name", ["", "../up", "a b", "-x", ".hidden", "a/b", "x" * 200])
def test_names_that_are_no_model_names_are_refused(learned: Learned, tmp_path: Path, name: str) -> None:
    """Before anything is written."""
    with pytest.raises(ExportError, match="cannot name a model"):
        archive(learned.path, name, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_damaged_bundle_is_not_archived(bundle_file: Path, tmp_path: Path) -> None:
    """It is read first."""
    bundle_file.write_bytes(b"x")
    with pytest.raises(BundleError):
        archive(bundle_file, "digits", tmp_path / "store")
    assert not (tmp_path / "store").exists()
