"""L4: are similar tasks found, and only those? On sequences whose truth is known, for every distance and rule.

    python benchmarks/similarity.py

Truth: samples of one data set with the same classes and pixels are similar; other data sets, other permutations of the
pixels are not. The networks learn with the default settings, so the default distance decides while they learn; the
other distances are computed afterwards through the same frozen sub-networks, and each gets the margin that is best for
it on these very sequences. The default keeps its margin.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import measure_once, measured, write_result
from torch import Tensor

from etcl_deploy.build import build_network
from etcl_deploy.config import Config, Similarity
from etcl_deploy.data.arrays import data_root, prepare_all, read_arrays
from etcl_deploy.data.femnist import femnist1
from etcl_deploy.data.mnist import permuted
from etcl_deploy.learn.knowledge import Comparer, sample
from etcl_deploy.learn.lesson import seeded
from etcl_deploy.learn.network import MaskedNetwork
from etcl_deploy.learn.similarity import DISTANCES, RULES
from etcl_deploy.learn.task import Task
from etcl_deploy.learn.trainer import learn_sequence
from etcl_deploy.preprocessing import Preprocessing

PREPROCESSING = Preprocessing(28, 28, 1, 0.5, 0.5)
ITEMS, TESTS = 700, 100  # of every task
LEARNING = "while learning"
Pair = tuple[str, str]  # an earlier task and a later one


def part_of(name: str, root: Path, part: int) -> tuple[Tensor, Tensor]:
    """A random part of a data set, in grey, 28x28; parts do not overlap."""
    arrays = read_arrays(root / f"{name}.npz", ("train_x", "train_y"))
    order = np.random.default_rng(0).permutation(len(arrays["train_y"]))[part * 800 : (part + 1) * 800]
    images = arrays["train_x"][order]
    if images.ndim == 4:
        images = np.ascontiguousarray(images.transpose(0, 2, 3, 1))
    return prepare_all(images, PREPROCESSING), torch.from_numpy(arrays["train_y"][order]).long()


def task(name: str, images: Tensor, labels: Tensor) -> Task:
    """A task of ten classes."""
    classes = tuple(str(number) for number in range(10))
    return Task(name, classes, images[:ITEMS], labels[:ITEMS], images[ITEMS:], labels[ITEMS:])


def sequences(root: Path, seed: int) -> dict[str, list[Task]]:
    """All similar, none similar, mixed; a task's kind is its name up to the last dash."""
    characters = [Task(f"femnist-{n}", *vars_of(t)) for n, t in enumerate(femnist1(PREPROCESSING, root))]
    digits = part_of("mnist", root, 0)
    shuffles = [torch.randperm(784, generator=torch.Generator().manual_seed(number)) for number in range(4)]
    permutations = [
        task(f"permutation{number}-0", permuted(digits[0], order), digits[1]) for number, order in enumerate(shuffles)
    ]
    others = [
        task(f"{name}-0", *part_of(name, root, 0)) for name in ("mnist", "fashion_mnist", "notmnist", "svhn", "cifar10")
    ]
    clothes = [task(f"fashion_mnist-{part}", *part_of("fashion_mnist", root, part)) for part in range(3)]
    letters = [task(f"notmnist-{part}", *part_of("notmnist", root, part)) for part in range(2)]
    mixed = [*characters[5:8], *clothes, *letters, permutations[0]]
    random.Random(seed).shuffle(mixed)
    return {"all": characters[:5], "none": [*others, characters[0]], "permutations": permutations, "mixed": mixed}


def vars_of(known: Task) -> tuple:
    """Everything of a task but its name."""
    return known.classes, known.train_x, known.train_y, known.test_x, known.test_y


def distances(network: MaskedNetwork, tasks: list[Task], config: Config, name: str) -> dict[Pair, tuple[float, float]]:
    """For every pair the distance in the earlier task's sub-network, and in the untrained network."""
    learning = config.learning
    comparer = Comparer(network, Similarity(distance=name), learning.seed)  # type: ignore[arg-type]
    samples = {}
    for position, one in enumerate(tasks, start=1):
        generator = seeded(learning.seed, position, 0)
        training, _ = one.training.split(learning.validation_share, generator)
        samples[one.name] = sample(training.images, learning.similarity, generator)
    originals = {one.name: comparer.original(samples[one.name]) for one in tasks}
    found = {}
    for number, earlier in enumerate(tasks):
        own = comparer.learned(samples[earlier.name], earlier.name)
        for later in tasks[number + 1 :]:
            there = comparer.learned(samples[later.name], earlier.name)
            between = comparer.distance.between
            pair = (earlier.name, later.name)
            found[pair] = (between(own, there), between(originals[earlier.name], originals[later.name]))
    return found


