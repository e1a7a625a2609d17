"""L8: two hundred permutations of MNIST with fcn3 (1,000 hidden units), and what happens when every weight is claimed.

    OMP_NUM_THREADS=1 python benchmarks/two_hundred.py --work DIR   what results/two_hundred/ does not hold yet
    python benchmarks/two_hundred.py --work DIR --runs recipe       a part of it, as another process may do meanwhile
    python benchmarks/two_hundred.py --work DIR --tasks 60          fewer tasks; printed, not recorded

`recipe` is the recipe `npmnist` as it is: 200 tasks. The others are about what helps when weights run out: forty tasks
on a network of 300 hidden units, which is full soon; density, scores and width vary. Everything a user waits for counts
as time: comparing, learning, measuring, saving. It is the processor's, not the clock's, since this takes an hour and
other work may go on; with one thread (OMP_NUM_THREADS=1) both are the same on a quiet machine. Seconds at a task are
the median of the nine tasks around it. Draws docs/pictures/two_hundred.png.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import matplotlib.pyplot as plt
from record import measure_once, measured, read_options, write_result

from etcl_deploy.bundle.bundle import load_bundle
from etcl_deploy.bundle.summary import summarize
from etcl_deploy.config import Config
from etcl_deploy.learn.events import Event, TaskDone
from etcl_deploy.runs.session import train
from etcl_deploy.runs.to_bundle import bundle_run
from etcl_deploy.settings import load_recipe

PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "two_hundred.png"
FEW = {"tasks": 40, "width": 300}
# What differs from the recipe. The paper has density 0.5 and carries scores on.
VARIANTS: dict[str, dict[str, Any]] = {
    "recipe": {},
    "300 units, density 0.5, scores carried": {**FEW, "density": 0.5, "scores": "carry"},
    "300 units, density 0.5, fresh scores": {**FEW, "density": 0.5},
    "300 units, density 0.1, fresh scores": {**FEW, "density": 0.1},
    "600 units, density 0.5, fresh scores": {**FEW, "width": 600, "density": 0.5},
}


QUICK = {"tasks": 12, "width": 300}


def config_of(name: str) -> Config:
    """The recipe with one thing changed."""
    return load_recipe("npmnist").with_values(VARIANTS[name])


def learn(config: Config, work: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """One run: accuracy, time and claimed share by task, and what its bundle takes."""
    seconds: list[float] = []
    claimed: list[float] = []
    began = time.process_time()

    def note(event: Event) -> None:
        nonlocal began
        if isinstance(event, TaskDone):
            now = time.process_time()
            seconds.append(now - began)
            claimed.append(event.run.network.claimed())
            say(f"{len(seconds)}: {event.run.matrix[-1][-1]:.2f} %, {seconds[-1]:.1f} s, {claimed[-1]:.1%} claimed")
            began = now

    run = train(config, None, work / "run", "cpu", note)
    bundle_run(run, config, work / "x.etcl")
    summary = summarize(load_bundle(work / "x.etcl"), work / "x.etcl")
    final = [value for value in run.matrix[-1] if value is not None]
    count, few = len(final), min(20, len(final) // 2)  # of so few tasks, halves
    return {
        "tasks": count,
        "acc": fmean(final),
        "acc_first_20": fmean(final[:few]),
        "acc_last_20": fmean(final[-few:]),
        "bwt": run.summary(config)["bwt"],
        "similar_pairs": sum(len(names) for names in run.summary(config)["similar"].values()),
        "seconds_task_20": around(seconds, 20),
        f"seconds_task_{count}": around(seconds, count),
        "bundle_bytes": summary["bytes"],
        "mask_bits_per_weight": fmean(task["mask_bits_per_weight"] for task in summary["tasks"]),
        "run_bytes": sum(path.stat().st_size for path in (work / "run").rglob("*") if path.is_file()),
        "accuracies": final,
        "seconds": seconds,
        "claimed": claimed,
    }


def around(values: list[float], place: int) -> float:
    """The median of the nine values around the one at `place`, counted from 1, or the last nine."""
    first = max(0, min(place - 5, len(values) - 9))
    return median(values[first : first + 9])


def draw(runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Accuracy and claimed share over tasks, and seconds a task of the recipe."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for name, run in runs.items():
        numbers = range(1, run["tasks"] + 1)
        smooth = [fmean(run["accuracies"][max(0, n - 5) : n + 5]) for n in numbers]
        left.plot(numbers, smooth, label=name)
        middle.plot(numbers, [100 * share for share in run["claimed"]], label=name)
    right.plot(range(1, runs["recipe"]["tasks"] + 1), runs["recipe"]["seconds"], ".", markersize=3)
    right.set(title="seconds for a task (recipe)", xlabel="task", ylim=(0, None))
    left.set(title="accuracy at the end, % (mean of ten)", xlabel="task")
    middle.set(title="weights claimed, %", xlabel="task", ylim=(0, 102))
    left.legend(fontsize=8)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)


def main(say: Callable[[str], None]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--runs", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--tasks", type=int)
    arguments = read_options(parser, runs=["recipe"])
    if arguments.quick:
        found = learn(config_of("recipe").with_values(QUICK), arguments.work, partial(_of, "recipe", say))
        write_result("two_hundred", ["L8"], {"runs": {"recipe": found}}, QUICK)
        return
    if arguments.tasks:
        for name in arguments.runs:
            config = config_of(name).with_values({"tasks": arguments.tasks})
            found = learn(config, arguments.work / name, partial(_of, name, say))
            say(f"{name}: first 20 {found['acc_first_20']:.2f} %, last 20 {found['acc_last_20']:.2f} %")
        return
    for name in arguments.runs:
        measure = partial(learn, config_of(name), arguments.work / name, partial(_of, name, say))
        measure_once(measure, "two_hundred", name, config_of(name).as_json())
    found = measured("two_hundred", lambda name: config_of(name).as_json())
    runs = {name: found[name] for name in VARIANTS if name in found}
    kept = ("accuracies", "seconds", "claimed", "config", "command", "versions", "machine")
    result = {name: {key: value for key, value in run.items() if key not in kept} for name, run in runs.items()}
    write_result("two_hundred", ["L8"], {"runs": result}, load_recipe("npmnist").as_json())
    if "recipe" in runs:
        draw(runs)


def _of(name: str, say: Callable[[str], None], words: str) -> None:
    say(f"{name} {words}")


if __name__ == "__main__":
    main(partial(print, flush=True))
