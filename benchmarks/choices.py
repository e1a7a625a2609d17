"""What decided the defaults: F-EMNIST-1, each choice changed alone, measured on validation items.

    python benchmarks/choices.py                       what results/choices/ does not hold yet, then the table
    python benchmarks/choices.py --choices "model=most_similar"     one of them

A tenth of every task's training items stands in for its test items, which are not looked at. Half the recipe's epochs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from record import measure_once, measured, write_result

from etcl_deploy.build import build_network
from etcl_deploy.learn.lesson import seeded
from etcl_deploy.learn.task import Task
from etcl_deploy.learn.trainer import learn_sequence
from etcl_deploy.origins import load_tasks
from etcl_deploy.settings import load_recipe, parse_settings

CHOICES = [
    "",
    "model=most_similar",
    "alignment=once",
    "alignment=off",
    "pull=0",
    "backward=off",
    "head_energy=0.9",
    "head_energy=0.99",
    "head_agreement=0",
    "scores=fresh",
    "rotation=0 zoom=0 shift=0",
]


def without_test(task: Task, number: int) -> Task:
    """The task with a part of its training items in the place of its test items."""
    rest, held = task.training.split(0.1, seeded(0, number, 99_999))
    return Task(task.name, task.classes, rest.images, rest.labels, held.images, held.labels)


def measure(choice: str, epochs: int, seed: int) -> dict[str, Any]:
    """ACC and BWT on validation items, and what each task had when it was learned."""
    config = load_recipe("femnist1").with_values({"epochs": epochs, "seed": seed} | parse_settings(choice.split()))
    tasks = [without_test(task, number) for number, task in enumerate(load_tasks(config, None))]
    summary = learn_sequence(build_network(config), tasks, config.learning).summary(config)
    learned = [row[-1] for row in summary["matrix"]]
    kept = {name: sum(change["kept"] > 0 for change in changes) for name, changes in summary["heads"].items()}
    return {"choice": choice, "acc": summary["acc"], "bwt": summary["bwt"], "learned": learned, "heads_improved": kept}


def main(say: Callable[[str], None]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choices", nargs="+", default=CHOICES, choices=CHOICES)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    settings = {"epochs": arguments.epochs, "seed": arguments.seed}
    for choice in arguments.choices:
        name = choice.replace(" ", "_") or "default"
        measure_once(partial(measure, choice, arguments.epochs, arguments.seed), "choices", name, settings)
    found = list(measured("choices", lambda name: settings).values())
    for row in sorted(found, key=lambda row: -row["acc"]):
        say(f"{row['choice'] or 'default':28s} ACC {row['acc']:.2f}  BWT {row['bwt']:+.4f}")
    write_result("choices", [], found, settings)


if __name__ == "__main__":
    main(partial(print, flush=True))
