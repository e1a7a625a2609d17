"""Which distance and rule tell similar tasks from others best? On sequences whose truth is known (known_truth.py).

    python benchmarks/research/similarity.py
    python benchmarks/research/similarity.py --seeds 0 --sequences mixed

The networks learn with the default settings, so the default distance decides while they learn; the other distances are
computed afterwards through the same frozen sub-networks, and each gets the margin that is best for it on these very
sequences. Distances only propose: labels and probes decide, and known_truth.py measures what is decided.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))

from known_truth import SEQUENCES as KNOWN
from known_truth import SETTINGS, Draws, kind_of
from record import new_parser, say, write_result

from etcl_deploy.config import Config, Similarity
from etcl_deploy.core.task import Task
from etcl_deploy.data.inventory import data_root
from etcl_deploy.learn.signature import Comparer, sample
from etcl_deploy.learn.similarity import DISTANCES, RULES
from etcl_deploy.learn.task_training import seeded
from etcl_deploy.learn.trainer import learn_sequence
from etcl_deploy.network.masked_network import MaskedNetwork
from etcl_deploy.runs.build import build_network

SEQUENCES = ("all", "none", "none_back", "permuted", "mixed")
Pair = tuple[str, str]  # an earlier task and a later one


def distances(network: MaskedNetwork, tasks: list[Task], config: Config, name: str) -> dict[Pair, tuple[float, float]]:
    """For every pair the distance in the earlier task's sub-network, and in the untrained network."""
    learning = config.learning
    comparer = Comparer(network, Similarity(distance=name))  # type: ignore[arg-type]
    samples = {}
    for position, one in enumerate(tasks, start=1):
        generator = seeded(learning.seed, position, 0)
        training, _ = one.training.split(learning.validation_share, generator)
        samples[one.name] = sample(training, learning.similarity, generator)
    originals = {one.name: comparer.original(samples[one.name]) for one in tasks}
    apart = {}
    for number, earlier in enumerate(tasks):
        own = comparer.learned(samples[earlier.name], earlier.name)
        for later in tasks[number + 1 :]:
            there = comparer.learned(samples[later.name], earlier.name)
            between = comparer.distance.between
            pair = (earlier.name, later.name)
            apart[pair] = (between(own, there), between(originals[earlier.name], originals[later.name]))
    return apart


def gaps(apart: dict[Pair, tuple[float, float]], tasks: list[Task], rule: str) -> dict[Pair, float]:
    """For every pair the value that the rule compares with its margin."""
    values = {}
    for later in tasks:
        pairs = [pair for pair in apart if pair[1] == later.name]
        results = RULES[rule]([apart[pair][0] for pair in pairs], [apart[pair][1] for pair in pairs])
        values |= dict(zip(pairs, results, strict=True))
    return values


def score(truth: list[bool], values: list[float], margin: float) -> dict[str, float]:
    """F1 with its parts."""
    said = [value > 0 and value >= margin for value in values]
    hits = sum(same and yes for same, yes in zip(truth, said, strict=True))
    wrong, missed = sum(said) - hits, sum(truth) - hits
    return {"f1": 2 * hits / max(1, 2 * hits + wrong + missed), "found": hits, "wrongly": wrong, "missed": missed}


def best(truth: list[bool], values: list[float]) -> tuple[float, dict[str, float]]:
    """The margin with the highest F1."""
    margins = sorted({0.0, *(value for value in values if value > 0)})
    return max(((margin, score(truth, values, margin)) for margin in margins), key=lambda choice: choice[1]["f1"])


def measure(config: Config, name: str) -> list[dict[str, Any]]:
    """The gap of every pair of a sequence, as it was while learning and by every other distance and rule."""
    make, preprocessing = KNOWN[name]
    tasks = [source.prepared(preprocessing) for source in make(Draws(data_root(), config.learning.seed))]
    network = build_network(config)
    run = learn_sequence(network, tasks, config.learning)
    pairs: list[dict[str, Any]] = []
    for later, known in run.records.items():
        pairs += [{"earlier": c.task, "later": later, "while learning": c.gap} for c in known.comparisons]
    for distance in DISTANCES:
        apart = distances(network, tasks, config, distance)
        for rule in RULES:
            by_pair = gaps(apart, tasks, rule)
            for pair in pairs:
                pair[f"{distance} {rule}"] = by_pair[pair["earlier"], pair["later"]]
    return pairs


def tabulate(pairs: list[dict[str, Any]], margin: float) -> dict[str, Any]:
    """The decisions made while learning, and the best that every distance and rule could make."""
    truth = [kind_of(pair["earlier"]) == kind_of(pair["later"]) for pair in pairs]
    values = {way: [pair[way] for pair in pairs] for way in pairs[0] if way not in ("earlier", "later")}
    decided = values.pop("while learning")
    ranges = {}
    for name, wanted in (("similar", True), ("others", False)):
        own = [gap for gap, same in zip(decided, truth, strict=True) if same is wanted]
        ranges[name] = [min(own), max(own)] if own else None
    rows = []
    for way, own in values.items():
        best_margin, scores = best(truth, own)
        rows.append({"distance and rule": way, "best_margin": best_margin, **scores})
        say(f"  {way:28s} best margin {best_margin:.3f}: {scores}")
    return {**score(truth, decided, margin), "margin": margin, "gaps": ranges, "each_with_its_best_margin": rows}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--sequences", nargs="+", default=SEQUENCES, choices=SEQUENCES)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    values = {**SETTINGS, "size": 28, "channels": 1}
    margin, result = Similarity().margin, {}
    for seed in arguments.seeds:
        config = Config().with_values({**values, "seed": seed})
        pairs = [pair for sequence in arguments.sequences for pair in measure(config, sequence)]
        result[f"seed {seed}"] = row = tabulate(pairs, margin)
        say(f"seed {seed}, margin {margin}, while learning: F1 {row['f1']:.2f}, gaps {row['gaps']}")
    if arguments.record:
        write_result("similarity", "similarity", result, values)


if __name__ == "__main__":
    main()
