"""L1, L2, L5: F-EMNIST-1 with the recipe's settings, seed by seed, beside what each part of the method is worth.

    python benchmarks/femnist1.py                       what results/femnist1/ does not hold yet, then the table
    python benchmarks/femnist1.py --seeds 0 --variants full     a part of it, as another process may do at the same time

ONE is a separate dense network for each task, learned with the same items, epochs, batches and augmentation. `wsn` is
masks alone, without any transfer. "without similarity" is the paper's ablation: Euclidean distance in its place.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from record import in_words, measure_once, measured, read_options, spread, write_result

from etcl_deploy.config import Config
from etcl_deploy.learn.metrics import forward_transfer
from etcl_deploy.learn.trainer import learn_sequence
from etcl_deploy.runs.build import build_network
from etcl_deploy.runs.session import resume, train
from etcl_deploy.runs.store import load
from etcl_deploy.runs.task_loading import find_tasks
from etcl_deploy.settings import load_recipe

# What is changed for each row of the table.
VARIANTS: dict[str, dict[str, object]] = {
    "full": {},
    "one": {"density": 1.0, "similar": "none"},
    "wsn": {"similar": "none"},
    "without-similarity": {"distance": "euclidean"},
    "without-alignment": {"alignment": "off"},
    "without-bi-objective": {"backward": "off"},
}
PAPER: dict[str, dict[str, float]] = {
    "full": {"acc": 80.32, "fwt": 0.0948, "bwt": 0.0141},
    "one": {"acc": 69.85},
    "wsn": {},
    "without-similarity": {"acc": 74.22},
    "without-alignment": {"acc": 79.83},
    "without-bi-objective": {"acc": 69.37},
}
QUICK = {"tasks": 3, "epochs": 4, "width": 10, "learning_rate": 0.001}  # the rate is better with so few epochs
TARGETS = [variant for variant in VARIANTS if variant != "wsn"]  # what they need
Found = dict[tuple[str, int], dict[str, Any]]


def learn_once(variant: str, config: Config, work: Path) -> dict[str, Any]:
    """What one run gives; a run that was interrupted goes on."""
    if variant == "one":
        accuracies = []
        for task in find_tasks(config, None).tasks:
            alone = learn_sequence(build_network(config), [task], config.learning)
            accuracies.append(alone.matrix[0][0])
        return {"accuracies": accuracies, "acc": fmean(a for a in accuracies if a is not None)}
    directory = work / f"{variant}-{config.learning.seed}"
    if (directory / "run.json").exists():
        if load(directory, finished=False).config != config:
            raise SystemExit(f"{directory} was learned with other settings: remove it")
        return resume(directory, "auto", lambda event: None)[0].summary(config)
    return train(config, None, directory, "auto", lambda event: None).summary(config)


def summarize(found: Found) -> dict[str, dict[str, Any]]:
    """Mean and deviation of every figure over the seeds there are."""
    table: dict[str, dict[str, Any]] = {}
    for variant in VARIANTS:
        runs = {seed: result for (name, seed), result in found.items() if name == variant}
        if not runs:
            continue
        table[variant] = {"seeds": sorted(runs), "acc": spread([run["acc"] for run in runs.values()])}
        if variant != "one":
            table[variant]["bwt"] = spread([run["bwt"] for run in runs.values()])
            ones = {seed: found["one", seed]["accuracies"] for seed in runs if ("one", seed) in found}
            gains = [forward_transfer(runs[seed]["matrix"], alone) for seed, alone in ones.items()]
            if gains:
                table[variant]["fwt"] = spread([gain for gain in gains if gain is not None])
            gained = [found["full", seed]["acc"] - runs[seed]["acc"] for seed in runs if ("full", seed) in found]
            table[variant]["full_minus_this"] = spread(gained)
        table[variant]["paper"] = PAPER[variant]
    return table


def config_of(changed: dict[str, Any], name: str) -> Config:
    """The settings of a result named VARIANT-SEED."""
    variant, _, seed = name.rpartition("-")
    return load_recipe("femnist1").with_values({**changed, **VARIANTS[variant], "seed": int(seed)})


def main(say: Callable[[str], None]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/femnist1"), help="where runs are kept")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = read_options(parser, seeds=[0], variants=TARGETS)
    changed: dict[str, Any] = QUICK if arguments.quick else {}
    torch.set_num_threads(arguments.threads)
    for seed in arguments.seeds:
        for variant in arguments.variants:
            name = f"{variant}-{seed}"
            config = config_of(changed, name)
            measure_once(partial(learn_once, variant, config, arguments.work), "femnist1", name, config.as_json())
    parts = measured("femnist1", lambda name: config_of(changed, name).as_json())
    found = {(name.rpartition("-")[0], int(name.rpartition("-")[2])): part for name, part in parts.items()}
    table = summarize(found)
    for variant, row in table.items():
        shown = [(key, row[key]) for key in ("acc", "fwt", "bwt", "full_minus_this") if key in row]
        cells = [f"{key} {in_words(value)}" for key, value in shown]
        say(f"{variant:22s} {'  '.join(cells)}   (paper {PAPER[variant]})")
    write_result("femnist1", ["L1", "L2", "L5"], table, load_recipe("femnist1").with_values(changed).as_json())


if __name__ == "__main__":
    main(partial(print, flush=True))