def gaps(found: dict[Pair, tuple[float, float]], tasks: list[Task], rule: str) -> dict[Pair, float]:
    """What the rule compares with its margin, for every pair."""
    values = {}
    for later in tasks:
        pairs = [pair for pair in found if pair[1] == later.name]
        results = RULES[rule]([found[pair][0] for pair in pairs], [found[pair][1] for pair in pairs])
        values |= dict(zip(pairs, results, strict=True))
    return values


def score(truth: list[bool], values: list[float], margin: float) -> dict[str, float]:
    """F1 with its parts."""
    said = [value > 0 and value >= margin for value in values]
    hits = sum(same and yes for same, yes in zip(truth, said, strict=True))
    wrong, missed = sum(said) - hits, sum(truth) - hits
    return {"f1": 2 * hits / max(1, 2 * hits + wrong + missed), "found": hits, "wrongly": wrong, "missed": missed}


def kind(name: str) -> str:
    """What a task is a sample of."""
    return name.rpartition("-")[0]


def best(truth: list[bool], values: list[float]) -> tuple[float, dict[str, float]]:
    """The margin with the highest F1."""
    margins = sorted({0.0, *(value for value in values if value > 0)})
    return max(((margin, score(truth, values, margin)) for margin in margins), key=lambda found: found[1]["f1"])


def measure(config: Config) -> dict[str, Any]:
    """The gap of every pair of every sequence, as it was found while learning and by every distance and rule after."""
    pairs: list[dict[str, str]] = []
    found: dict[str, list[float]] = {}
    for name, tasks in sequences(data_root(), config.learning.seed).items():
        network = build_network(config)
        run = learn_sequence(network, tasks, config.learning)
        while_learning = {(c.task, later): c.gap for later, known in run.knowledge.items() for c in known.comparisons}
        pairs += [{"sequence": name, "earlier": pair[0], "later": pair[1]} for pair in while_learning]
        found.setdefault(LEARNING, []).extend(while_learning.values())
        for distance in DISTANCES:
            apart = distances(network, tasks, config, distance)
            for rule in RULES:
                values = gaps(apart, tasks, rule)
                found.setdefault(f"{distance} {rule}", []).extend(values[pair] for pair in while_learning)
    return {"pairs": pairs, "gaps": found}


def config_of(seed: str) -> Config:
    """Default settings but for a network that is small enough."""
    return Config().with_values(
        {"backbone": "resnet18", "size": 28, "channels": 1, "density": 0.4, "batch_size": 64}
        | {"epochs": 10, "seed": int(seed)}
    )


def main(say: Callable[[str], None]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    default = Similarity()
    for seed in map(str, parser.parse_args().seeds):
        measure_once(partial(measure, config_of(seed)), "similarity", seed, config_of(seed).as_json())
    parts = measured("similarity", lambda seed: config_of(seed).as_json())
    truth = [kind(pair["earlier"]) == kind(pair["later"]) for part in parts.values() for pair in part["pairs"]]
    found = {
        way: [gap for part in parts.values() for gap in part["gaps"][way]] for way in next(iter(parts.values()))["gaps"]
    }
    decided = found.pop(LEARNING)
    ours = score(truth, decided, default.margin)
    say(f"while learning ({default.distance}, {default.rule}, margin {default.margin}): {ours}")
    of_similar, of_others = (
        [gap for gap, same in zip(decided, truth, strict=True) if same is s] for s in (True, False)
    )
    ranges = {"similar": [min(of_similar), max(of_similar)], "others": [min(of_others), max(of_others)]}
    say(f"gaps of similar pairs {ranges['similar']}, of others {ranges['others']}")
    rows = []
    for way, values in found.items():
        margin, result = best(truth, values)
        rows.append({"distance and rule": way, "best_margin": margin, **result})
        say(f"{way:28s} best margin {margin:.3f}: {result}")
    result = {"seeds": sorted(parts), **ours, "margin": default.margin, "gaps": ranges, "side_by_side": rows}
    write_result("similarity", ["L4"], result, config_of("0").as_json())


if __name__ == "__main__":
    main(partial(print, flush=True))
