"""What decided the defaults and each method's settings: every choice changed alone, measured on validation items.

    python benchmarks/choices.py                       what results/choices/ does not hold yet, then the table
    python benchmarks/choices.py --choices "model=most_similar"     one of them

A tenth of every task's training items stands in for its test items, which are not looked at. F-EMNIST-1 with half the
recipe's epochs: ten tasks for the choices of ETCL, three where methods are compared (`method=...`; with `pmnist+`
before it: that recipe). `one` is what forward transfer is measured against: three tasks, all of the epochs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import Any

import torch
from record import in_words, measure_once, measured, spread, write_result

from etcl_deploy.config import Config
from etcl_deploy.core.task import Task
from etcl_deploy.learn.methods import METHODS as LEARNERS
from etcl_deploy.learn.task_training import seeded
from etcl_deploy.learn.trainer import learn_sequence
from etcl_deploy.runs.build import build_network
from etcl_deploy.runs.task_loading import find_tasks
from etcl_deploy.settings import load_recipe, parse_settings

LOWER, HIGHER = "+learning_rate=0.001", "+learning_rate=0.01"
METHODS = [
    *(f"method={method}{rate}" for method in LEARNERS for rate in ("", LOWER)),
    *(f"method={method}{HIGHER}" for method in ("wsn", "piggyback", "gpm")),
    *(f"method=ewc+ewc_strength={strength}" for strength in (10, 1000, 10000)),
    *(f"method=gpm+gpm_energy={energy}" for energy in (0.9, 0.99)),
    *(f"method=hat+hat_{change}" for change in ("rate=10", "rate=100", "thrift=0.1")),
]
CHOICES = [
    "default",
    "model=most_similar",
    "alignment=once",
    "alignment=every_step",
    "alignment=off",
    "warm_rate=1",
    "head_energy=0.999",
    "head_energy=0.999+warm_rate=1",
    "head_energy=0.999+alignment=off",
    "warm_rate=0.1",
    "pull=0",
    "learning_rate=0.001",
    "learning_rate=0.01",
    "backward=unchecked",
    "backward=off",
    "scores=fresh",
    "rotation=0+zoom=0+shift=0",
    "one",
    "one+learning_rate=0.001",
    "one+learning_rate=0.01",
    *METHODS,
    *(f"pmnist+{choice}" for choice in METHODS),
]
EPOCHS = {"femnist1": 15, "pmnist": 5}
ONE: dict[str, object] = {"density": 1.0, "similar": "none", "epochs": 30, "tasks": 3}


def without_test(task: Task, number: int, seed: int) -> Task:
    """The task with a part of its training items, another one for every seed, in the place of its test items."""
    rest, held = task.training.split(0.1, seeded(seed, number, 99_999))
    return Task(task.name, task.classes, rest.images, rest.labels, held.images, held.labels)


def config_of(name: str) -> Config:
    """The settings of a result named CHOICE-SEED."""
    choice, _, seed = name.rpartition("-")
    words = choice.split("+")
    recipe = "pmnist" if "pmnist" in words else "femnist1"
    kind = ONE if "one" in words else {"tasks": 3} if "method=" in choice else {}
    changed = kind | parse_settings([word for word in words if "=" in word])
    return load_recipe(recipe).with_values({"epochs": EPOCHS[recipe], "seed": int(seed)} | changed)


def measure(config: Config) -> dict[str, Any]:
    """ACC and BWT on validation items, and what each task had when it was learned."""
    seed = config.learning.seed
    tasks = [without_test(task, number, seed) for number, task in enumerate(find_tasks(config, None).tasks)]
    if config.network.density == 1:
        learned = [learn_sequence(build_network(config), [task], config.learning).matrix[0][0] for task in tasks]
        return {"acc": fmean(accuracy for accuracy in learned if accuracy is not None), "bwt": 0.0, "learned": learned}
    summary = learn_sequence(build_network(config), tasks, config.learning).summary(config)
    learned = [row[-1] for row in summary["matrix"]]
    kept = {name: sum(change["kept"] > 0 for change in changes) for name, changes in summary["heads"].items()}
    return {"acc": summary["acc"], "bwt": summary["bwt"], "learned": learned, "heads_improved": kept}


def main(say: Callable[[str], None]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choices", nargs="+", default=CHOICES, choices=CHOICES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for seed in arguments.seeds:
        for choice in arguments.choices:
            config = config_of(f"{choice}-{seed}")
            measure_once(partial(measure, config), "choices", f"{choice}-{seed}", config.as_json())
    found = measured("choices", lambda name: config_of(name).as_json())
    table = {}
    for choice in CHOICES:
        rows = [part for name, part in found.items() if name.rpartition("-")[0] == choice]
        if rows:
            table[choice] = {key: spread([row[key] for row in rows]) for key in ("acc", "bwt")}
            say(f"{choice:28s} ACC {in_words(table[choice]['acc'])}  BWT {in_words(table[choice]['bwt'])}")
    write_result("choices", [], table, config_of("default-0").as_json())


if __name__ == "__main__":
    main(partial(print, flush=True))
