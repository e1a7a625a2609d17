"""Two hundred tasks on one network (L8), and images that do not fit into memory.

    OMP_NUM_THREADS=1 python benchmarks/scale.py --work DIR
    python benchmarks/scale.py --work DIR --parts large_data

`two_hundred`: the recipe `npmnist` as it is, two hundred permutations of MNIST with fcn3 (1,000 hidden units). The
other runs are about what helps when weights run out: forty tasks on a network of 300 hidden units, which is full soon.
All that a user waits for counts as time: comparing, learning, measuring, saving. It is the processor's, not the
clock's, since this takes an hour and other work may go on. Seconds at a task are the median of the nine tasks around
it. Draws docs/pictures/two_hundred.png.

`large_data`: folders of small images (handwritten digits of scikit-learn, each with noise of its own, 32 x 32 PNG), one
task from each with `etcl train`: streamed (`memory_gb=0`) and in memory. Memory is the proportional set size of the
command and of the processes that read for it, looked at twice a second: its peak, and the median of the second and of
the last quarter of the time it learns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import psutil
from PIL import Image
from record import Figure, learned, new_parser, say, show, write_result
from served import pss
from sklearn.datasets import load_digits

from etcl_deploy.bundle.bundle import load_bundle
from etcl_deploy.bundle.summary import summarize
from etcl_deploy.learn.events import Event, TaskDone
from etcl_deploy.runs.to_bundle import bundle_run
from etcl_deploy.settings import load_recipe

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "two_hundred.png"
FEW = {"tasks": 40, "width": 300}
VARIANTS: dict[str, dict[str, Any]] = {  # what differs from the recipe
    "recipe": {},
    "300 units, density 0.5, scores carried": {**FEW, "density": 0.5, "scores": "carry"},
    "300 units, density 0.5, fresh scores": {**FEW, "density": 0.5},
    "300 units, density 0.1, fresh scores": {**FEW, "density": 0.1},
    "600 units, density 0.5, fresh scores": {**FEW, "width": 600, "density": 0.5},
}
COUNTS = (25_000, 50_000, 100_000)
SETTINGS = {"backbone": "fcn3", "width": 100, "channels": 1, "size": 32, "epochs": 6, "batch_size": 64}


def two_hundred(name: str, changed: Mapping[str, Any], work: Path) -> dict[str, Any]:
    """One run: accuracy, time and claimed share by task, and what its bundle takes."""
    seconds: list[float] = []
    claimed: list[float] = []
    clock = [time.process_time()]

    def note(event: Event) -> None:
        if isinstance(event, TaskDone):
            clock.append(time.process_time())
            seconds.append(clock[-1] - clock[-2])
            claimed.append(event.run.network.claimed())
            say(f"{name} {len(seconds)}: {event.run.matrix[-1][-1]:.2f} %, {show(s=seconds[-1], claimed=claimed[-1])}")

    config = load_recipe("npmnist").with_values({**VARIANTS[name], **changed})
    stored = learned(work / "run", config, note)
    bundle_run(stored, work / "x.etcl")
    summary, bundled = stored.summary(), summarize(load_bundle(work / "x.etcl"), work / "x.etcl")
    final = summary.matrix[-1]
    count, few = len(final), min(20, len(final) // 2)  # of so few tasks, halves
    return {
        "tasks": count,
        "acc": fmean(final),
        "acc_first_20": fmean(final[:few]),
        "acc_last_20": fmean(final[-few:]),
        "acc_first_5": fmean(final[:5]),
        "claimed_at_end": claimed[-1],
        "bwt": summary.bwt,
        "similar_pairs": sum(len(names) for names in summary.similar.values()),
        "seconds_task_20": _around(seconds, 20),
        f"seconds_task_{count}": _around(seconds, count),
        "bundle_bytes": bundled["bytes"],
        "mask_bits_per_weight": fmean(task["mask_bits_per_weight"] for task in bundled["tasks"]),
        "run_bytes": sum(path.stat().st_size for path in (work / "run").rglob("*") if path.is_file()),
        "accuracies": final,
        "seconds": seconds,
        "claimed": claimed,
    }


def _around(values: list[float], place: int) -> float:
    """The median of the nine values around the one at `place`, counted from 1, or the last nine."""
    first = max(0, min(place - 5, len(values) - 9))
    return median(values[first : first + 9])


def draw(runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Accuracy and claimed share over tasks, and seconds a task of the recipe."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for name, run in runs.items():
        numbers = range(1, run["tasks"] + 1)
        left.plot(numbers, [fmean(run["accuracies"][max(0, n - 5) : n + 5]) for n in numbers], label=name)
        middle.plot(numbers, [100 * share for share in run["claimed"]], label=name)
    right.plot(range(1, runs["recipe"]["tasks"] + 1), runs["recipe"]["seconds"], ".", markersize=3)
    right.set(title="seconds for a task (recipe)", xlabel="task", ylim=(0, None))
    left.set(title="accuracy at the end, % (mean of ten)", xlabel="task")
    middle.set(title="weights claimed, %", xlabel="task", ylim=(0, 102))
    left.legend(fontsize=8)
    figure.savefig(PICTURE, dpi=110)


def draw_images(folder: Path, count: int) -> Path:
    """A folder with one task of `count` images, a tenth of them to test with; one that is there is kept."""
    if (folder / "done").exists():
        return folder / "tasks"
    digits, chance = load_digits(), np.random.default_rng(0)
    for number in range(count):
        place = number % len(digits.images)
        pixels = np.kron(digits.images[place] * 12, np.ones((4, 4))) + chance.integers(0, 60, (32, 32))
        part = "test" if number % 10 == 0 else "train"
        path = folder / "tasks" / "digits" / part / str(digits.target[place]) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(path, compress_level=1)
    (folder / "done").touch()
    return folder / "tasks"


def large_data(tasks: Path, run: Path, memory_gb: float) -> dict[str, Any]:
    """One task, learned by the command users have; what it took."""
    changed = {**SETTINGS, "memory_gb": memory_gb}
    words = [word for key, value in changed.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "etcl_deploy", "train", "--data", tasks, "--run", run, "--device", "cpu", *words]
    began = time.monotonic()
    started = psutil.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True, cwd=run.parent)
    seen: list[int] = []
    learning: list[int] = []
    while started.poll() is None:
        try:
            seen.append(sum(pss(process) for process in (started, *started.children(recursive=True))))
        except psutil.Error:  # one has ended meanwhile
            continue
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


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """The recorded results, held against their targets."""
    row = results["two_hundred"]["recipe"]
    what = "200 permuted tasks, fcn3: points the last 20 tasks are below the first 20"
    note = f"task 20 took {row['seconds_task_20']:.1f} s, task 200 {row['seconds_task_200']:.1f} s"
    yield Figure("L8", what, row["acc_first_20"] - row["acc_last_20"], "<= 3", "<= 1", note=note)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parts = ("two_hundred", "large_data")
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument("--runs", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--tasks", type=int, help="fewer of them, to try it")
    parser.add_argument("--images", type=int, nargs="+", default=COUNTS)
    arguments = parser.parse_args()
    work: Path = arguments.work.resolve()
    if "two_hundred" in arguments.parts:
        changed = {"tasks": arguments.tasks} if arguments.tasks else {}
        runs = {name: two_hundred(name, changed, work / name) for name in arguments.runs}
        for name, row in runs.items():
            say(f"{name}: {show(**{key: value for key, value in row.items() if not isinstance(value, list)})}")
        if arguments.record:
            draw(runs)
            result = {n: {key: v for key, v in row.items() if not isinstance(v, list)} for n, row in runs.items()}
            write_result("scale", "two_hundred", result, load_recipe("npmnist").as_json())
    if "large_data" in arguments.parts:
        result = {}
        for count in arguments.images:
            tasks = draw_images(work / str(count), count)
            for way, memory_gb in (("streamed", 0.0), ("in_memory", 4.0)):
                row = large_data(tasks, work / f"run-{os.getpid()}-{count}-{way}", memory_gb)
                result[f"{count} {way}"] = row
                say(f"{count} {way}: {show(**row)}")
        if arguments.record:
            write_result("scale", "large_data", result, SETTINGS)


if __name__ == "__main__":
    main()
