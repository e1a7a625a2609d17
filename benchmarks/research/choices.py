"""How the defaults and each method's settings were chosen: each choice changed alone, measured on validation items.

    python benchmarks/research/choices.py
    python benchmarks/research/choices.py --choices "model=most_similar" --seeds 0      one of them

A tenth of every task's training items stands in for its test items, which are not looked at. F-EMNIST-1 with half the
recipe's epochs: ten tasks for the choices of ETCL, three where methods are compared (`method=...`; with `pmnist+`
before it: that recipe). `one` is what forward transfer is measured against: three tasks, all of the epochs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

import torch

from etcl_deploy.config import Config
from etcl_deploy.core.task import Task
from etcl_deploy.learn.methods import METHODS as LEARNERS
from etcl_deploy.learn.task_training import seeded
from etcl_deploy.learn.trainer import learn_sequence
from etcl_deploy.runs.build import build_network
from etcl_deploy.runs.task_loading import find_tasks
from etcl_deploy.settings import load_recipe, parse_settings

sys.path.append(str(Path(__file__).parents[1]))

from record import in_words, new_parser, say, spread, write_result

LOWER, HIGHER = "+learning_rate=0.001", "+learning_rate=0.01"
METHODS = [
    *(f"method={method}{rate}" for method in LEARNERS for rate in ("", LOWER)),
    *(f"method={method}{HIGHER}" for method in ("wsn", "piggyback", "gpm")),
    *(f"method=ewc+ewc_strength={strength}" for strength in (10, 1000, 10000)),
    *(f"method=gpm+gpm_energy={energy}" for energy in (0.9, 0.99)),
    *(f"method=hat+hat_{change}" for change in ("rate=10", "rate=100", "c=0.1")),
]
CHOICES = [
    "default",
    "model=most_similar",
    "alignment=once",
    "alignment=every_step",
    "alignment=off",
    "warm_rate=0.33",
    "advice=0",
    "advice=0.7",
    "agreement=0",
    "probe_epochs=0",
    "pull=0",
    "learning_rate=0.001",
    "learning_rate=0.01",
    "backward=in_loop",
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


def config_of(choice: str, seed: int) -> Config:
    """The settings of a choice."""
    words = choice.split("+")
    recipe = "pmnist" if "pmnist" in words else "femnist1"
    kind = ONE if "one" in words else {"tasks": 3} if "method=" in choice else {}
    changed = kind | parse_settings([word for word in words if "=" in word])
    return load_recipe(recipe).with_values({"epochs": EPOCHS[recipe], "seed": seed} | changed)


def measure(config: Config) -> dict[str, float]:
    """ACC and BWT on validation items."""
    seed = config.learning.seed
    tasks = [without_test(task, number, seed) for number, task in enumerate(find_tasks(config, None).tasks)]
    if config.network.density == 1:
        alone = [learn_sequence(build_network(config), [task], config.learning).matrix[0][0] for task in tasks]
        return {"acc": fmean(accuracy for accuracy in alone if accuracy is not None), "bwt": 0.0}
    summary = learn_sequence(build_network(config), tasks, config.learning).summary(config)
    return {"acc": summary.acc, "bwt": summary.bwt}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--choices", nargs="+", default=CHOICES, choices=CHOICES, metavar="CHOICE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    table = {}
    for choice in arguments.choices:
        rows = [measure(config_of(choice, seed)) for seed in arguments.seeds]
        table[choice] = {key: spread([row[key] for row in rows]) for key in ("acc", "bwt")}
        say(f"{choice:28s} ACC {in_words(table[choice]['acc'])}  BWT {in_words(table[choice]['bwt'])}")
    if arguments.record:
        write_result("choices", "choices", table, config_of("default", 0).as_json())


if __name__ == "__main__":
    main()
