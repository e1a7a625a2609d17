"""Methods side by side, three seeds each, on three sequences: the tables of docs/results.md.

    python benchmarks/methods.py --work DIR        what neither DIR nor results/methods/ holds yet is learned
    python benchmarks/methods.py --work DIR --recipes pmnist --methods etcl wsn       a part of it
    python benchmarks/methods.py                   the tables again, from results/methods/

It is `etcl compare`, with a third of the epochs of F-EMNIST-1 and two thirds of those of the mixed sequence: on one
core a run of either takes 11 to 16 minutes, one of PMNIST two. results/methods/ holds every run's figures (.json) and
the table (.csv) of each sequence, and grows: a method that is learned later is held against the runs of `one` that are
there. Several processes may learn at once, each other methods.
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

from etcl_deploy.config import Config
from etcl_deploy.core.atomic import locked, write_bytes
from etcl_deploy.learn.events import Event, TaskDone
from etcl_deploy.learn.methods import METHODS
from etcl_deploy.learn.metrics import forward_transfer
from etcl_deploy.runs.compare import RECORD, MethodComparison, compare
from etcl_deploy.settings import config_from, load_recipe

SEQUENCES: dict[str, dict[str, Any]] = {"femnist1": {"epochs": 10}, "pmnist": {"tasks": 5}, "mixed": {"epochs": 10}}
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
    """Learn with the methods whose figures are not kept yet, and keep those of all seeds beside the others'."""
    configs, _ = kept(recipe)
    wanted = {method: config_of(recipe, method) for method in methods if method not in configs}
    if not wanted:
        return

    def tell(event: Event) -> None:
        if isinstance(event, TaskDone):
            say(f"  {event.task} {event.run.matrix[-1][-1]:.1f} %")

    compare(wanted, None, SEEDS, work / recipe, "cpu", tell, say, lambda text: say(f"{recipe}: {text}"))
    FOLDER.mkdir(parents=True, exist_ok=True)
    with locked(FOLDER, wait=True):
        configs, runs = kept(recipe)  # another process may have kept some meanwhile
        made = json.loads((work / recipe / RECORD).read_text())["runs"]
        whole = [m for m in wanted if m not in configs and sum(run["method"] == m for run in made) == SEEDS]
        found = [{key: run[key] for key in KEPT} for run in made if run["method"] in whole]
        configs = {method: config_of(recipe, method) for method in METHODS if method in configs or method in whole}
        table = MethodComparison.of(configs, with_forward_transfer([*runs, *found]))
        record = {**table.as_json(), **circumstances()}
        write_bytes(FOLDER / f"{recipe}.json", (json.dumps(record) + "\n").encode())
        write_bytes(FOLDER / f"{recipe}.csv", table.as_csv().encode())


def config_of(recipe: str, method: str) -> Config:
    """What a method is told on a sequence; its seed is the first."""
    changed = {**SEQUENCES[recipe], **OWN.get((recipe, method), {}), "seed": 0}
    return load_recipe(recipe, method).with_values(changed)


def kept(recipe: str) -> tuple[dict[str, Config], list[dict[str, Any]]]:
    """The settings of every method and the figures of every run in results/methods/."""
    path = FOLDER / f"{recipe}.json"
    if not path.exists():
        return {}, []
    record = json.loads(path.read_text())
    configs = {method: config_from(values) for method, values in record["configs"].items()}
    for method, config in configs.items():
        if config != config_of(recipe, method):
            raise SystemExit(f"results/methods/{path.name} has {method} with other settings: remove it")
    return configs, record["runs"]


def with_forward_transfer(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs with FWT against the run of `one` with the same seed."""
    alone = {run["seed"]: [row[-1] for row in run["matrix"]] for run in runs if run["method"] == "one"}
    return [
        {**run, "fwt": forward_transfer(run["matrix"], alone[run["seed"]])}
        if run["method"] != "one" and run["seed"] in alone
        else run
        for run in runs
    ]


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
