"""R1: killed with signal 9 at random moments and resumed each time, a run ends with the bytes of one nobody disturbed.

python benchmarks/kill_resume.py --kills 50
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from record import read_options, write_result

from etcl_deploy.runs.store import load

SETTINGS = ["--set", "width=4", "--set", "size=8", "--epochs", "4", "--device", "cpu", "--set", "checkpoint_seconds=0"]
ETCL = [sys.executable, "-m", "etcl_deploy", "train"]


def start(*words: object) -> subprocess.Popen[bytes]:
    """A training process of its own."""
    return subprocess.Popen([*ETCL, *map(str, words)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def main(say: Callable[[str], None]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", type=int, default=5)
    arguments = read_options(parser, kills=4, tasks=2)
    settings = [*SETTINGS, "--tasks", arguments.tasks]
    chance, kills, same, runs = random.Random(arguments.seed), 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        started = time.monotonic()
        if start("digits", "--run", work / "whole", *settings).wait():
            raise SystemExit("the undisturbed run failed")
        length, whole = time.monotonic() - started, load(work / "whole").digest
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
            same += load(run).digest == whole
            say(f"{kills} kills, {runs} runs, {same} of them with the bytes of the undisturbed one")
    result = {"kills": kills, "runs": runs, "same": same}
    write_result("kill_resume", ["R1"], result, {"train": settings, "seconds_undisturbed": round(length, 1)})
    if same != runs:
        raise SystemExit(1)


if __name__ == "__main__":
    main(partial(print, flush=True))
