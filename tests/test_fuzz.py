"""Damaged bundles and deltas: a short run of benchmarks/fuzz_bundle.py."""

from __future__ import annotations

import json
import subprocess
import sys

from conftest import ROOT


def test_no_damaged_file_does_harm() -> None:
    """Each is refused, or answers as before, within its memory and time; every flipped bit is found."""
    words = [sys.executable, ROOT / "benchmarks" / "fuzz_bundle.py", "--cases", "1000", "--flips", "200", "--try"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == [] and sum(found["counts"].values()) == 1200
    assert found["counts"]["flip: refused"] == 200
