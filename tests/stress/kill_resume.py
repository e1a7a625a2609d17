"""Killed with signal 9 at random moments and resumed, a run ends with the bytes of one nobody disturbed (R1).

python tests/stress/kill_resume.py --kills 4 --tasks 2
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from etcl_deploy.runs.store import load_run

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from record import Figure, new_parser, say, write_result

SETTINGS = ["--set", "width=4", "--set", "size=8", "--epochs", "4", "--device", "cpu", "--set", "checkpoint_seconds=0"]
ETCL = [sys.executable, "-m", "etcl_deploy", "train"]


def start(*words: object) -> subprocess.Popen[bytes]:
    """A training process of its own."""
    command = [*ETCL, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=tempfile.gettempdir())


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """The recorded results, held against their targets."""
    row = results["kill_resume"]
    what = "kill -9 while learning, then resume: share of runs with the same final bytes"
    note, asks = f"{row['kills']} kills in {row['runs']} runs", "after 1,000 kills"
    yield Figure("R1", what, row["same"] / row["runs"], "= 1", "= 1", (), note, asks)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", type=int, default=5)
    arguments = parser.parse_args()
    settings = [*SETTINGS, "--tasks", arguments.tasks]
    chance, kills, same, runs = random.Random(arguments.seed), 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        started = time.monotonic()
        if start("digits", "--run", work / "whole", *settings).wait():
            raise SystemExit("the undisturbed run failed")
        length, whole = time.monotonic() - started, load_run(work / "whole").digest
        while kills < arguments.kills:
            run = work / f"run-{runs}"
            process = start("digits", "--run", run, *settings)
            while True:
                # Anywhere from the first moment of the process to beyond its end; a run may be killed many times.
                try:
                    process.wait(timeout=chance.uniform(0, 1.2 * length) if kills < arguments.kills else None)
                    break
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                    kills += 1
                began = (run / "run.json").exists()
                process = start("--run", run, "--resume") if began else start("digits", "--run", run, *settings)
            if process.returncode:
                raise SystemExit(f"a resumed run failed: {process.stderr.read().decode() if process.stderr else ''}")
            runs += 1
            same += load_run(run).digest == whole
            say(f"{kills} kills, {runs} runs, {same} of them with the bytes of the undisturbed one")
    result = {"kills": kills, "runs": runs, "same": same}
    if arguments.record:
        write_result("kill_resume", "kill_resume", result, {"train": settings, "seconds_undisturbed": round(length, 1)})
    sys.exit(same != runs)


if __name__ == "__main__":
    main()
