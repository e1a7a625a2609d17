"""A minute of benchmarks/soak.py: learning, pushing and asking while everything that can go wrong does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

pytestmark = [pytest.mark.torchserve, pytest.mark.slow]


def test_a_minute_of_faults_costs_no_answer_and_no_task(tmp_path: Path) -> None:
    """No wrong answer, none that failed while all workers were well, nothing lost; and there were faults."""
    script, work = ROOT / "benchmarks" / "soak.py", tmp_path / "soak"
    # With this seed the trainer is killed first of all: however slow the machine, there are two kinds of faults.
    command = [sys.executable, script, "--work", work, "--minutes", "0.3", "--seed", "1", "--try"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["wrong answers"] == found["failed for no reason"] == 0
    assert found["lost data"] == found["troubles"] == []
    assert found["answered right"] > 100 and found["pushes"] >= 1
    assert len(found["faults"]) >= 2 and len(found["bad requests"]) >= 5
