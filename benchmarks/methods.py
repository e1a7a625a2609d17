"""Methods side by side on three sequences, three seeds each: the tables of docs/results.md.

    python benchmarks/methods.py --work DIR        what DIR does not hold yet is learned (13 hours on one core)
    python benchmarks/methods.py --work DIR --recipes pmnist --methods etcl wsn       a part of it
    python benchmarks/methods.py                   the tables again, from results/methods/

Parts may be learned by several processes at once, of different methods. When all is there, results/methods/ holds a
table (.csv) and every run's figures (.json) of each sequence. It is `etcl compare`, F-EMNIST-1 with half its epochs.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from record import RESULTS, circumstances

from etcl_deploy.compare import TABLE, compare
from etcl_deploy.learn.events import Event, TaskDone
from etcl_deploy.learn.methods import METHODS
from etcl_deploy.settings import load_recipe

SEQUENCES: dict[str, dict[str, Any]] = {"femnist1": {"epochs": 15}, "pmnist": {"tasks": 5}, "mixed": {}}
OWN = {("femnist1", "etcl"): {"learning_rate": 0.001}}  # better on validation items with so few epochs: choices.py
SEEDS = 3
FOLDER = RESULTS / "methods"
KEPT = ("method", "seed", "tasks", "matrix", "acc", "fwt", "bwt", "claimed", "similar", "seconds", "bytes", "versions")
# ACC, FWT and BWT as the paper states them: F-EMNIST-1; PMNIST with ten tasks, without FWT. Its mixed sequences are
# others.
PAPER: dict[str, dict[str, tuple[float, float | None, float | None]]] = {
    "femnist1": {
        "etcl": (80.32, 0.0948, 0.0141),
        "wsn": (78.10, 0.0825, 0.0),
        "supsup": (66.92, -0.0293, 0.0),
        "gpm": (75.18, 0.0372, 0.0218),
        "one": (69.85, None, None),
    },
    "pmnist": {
        "etcl": (97.11, None, 0.0),
        "wsn": (96.41, None, 0.0),
        "supsup": (96.03, None, 0.0),
        "piggyback": (95.73, None, 0.0),
        "hat": (90.35, None, 0.0),
        "gpm": (93.91, None, -0.03),
        "ewc": (89.97, None, -0.04),
        "one": (96.70, None, None),
    },
    "mixed": {},
}


def learn(recipe: str, methods: list[str], work: Path, say: Callable[[str], None]) -> None:
    """Learn with these methods; if they are all there are, keep the figures."""
    configs = {}
    for method in methods:
        changed = {**SEQUENCES[recipe], **OWN.get((recipe, method), {})}
        configs[method] = load_recipe(recipe, method).with_values(changed)

    def tell(event: Event) -> None:
        if isinstance(event, TaskDone):
            say(f"  {event.task} {event.run.matrix[-1][-1]:.1f} %")

    made = compare(configs, None, SEEDS, work / recipe, "cpu", tell, say, lambda text: say(f"{recipe}: {text}"))
    if methods == list(METHODS):
        record = made.as_json()
        record["runs"] = [{key: run[key] for key in KEPT} for run in record["runs"]]
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / f"{recipe}.json").write_text(json.dumps({**record, **circumstances()}) + "\n")
        (FOLDER / f"{recipe}.csv").write_bytes((work / recipe / TABLE).read_bytes())


def table(recipe: str) -> list[str]:
    """The figures of a sequence, the best ACC first, as lines of Markdown."""
    with (FOLDER / f"{recipe}.csv").open(newline="") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: -float(row["acc_mean"]))
    lines = ["| method | ACC, % | FWT | BWT | minutes | MB | the paper's ACC | FWT | BWT |", "|---" * 9 + "|"]
    for row in rows:
        theirs = PAPER[recipe].get(row["method"], (None, None, None))
        minutes, size = float(row["seconds_mean"]) / 60, float(row["bytes_mean"]) / 1e6
        ours = [_figure(row, "acc", "{:.2f}"), _figure(row, "fwt", "{:+.3f}"), _figure(row, "bwt", "{:+.3f}")]
        paper = [_shown(value, form) for value, form in zip(theirs, ("{:.2f}", "{:+.3f}", "{:+.3f}"), strict=True)]
        lines.append("| " + " | ".join([f"`{row['method']}`", *ours, f"{minutes:.1f}", f"{size:.2f}", *paper]) + " |")
    return lines


def _figure(row: Mapping[str, str], name: str, form: str) -> str:
    mean, deviation = row[f"{name}_mean"], row[f"{name}_deviation"]
    return f"{form.format(float(mean))} ± {form.format(float(deviation)).lstrip('+')}" if mean else ""


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def main(say: Callable[[str], None]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="where runs are kept")
    parser.add_argument("--recipes", nargs="+", default=list(SEQUENCES), choices=SEQUENCES)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for recipe in arguments.recipes:
        if arguments.work:
            learn(recipe, arguments.methods, arguments.work, say)
        if (FOLDER / f"{recipe}.csv").exists():
            say("\n".join([f"\n{recipe}", *table(recipe)]))


if __name__ == "__main__":
    main(partial(print, flush=True))
