"""Short runs of the programs in tests/stress/."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT


def stressed(script: str, *words: object) -> Any:
    """The JSON that a program prints; it must not fail."""
    command = [sys.executable, ROOT / "tests" / "stress" / script, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout)


def test_no_damaged_file_does_harm() -> None:
    """Each is refused, or answers as before, within its memory and time; every flipped bit is found."""
    told = stressed("fuzz.py", "--cases", 1000, "--flips", 200)
    assert told["wrong"] == [] and sum(told["counts"].values()) == 1200
    assert told["counts"]["flip: refused"] == 200


@pytest.mark.torchserve
def test_bad_requests_harm_nobody(tmp_path: Path) -> None:
    """Every good one gets the bytes it gets alone, every bad one its own status, and no worker is restarted."""
    told = stressed("hostile.py", "--work", tmp_path, "--requests", 1500, "--tasks", 10, "--rounds", 0)
    assert told["wrong"] == [] and told["S7"]["same_bytes"] == 1 and told["same_workers"]


@pytest.mark.torchserve
def test_a_killed_worker_comes_back_and_nobody_gets_a_wrong_answer(tmp_path: Path) -> None:
    """Whoever was lost with it is told so; a push under load loses nobody."""
    told = stressed("faults.py", "--work", tmp_path, "--pushes", 1, "--kills", 1)
    assert told["pushes"]["counts"].keys() == {"right"}
    assert told["kills"]["counts"]["right"] > 0 and told["kills"]["seconds_to_recover"]


@pytest.mark.torchserve
@pytest.mark.slow
def test_a_minute_of_faults_costs_no_answer_and_no_task(tmp_path: Path) -> None:
    """No wrong answer, none that failed while all workers were well, nothing lost; and there were faults."""
    told = stressed("soak.py", "--work", tmp_path / "soak", "--minutes", "0.3", "--seed", "1")
    assert told["lost data"] == told["troubles"] == []
    assert told["answered right"] > 100 and told["pushes"] >= 1
    assert len(told["faults"]) >= 2 and len(told["bad requests"]) >= 5
