"""L1, L2, L5: F-EMNIST-1 with the recipe's settings, seed by seed, beside what each part of the method is worth.

    python benchmarks/femnist1.py --work DIR            everything that DIR does not hold yet, then the table
    python benchmarks/femnist1.py --work DIR --seeds 0 --variants full     a part of it, as another process may do

ONE is a separate dense network for each task, learned with the same items, epochs, batches and augmentation.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev

import torch
from record import write_result

from etcl_deploy.build import build_network
from etcl_deploy.config import Config
from etcl_deploy.learn.metrics import forward_transfer
from etcl_deploy.learn.trainer import learn_sequence
from etcl_deploy.origins import load_tasks
from etcl_deploy.settings import load_recipe
from etcl_deploy.train import train

# What is changed for each row of the table.
VARIANTS: dict[str, dict[str, object]] = {
    "full": {},
    "one": {"density": 1.0, "similar": "none"},
    "without similarity": {"similar": "none"},
    "without alignment": {"alignment": "off"},
    "without bi-objective": {"backward": "off"},
}
PAPER = {
    "full": {"acc": 80.32, "fwt": 0.0948, "bwt": 0.0141},
    "one": {"acc": 69.85},
    "without similarity": {"acc": 74.22},
    "without alignment": {"acc": 79.83},
    "without bi-objective": {"acc": 69.37},
}


def learn_once(variant: str, config: Config, work: Path) -> dict[str, object]:
    """The accuracy matrix of one run; of ONE, a row of single tasks."""
    if variant != "one":
        directory = work / f"{variant}-{config.learning.seed}".replace(" ", "-")
        run = train(config, None, directory, "auto", lambda event: None)
        return run.summary(config)
    accuracies = []
    for task in load_tasks(config, None):
        alone = learn_sequence(build_network(config), [task], config.learning)
        accuracies.append(alone.matrix[0][0])
    return {"accuracies": accuracies, "acc": fmean(a for a in accuracies if a is not None)}


def summarize(found: dict[tuple[str, int], dict], seeds: list[int]) -> dict[str, dict[str, object]]:
    """Mean and deviation of every figure, and what each part is worth."""
    table: dict[str, dict[str, object]] = {}
    for variant in VARIANTS:
        runs = [found[variant, seed] for seed in seeds if (variant, seed) in found]
        if not runs:
            continue
        table[variant] = {"acc": spread([run["acc"] for run in runs]), "seeds": len(runs), "paper": PAPER[variant]}
        if variant != "one":
            table[variant]["bwt"] = spread([run["bwt"] for run in runs])
            alone = [
                forward_transfer(found[variant, seed]["matrix"], found["one", seed]["accuracies"])
                for seed in seeds
                if (variant, seed) in found and ("one", seed) in found
            ]
            if alone:
                table[variant]["fwt"] = spread(alone)
    return table


def spread(values: list[float]) -> dict[str, float]:
    """Mean and sample deviation."""
    return {"mean": fmean(values), "deviation": stdev(values) if len(values) > 1 else 0.0}


def main(say: Callable[[str], None]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="where runs and their figures are kept")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.work.mkdir(parents=True, exist_ok=True)
    recipe = load_recipe("femnist1")
    for variant in arguments.variants:
        for seed in arguments.seeds:
            path = arguments.work / f"{variant}-{seed}.json".replace(" ", "-")
            if not path.exists():
                result = learn_once(variant, recipe.with_values({**VARIANTS[variant], "seed": seed}), arguments.work)
                path.write_text(json.dumps(result, indent=1))
                say(f"{variant}, seed {seed}: ACC {result['acc']:.2f}")
    names = [(variant, seed) for variant in VARIANTS for seed in range(100)]
    files = {name: arguments.work / f"{name[0]}-{name[1]}.json".replace(" ", "-") for name in names}
    found = {name: json.loads(path.read_text()) for name, path in files.items() if path.exists()}
    seeds = sorted({seed for _, seed in found})
    table = summarize(found, seeds)
    for variant, row in table.items():
        shown = [(key, row[key]) for key in ("acc", "fwt", "bwt") if key in row]
        cells = [f"{key} {value['mean']:.4g} ± {value['deviation']:.2g}" for key, value in shown]
        say(f"{variant:22s} {'  '.join(cells)}   (paper {PAPER[variant]})")
    runs = {f"{variant}, seed {seed}": result for (variant, seed), result in found.items()}
    write_result("femnist1", ["L1", "L2", "L5"], table, recipe.as_json(), runs=runs)


if __name__ == "__main__":
    main(print)
