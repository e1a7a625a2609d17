"""Bad requests among good ones, and faults: short runs of benchmarks/hostile.py and benchmarks/faults.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = pytest.mark.torchserve


def run(script: str, work: Path, *words: str) -> str:
    command = [sys.executable, ROOT / "benchmarks" / script, "--work", work, "--try", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_bad_requests_harm_nobody(tmp_path: Path) -> None:
    """Every good one gets the bytes it gets alone, every bad one its own status, and no worker is restarted."""
    told = run("hostile.py", tmp_path, "--requests", "1500", "--tasks", "10")
    assert '"wrong": []' in told and '"same_bytes": 1.0' in told and '"same_workers": true' in told


def test_a_killed_worker_comes_back_and_nobody_gets_a_wrong_answer(tmp_path: Path) -> None:
    """Whoever was lost with it is told so; a push under load loses nobody."""
    told = run("faults.py", tmp_path, "--pushes", "1", "--kills", "1")
    assert '"right"' in told
