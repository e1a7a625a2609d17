"""Scripts in benchmarks/ and tests/stress/, and what docs/ quotes of their recorded results."""

from __future__ import annotations

import subprocess
import sys

from conftest import ROOT

SCRIPTS = [
    *(ROOT / "benchmarks").glob("*.py"),
    *(ROOT / "benchmarks" / "research").glob("*.py"),
    *(ROOT / "tests" / "stress").glob("*.py"),
]
HELP = """
import runpy, sys
from pathlib import Path
for script in sys.argv[1:]:
    folder, sys.argv = str(Path(script).parent), [script, "--help"]
    sys.path.insert(0, folder)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert not end.code, script
    sys.path.remove(folder)
"""


def test_every_script_can_be_imported_and_tells_its_options() -> None:
    """In one process, since each takes seconds to import torch."""
    scripts = [str(path) for path in SCRIPTS if ".parse_args()" in path.read_text("utf-8")]
    assert len(scripts) >= 15
    done = subprocess.run([sys.executable, "-c", HELP, *scripts], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ") == len(scripts)


def test_docs_say_what_the_recorded_results_give() -> None:
    """docs/benchmarks.md is what benchmarks/page.py writes; the tables of docs/results.md are the recorded ones."""
    page = ROOT / "benchmarks" / "page.py"
    done = subprocess.run([sys.executable, page, "--check"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
