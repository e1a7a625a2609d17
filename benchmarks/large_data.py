"""Memory while a task is learned whose images are read from disk, beside one whose images are all in memory.

    python benchmarks/large_data.py --work DIR

Draws folders of small images (handwritten digits of scikit-learn, each with noise of its own, 32 x 32 PNG) and learns
one task from each with `etcl train`: streamed (`memory_gb=0`) and in memory. Memory is the proportional set size of the
command and of the processes that read for it, looked at twice a second: its peak, and the median of the second and of
the last quarter of the time it learns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from PIL import Image
from record import write_result
from sklearn.datasets import load_digits

COUNTS = (25_000, 50_000, 100_000)
SETTINGS = {"backbone": "fcn3", "width": 100, "channels": 1, "size": 32, "epochs": 6, "batch_size": 64}


def draw(folder: Path, count: int) -> Path:
    """A folder with one task of `count` images, a tenth of them to test with; one that is there is kept."""
    if (folder / "done").exists():
        return folder / "tasks"
    digits, chance = load_digits(), np.random.default_rng(0)
    for part, label in ((part, label) for part in ("train", "test") for label in range(10)):
        (folder / "tasks" / "digits" / part / str(label)).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        place = number % len(digits.images)
        pixels = np.kron(digits.images[place] * 12, np.ones((4, 4))) + chance.integers(0, 60, (32, 32))
        part = "test" if number % 10 == 0 else "train"
        name = folder / "tasks" / "digits" / part / str(digits.target[place]) / f"{number}.png"
        Image.fromarray(pixels.astype(np.uint8)).save(name, compress_level=1)
    (folder / "done").touch()
    return folder / "tasks"


def memory(process: psutil.Process) -> int:
    """Bytes of a process and all it started; what they share counts once."""
    total = 0
    for one in (process, *process.children(recursive=True)):
        try:
            total += one.memory_full_info().pss
        except psutil.Error:
            continue
    return total


def learn(tasks: Path, run: Path, memory_gb: float) -> dict[str, Any]:
    """One task, learned by the command users have; what it took."""
    words = [
        word for key, value in {**SETTINGS, "memory_gb": memory_gb}.items() for word in ("--set", f"{key}={value}")
    ]
    command = [sys.executable, "-m", "etcl_deploy", "train", "--data", tasks, "--run", run, "--device", "cpu", *words]
    began = time.monotonic()
    started = psutil.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True)
    seen: list[int] = []
    learning: list[int] = []
    while started.poll() is None:
        try:
            seen.append(memory(started))
        except psutil.Error:
            break
        if (run / "run.json").exists():  # everything was read once, and now it learns
            learning.append(seen[-1])
        time.sleep(0.5)
    out, _ = started.communicate()
    if started.returncode:
        raise SystemExit(f"etcl train failed with {started.returncode}")
    quarter = len(learning) // 4
    return {
        "peak_mb": max(seen) / 1e6,
        "second_quarter_mb": median(learning[quarter : 2 * quarter] or learning) / 1e6,
        "last_quarter_mb": median(learning[-quarter:] or learning) / 1e6,
        "seconds": time.monotonic() - began,
        "accuracy": json.loads(out)["acc"],
    }


def main(say: Callable[[str], None]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    work: Path = parser.parse_args().work
    result: dict[str, Any] = {}
    for count in COUNTS:
        tasks = draw(work / str(count), count)
        for way, memory_gb in (("streamed", 0.0), ("in_memory", 4.0)):
            run = work / f"run-{os.getpid()}-{count}-{way}"
            found = learn(tasks, run, memory_gb)
            result[f"{count} {way}"] = found
            say(f"{count} {way}: " + "  ".join(f"{key} {value:.1f}" for key, value in found.items()))
    write_result("large_data", [], result, SETTINGS)


if __name__ == "__main__":
    main(partial(print, flush=True))
