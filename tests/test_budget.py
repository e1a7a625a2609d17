"""What reading a bundle may take is stated in format.py, and kept, whatever is in the file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from factories import made_bundle

from etcl_deploy.bundle import format
from etcl_deploy.bundle.bundle import FEW, LONGEST, check_effort
from etcl_deploy.errors import BundleError

# Reads a small bundle, which loads all code, then the one in question; says how much more memory that took.
READER = """
import re, sys
from pathlib import Path
from etcl_deploy.bundle.bundle import load_bundle
from etcl_deploy.errors import BundleError
from etcl_deploy.runtime.subnet import materialize

def read(path):
    try:
        bundle = load_bundle(path)
        materialize(bundle, list(bundle.tasks)[-1])
        return "read"
    except BundleError:
        return "refused"

def most():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

read(sys.argv[1])
before = most()
print(read(sys.argv[2]), most() - before)
"""


def taken(path: Path, folder: Path) -> tuple[str, int]:
    """What became of reading one task of a file, and the bytes it took."""
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc/self/status to measure memory by")
    small = folder / "small.etcl"
    small.write_bytes(made_bundle(2).to_bytes("coded"))
    done = subprocess.run(
        [sys.executable, "-c", READER, small, path], capture_output=True, text=True, check=True, timeout=300
    )
    outcome, count = done.stdout.split()
    return outcome, int(count)


def allowed(path: Path, weights: int) -> int:
    """The budget as format.py states it."""
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return (64 << 20) + 3 * path.stat().st_size + 64 * header + 64 * weights


@pytest.mark.parametrize(
    ("encoding", "density", "precision"),
    [("coded", 0.3, "fp32"), ("coded", 0.3, "int8"), ("coded", 0.0001, "fp32"), ("packed", 0.3, "int8")],
)
def test_reading_a_task_keeps_to_the_budget(tmp_path: Path, encoding: str, density: float, precision: str) -> None:
    """However many weights there are, and however few of them are used."""
    bundle, path = made_bundle(6, "fcn3", 800, 28, density, precision), tmp_path / "large.etcl"
    path.write_bytes(bundle.to_bytes(encoding))
    outcome, count = taken(path, tmp_path)
    assert outcome == "read" and count > 4 * bundle.layout.weight_count, "it was really measured"
    assert count < allowed(path, bundle.layout.weight_count)


@pytest.mark.parametrize("filling", ["[0]", "1.5", '{"a":{}}'])
def test_a_manifest_full_of_little_things_keeps_to_it(tmp_path: Path, filling: str) -> None:
    """Each takes more memory than room in the file."""
    path = tmp_path / "x.etcl"
    bundle = made_bundle(2)
    manifest = {
        "backbone": {"name": "x", "plan": bundle.plan.as_json()},
        "run": {"x": [json.loads(filling)] * 300_000},
    }
    path.write_bytes(format.to_bytes(manifest, {"backbone/weight": torch.zeros(3)}))
    outcome, count = taken(path, tmp_path)
    assert outcome == "refused" and path.stat().st_size < count < allowed(path, 0)


def test_what_could_not_be_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too few bytes for so many weights, too many tasks of so many weights."""
    check_effort(FEW, 1, 0)
    check_effort(FEW + 32, 1, 1)
    check_effort(FEW, LONGEST // FEW, 0)
    with pytest.raises(ValueError, match="1 bytes of 4194337 weights are too few for coded masks; packed ones hold"):
        check_effort(FEW + 33, 1, 1)
    with pytest.raises(ValueError, match="4097 tasks of 4194304 weights are too many for coded masks; packed ones"):
        check_effort(FEW, LONGEST // FEW + 1, 0)
    with monkeypatch.context() as smaller:
        smaller.setattr("etcl_deploy.bundle.bundle.LONGEST", 100)
        with pytest.raises(BundleError, match="too many for coded masks"):
            made_bundle(2).to_bytes("coded")
