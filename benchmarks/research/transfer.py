"""What each part of transfer brings, ours and the paper's, one at a time (docs/method.md).

    python benchmarks/research/transfer.py
    python benchmarks/research/transfer.py --choices defaults "advice=0" --seeds 0      one of them, beside the defaults

The first tasks of F-EMNIST-1 on a narrow network with few epochs, three seeds; a tenth of every task's training items
stands in for its test items, which are not looked at. Every row learns at the same rates, epochs and batches, with the
same augmentation, but for those that name one of these: `paper's transfer` has all of the paper's transfer and
similarity at our rates, `preset=paper` is the paper to the letter.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))

from choices import without_test
from record import in_words, new_parser, say, spread, write_result

from etcl_deploy.config import Config
from etcl_deploy.learn.trainer import learn_sequence
from etcl_deploy.runs.build import build_network
from etcl_deploy.runs.task_loading import find_tasks
from etcl_deploy.settings import load_recipe, parse_settings

SMALL: dict[str, Any] = {"width": 10, "tasks": 5, "epochs": 10}
OURS = ("optimizer", "learning_rate", "schedule", "momentum", "rotation", "zoom", "shift")  # what is not transfer
PAPERS_TRANSFER = "paper's transfer"
CHOICES = (
    "defaults",
    *("similar=none", "similar=all"),
    *("alignment=off", "alignment=once", "alignment=every_step", "model=most_similar", "model=latest"),
    *("probe_epochs=0", "warm_rate=0.33"),
    *("advice=0", "advice=0.7", "pull=0"),
    *("backward=off", "backward=in_loop"),
    *("agreement=0", "distance=centred_transport", "distance=flat_bases+rule=paper"),
    *("scores=fresh", "learning_rate=0.003", "learning_rate=0.0003", "schedule=constant"),
    *("optimizer=sgd+learning_rate=0.1+momentum=0", "optimizer=sgd+learning_rate=0.03"),
    "rotation=0+zoom=0+shift=0",
    *(PAPERS_TRANSFER, f"{PAPERS_TRANSFER}+similar=all", "preset=paper", "preset=paper+similar=all"),
)


def config_of(choice: str, seed: int) -> Config:
    """The settings of a choice."""
    ours = load_recipe("femnist1").with_values(SMALL)
    words = choice.split("+")
    config = ours
    if words[0] in ("preset=paper", PAPERS_TRANSFER):
        config = load_recipe("femnist1", preset="paper").with_values({**SMALL, "size": 28, "channels": 1})
    if words[0] == PAPERS_TRANSFER:
        config = config.with_values({name: getattr(ours.learning, name) for name in OURS})
    changed = parse_settings([word for word in words if "=" in word and not word.startswith("preset")])
    return config.with_values({**changed, "seed": seed})


def measure(choice: str, seed: int) -> dict[str, float]:
    """Accuracy at the end, as each task was learned, and what later tasks changed, on validation items."""
    config = config_of(choice, seed)
    tasks = [without_test(task, number, seed) for number, task in enumerate(find_tasks(config, None).tasks)]
    run = learn_sequence(build_network(config), tasks, config.learning)
    learned = [row[-1] or 0.0 for row in run.matrix]
    at_end = [value or 0.0 for value in run.matrix[-1]]
    return {"acc": fmean(at_end), "later": fmean(learned[1:]), "bwt": run.summary(config).bwt or 0.0}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--choices", nargs="+", default=CHOICES, choices=CHOICES, metavar="CHOICE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = {}
    for choice in arguments.choices:
        rows = [measure(choice, seed) for seed in arguments.seeds]
        table[choice] = {key: spread([row[key] for row in rows]) for key in rows[0]}
        say(f"{choice:40s} " + "  ".join(f"{key} {in_words(value)}" for key, value in table[choice].items()))
    if arguments.record:
        write_result("transfer", "transfer", table, {**SMALL, "seeds": arguments.seeds})


if __name__ == "__main__":
    main()
