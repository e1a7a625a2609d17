"""What each part of transfer brings, ours and the paper's, one at a time (docs/transfer.md).

    python benchmarks/research/transfer.py
    python benchmarks/research/transfer.py --choices defaults "advice=0" --seeds 0      one of them, beside the defaults

The first tasks of F-EMNIST-1 on a narrow network with few epochs, three seeds; a tenth of every task's training items
stands in for its test items, which are not looked at. Every row learns at the same rates, epochs and batches, with the
same augmentation, but for those that name one of these: `paper's transfer` has all of the paper's transfer and
similarity at our rates, `preset=paper` is the paper to the letter. With `--record` every choice is a part of its own.
`python benchmarks/research/transfer.py --table` prints what is recorded, as in docs/transfer.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))

from choices import without_test
from record import in_words, new_parser, read_results, say, spread, write_result

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


def table(results: Mapping[str, Any]) -> Iterator[str]:
    """What is recorded as lines of Markdown; the last column seed by seed."""
    yield "| changed | tasks 2 to 5 as learned | ACC | BWT | ACC, against the defaults |"
    yield "|---" * 5 + "|"
    for choice in (choice for choice in CHOICES if choice in results):
        rows = results[choice]["result"]
        later, acc, bwt = (spread([row[key] for row in rows.values()]) for key in ("later", "acc", "bwt"))
        against = spread([row["acc"] - results["defaults"]["result"][seed]["acc"] for seed, row in rows.items()])
        cells = [f"{mean['mean']:.1f} ± {mean['deviation'] or 0:.1f}" for mean in (later, acc)]
        gained = "" if choice == "defaults" else f"{against['mean']:+.1f} ± {against['deviation'] or 0:.1f}"
        yield f"| `{choice}` | {cells[0]} | {cells[1]} | {bwt['mean']:+.3f} | {gained} |"


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--choices", nargs="+", default=CHOICES, choices=CHOICES, metavar="CHOICE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--table", action="store_true", help="print what is recorded, and measure nothing")
    arguments = parser.parse_args()
    if arguments.table:
        say("\n".join(table(read_results("transfer"))))
        return
    torch.set_num_threads(1)
    for choice in arguments.choices:
        rows = {f"seed {seed}": measure(choice, seed) for seed in arguments.seeds}
        means = {key: spread([row[key] for row in rows.values()]) for key in ("acc", "later", "bwt")}
        say(f"{choice:40s} " + "  ".join(f"{key} {in_words(value)}" for key, value in means.items()))
        if arguments.record:
            write_result("transfer", choice, rows, {**SMALL, "changed": choice})


if __name__ == "__main__":
    main()
