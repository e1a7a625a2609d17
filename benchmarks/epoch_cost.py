"""L6: learning a task with similar tasks before it / learning it with none, everything included.

    python benchmarks/epoch_cost.py

Comparing, starting warm, embedding the items under every similar task and improving every head are all counted, over
the recipe's number of epochs. With fewer (`--epochs 10`) the ratio is larger, since most of this is done once a task.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from statistics import median

from record import read_options, write_result

from etcl_deploy.config import Learning
from etcl_deploy.core.task import Task
from etcl_deploy.learn.events import Event, TaskDone, TaskStarted
from etcl_deploy.learn.run import Run
from etcl_deploy.learn.trainer import learn_sequence
from etcl_deploy.runs.build import build_network
from etcl_deploy.runs.task_loading import find_tasks
from etcl_deploy.settings import load_recipe


def seconds_of_last(before: Run, tasks: Sequence[Task], options: Learning) -> float:
    """How long the last of the tasks takes after the others."""
    run = deepcopy(before)
    clock: list[float] = []

    def note(event: Event) -> None:
        if isinstance(event, TaskStarted | TaskDone):
            clock.append(time.perf_counter())

    learn_sequence(run.network, tasks[-1:], options, note, before=run, earlier=tasks[:-1])
    return clock[1] - clock[0]


def main(say: Callable[[str], None]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--similar", type=int, default=5, help="tasks before it, all similar")
    parser.add_argument("--epochs", type=int, default=load_recipe("femnist1").learning.epochs)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--width", type=int, help="of another network than the recipe's")
    arguments = read_options(parser, similar=3, epochs=6, width=8)
    config = load_recipe("femnist1").with_values({"epochs": arguments.epochs, "width": arguments.width})
    tasks = find_tasks(config, None).tasks[: arguments.similar + 1]
    # The tasks before it take the same time however well they were learned.
    before = learn_sequence(build_network(config), tasks[:-1], replace(config.learning, epochs=1))
    sides = [config.with_values({"similar": similar}).learning for similar in ("all", "none")]
    ratios, times = [], []
    for _ in range(arguments.repeats):
        pair = [seconds_of_last(before, tasks, options) for options in sides]
        times.append(pair)
        ratios.append(pair[0] / pair[1])
        say(f"with {arguments.similar} similar tasks {pair[0]:.1f} s, with none {pair[1]:.1f} s: {ratios[-1]:.3f}")
    result = {
        "ratio": median(ratios),
        "ratios": [min(ratios), max(ratios)],
        "ours": median(pair[0] for pair in times),
        "other": median(pair[1] for pair in times),
        "unit": "seconds a task",
        "repeats": arguments.repeats,
    }
    say(f"ratio {result['ratio']:.3f}")
    write_result(
        "epoch_cost", ["L6"], result, {name: getattr(arguments, name) for name in ("similar", "epochs", "width")}
    )


if __name__ == "__main__":
    main(partial(print, flush=True))
