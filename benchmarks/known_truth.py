"""Are tasks that are similar found, and only those (L4)? Does transfer cost accuracy where nothing is similar (L5)?

    python benchmarks/known_truth.py [--seeds 0 1] [--sequences labels digits] [--record]

Sequences whose truth is known: samples of one data set with the same classes, labels and pixels are similar, everything
else is not. A task's kind is its name up to the last dash. Each sequence is learned twice, with the defaults and with
`similar = "none"`; test items measure both and choose nothing. Five of the sequences (`HELD_OUT`) were written down
before any setting was tried, and none was chosen by them. Another seed draws other items, as
far as a data set has them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from record import Figure, new_parser, say, write_result

from etcl_deploy.config import Config
from etcl_deploy.core.preprocessing import Preprocessing
from etcl_deploy.core.task import Task
from etcl_deploy.data.folders import read_folder
from etcl_deploy.data.inventory import data_root, read_data_set
from etcl_deploy.data.sequences import permuted, sequence_of
from etcl_deploy.data.source import Part, Source
from etcl_deploy.learn.trainer import learn_sequence
from etcl_deploy.runs.build import build_network

GREY, COLOUR = Preprocessing(28, 28, 1, 0.5, 0.5), Preprocessing(32, 32, 3, 0.5, 0.5)
ITEMS, TEST_ITEMS = 700, 1000  # of a task, where there are so many
TEN = tuple(str(number) for number in range(10))
REVIEWED = ("labels", "digits", "superclasses", "handwriting", "splits", "drawn")
HELD_OUT = ("crops", "objects", "writers", "names", "noise")
SETTINGS: dict[str, Any] = {"backbone": "resnet18", "width": 10, "density": 0.4, "epochs": 10, "batch_size": 64}

Made = list[Source]


@dataclass(frozen=True)
class Draws:
    """Data sets, and parts of them that do not overlap; another seed draws other parts."""

    root: Path
    seed: int

    def part(self, name: str, number: int) -> tuple[Part, Part]:
        """A random part of a data set's training items, and one of its test items."""
        source = read_data_set(name, self.root)[0]
        chance = np.random.default_rng(0)
        first = (5 * self.seed + number) * ITEMS % (len(source.train) - ITEMS + 1)
        train, test = (chance.permutation(len(part)) for part in (source.train, source.test))
        return source.train.take(train[first : first + ITEMS]), source.test.take(test[:TEST_ITEMS])

    def task(
        self, name: str, number: int, kind: str | None = None, change: Callable[[Part], Part] = lambda p: p
    ) -> Source:
        """A task of ten numbered classes; `kind` names it where it is not a plain sample of its data set."""
        train, test = (change(part) for part in self.part(name, number))
        return Source(f"{kind or name}-{number}", TEN, train, test)

    def characters(self) -> list[Source]:
        """The ten tasks of F-EMNIST-1; every seed begins with another."""
        samples = list(sequence_of({"owners": "femnist1"}).make(lambda name: read_data_set(name, self.root)[0]))
        samples = samples[3 * self.seed :] + samples[: 3 * self.seed]
        return [replace(source, name=f"femnist-{number}") for number, source in enumerate(samples)]


def looks(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Part], Part]:
    """A part whose images are changed."""
    return lambda part: replace(part, images=np.ascontiguousarray(change(np.asarray(part.images))))


def labels(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Part], Part]:
    """A part whose labels are changed."""
    return lambda part: replace(part, labels=change(part.labels))


def shuffled(seed: int) -> np.ndarray:
    """Ten class numbers in an order in which none keeps its place."""
    chance = np.random.default_rng(seed)
    while True:
        order = chance.permutation(10)
        if not (order == np.arange(10)).any():
            return order


def all_similar(draws: Draws) -> Made:
    """Five samples of F-EMNIST-1."""
    return draws.characters()[:5]


def none_similar(draws: Draws) -> Made:
    """Six data sets; five of them name their classes with the same numbers."""
    names = ("mnist", "fashion_mnist", "notmnist", "svhn", "cifar10")
    return [*(draws.task(name, 0) for name in names), draws.characters()[0]]


def none_back(draws: Draws) -> Made:
    """The same in reverse order."""
    return none_similar(draws)[::-1]


def permutations(draws: Draws) -> Made:
    """One sample of MNIST, its pixels in four orders."""

    def pixels(number: int) -> Callable[[Part], Part]:
        order = torch.randperm(784, generator=torch.Generator().manual_seed(4 * draws.seed + number)).numpy()
        return lambda part: replace(part, images=permuted(part, order))

    return [draws.task("mnist", 0, f"permutation{number}", pixels(number)) for number in range(4)]


def mixed(draws: Draws) -> Made:
    """Samples of three data sets and a permutation, shuffled."""
    tasks = [
        *draws.characters()[5:8],
        *(draws.task("fashion_mnist", number) for number in range(3)),
        *(draws.task("notmnist", number) for number in range(2)),
        permutations(draws)[0],
    ]
    random.Random(draws.seed).shuffle(tasks)
    return tasks


def label_changes(draws: Draws) -> Made:
    """MNIST with its labels, with other labels, even or odd, and again with its labels."""
    order = shuffled(draws.seed)
    parity = draws.task("mnist", 2, "parity", labels(lambda y: y % 2))
    return [
        draws.task("mnist", 0),
        draws.task("mnist", 1, "relabelled", labels(lambda y: order[y])),
        replace(parity, classes=("even", "odd")),
        draws.task("mnist", 3),
    ]


def digits(draws: Draws) -> Made:
    """Digits in five styles, all with the same names."""
    return [
        draws.task("mnist", 0),
        draws.task("svhn", 0),
        draws.task("mnist", 1, "inverted", looks(lambda x: 255 - x)),
        draws.task("mnist", 2, "quarter-turn", looks(lambda x: np.rot90(x, 1, (1, 2)))),
        draws.task("mnist", 3, "half-turn", looks(lambda x: np.rot90(x, 2, (1, 2)))),
    ]


def superclasses(draws: Draws) -> Made:
    """Superclasses of CIFAR-100: other classes, some of the same kind."""
    tasks = {source.name: source for source in _split("cifar100", draws, by="superclass")}
    chosen = ("fish", "aquatic_mammals", "household_electrical_devices", "vehicles_1")
    return [replace(tasks[name], name=f"{name}-0") for name in chosen if name in tasks] or list(tasks.values())[:4]


def handwriting(draws: Draws) -> Made:
    """Digits, capital letters and small letters of the same hands."""
    whole = _joined(draws.characters()[:4])
    return [
        replace(whole.of_classes(range(10, 36), "capitals-0")),
        replace(whole.of_classes(range(10), "digits-0")),
        replace(whole.of_classes(range(36, 62), "small-0")),
    ]


def splits(draws: Draws) -> Made:
    """Halves of the classes of three data sets."""
    names = ("notmnist", "fashion_mnist", "mnist")
    return [
        replace(source, name=f"{name}-{half}-0")
        for name in names
        for half, source in enumerate(_split(name, draws, tasks=2, items=ITEMS, test_items=TEST_ITEMS // 2))
    ]


def drawn(draws: Draws) -> Made:
    """Shapes, stripes and blobs drawn by code, and shapes again."""
    return [_drawing(kind, number, draws.seed) for number, kind in enumerate(("shapes", "stripes", "blobs", "shapes"))]


def crops(draws: Draws) -> Made:
    """Photographs of three crops, each in two halves."""
    found = {}
    for crop in ("apple", "corn", "tomato"):
        source = read_folder(draws.root / "plants" / crop, [])
        order = np.random.default_rng(draws.seed).permutation(len(source.train))
        halves = np.array_split(order, 2)
        found[crop] = [
            replace(source, name=f"{crop}-{n}", train=source.train.take(half)) for n, half in enumerate(halves)
        ]
    return [found[crop][half] for half in range(2) for crop in found]


def objects(draws: Draws) -> Made:
    """Photographs of objects and of house numbers, two samples each, and one turned upside down."""
    return [
        draws.task("cifar10", 0),
        draws.task("svhn", 0),
        draws.task("cifar10", 1),
        draws.task("svhn", 1),
        draws.task("cifar10", 2, "upside-down", looks(lambda x: x[:, ::-1])),
    ]


def writers(draws: Draws) -> Made:
    """Capital letters and digits of two groups of hands."""
    samples = draws.characters()
    groups = [_joined(samples[:4]), _joined(samples[4:8])]
    kinds = {"capitals": range(10, 36), "digits": range(10)}
    return [group.of_classes(chosen, f"{kind}-{n}") for n, group in enumerate(groups) for kind, chosen in kinds.items()]


def names(draws: Draws) -> Made:
    """Clothes; then clothes whose names moved on by one; then clothes as at first, and letters."""
    return [
        draws.task("fashion_mnist", 0),
        draws.task("fashion_mnist", 1, "moved-names", labels(lambda y: (y + 1) % 10)),
        draws.task("fashion_mnist", 2),
        draws.task("notmnist", 0),
    ]


def noise(draws: Draws) -> Made:
    """Letters; letters with labels drawn by chance; letters again; pixels drawn by chance."""
    chance = np.random.default_rng(draws.seed)
    return [
        draws.task("notmnist", 0),
        draws.task("notmnist", 1, "by-chance", labels(lambda y: chance.permutation(y))),
        draws.task("notmnist", 2),
        draws.task("notmnist", 3, "static", looks(lambda x: chance.integers(0, 256, x.shape, dtype=np.uint8))),
    ]


SEQUENCES: dict[str, tuple[Callable[[Draws], Made], Preprocessing]] = {
    "all": (all_similar, GREY),
    "none": (none_similar, GREY),
    "none_back": (none_back, GREY),
    "permuted": (permutations, GREY),
    "mixed": (mixed, GREY),
    "labels": (label_changes, GREY),
    "digits": (digits, GREY),
    "superclasses": (superclasses, COLOUR),
    "handwriting": (handwriting, GREY),
    "splits": (splits, GREY),
    "drawn": (drawn, GREY),
    "crops": (crops, COLOUR),
    "objects": (objects, COLOUR),
    "writers": (writers, GREY),
    "names": (names, GREY),
    "noise": (noise, GREY),
}


def _split(name: str, draws: Draws, **table: Any) -> list[Source]:
    return list(
        sequence_of({"split": name, "seed": draws.seed, **table}).make(lambda n: read_data_set(n, draws.root)[0])
    )


def _joined(sources: list[Source]) -> Source:
    """All items of several sources with the same classes."""

    def whole(parts: list[Part]) -> Part:
        return Part(np.concatenate([p.images for p in parts]), np.concatenate([p.labels for p in parts]))

    return replace(sources[0], train=whole([s.train for s in sources]), test=whole([s.test for s in sources]))


def _drawing(kind: str, number: int, seed: int) -> Source:
    """Four classes of simple drawings: corners of a shape, direction of stripes, number of blobs."""
    chance = random.Random(f"{kind} {number} {seed}")
    count = ITEMS + TEST_ITEMS
    numbers = np.arange(count) % 4
    images = np.stack([_one_drawing(kind, int(label), chance) for label in numbers])
    parts = (Part(images[:ITEMS], numbers[:ITEMS]), Part(images[ITEMS:], numbers[ITEMS:]))
    return Source(f"{kind}-{number}", TEN[:4], *parts)


def _one_drawing(kind: str, label: int, chance: random.Random) -> np.ndarray:
    image = Image.new("L", (28, 28), chance.randint(0, 60))
    pen, ink = ImageDraw.Draw(image), chance.randint(140, 255)
    x, y, size = chance.uniform(10, 18), chance.uniform(10, 18), chance.uniform(5, 9)
    if kind == "shapes":
        pen.regular_polygon((x, y, size), 3 + label, rotation=chance.uniform(0, 360), outline=ink)
    elif kind == "stripes":
        turn = label * np.pi / 4 + chance.uniform(-0.15, 0.15)
        across, along = np.array([np.cos(turn), np.sin(turn)]), np.array([-np.sin(turn), np.cos(turn)])
        for step in np.arange(-28, 28, size):
            ends = [np.array([x, y]) + step * across + reach * along for reach in (-40, 40)]
            pen.line([tuple(end) for end in ends], fill=ink, width=2)
    else:
        for _ in range(label + 1):
            x, y = chance.uniform(4, 24), chance.uniform(4, 24)
            pen.ellipse([x - 3, y - 3, x + 3, y + 3], fill=ink)
    noisy = np.asarray(image, dtype=np.int64) + np.array([chance.randint(-12, 12) for _ in range(784)]).reshape(28, 28)
    return noisy.clip(0, 255).astype(np.uint8)


def kind_of(name: str) -> str:
    """A task's kind: what it is a sample of."""
    return name.rpartition("-")[0]


def measure(name: str, seed: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """One sequence: every decision with its truth, and the accuracy with the defaults and without transfer."""
    make, preprocessing = SEQUENCES[name]
    tasks = [source.prepared(preprocessing) for source in make(Draws(data_root(), seed))]
    images = {"size": preprocessing.height, "channels": preprocessing.channels}
    config = Config().with_values({**SETTINGS, **images, "seed": seed, **values})
    run, alone = (_learn(config.with_values(way), tasks) for way in ({}, {"similar": "none"}))
    pairs = [
        {
            "earlier": c.task,
            "later": later,
            "truth": kind_of(c.task) == kind_of(later),
            "transfer": c.similar or c.started,  # the final decision, after the probe
            "similar": c.similar,
            "started": c.started,
            "gap": c.gap,
            "deviation": c.deviation,
            "reason": c.reason,
        }
        for later, record in run.records.items()
        for c in record.comparisons
    ]
    rows = {way: [row[-1] or 0.0 for row in (made.matrix)] for way, made in (("measured", run), ("none", alone))}
    ends = {way: [value or 0.0 for value in made.matrix[-1]] for way, made in (("measured", run), ("none", alone))}
    falls = [
        (before or 0.0) - (after or 0.0)
        for one, two in pairwise(run.matrix)
        for before, after in zip(one, two, strict=False)
    ]
    return {
        "tasks": [task.name for task in tasks],
        "pairs": pairs,
        "learned": rows,
        "at_end": ends,
        "difference": fmean(ends["measured"]) - fmean(ends["none"]),
        "largest_fall": max(falls, default=0.0),
        "seconds": {"measured": run.seconds, "none": alone.seconds},
    }


def _learn(config: Config, tasks: list[Task]) -> Any:
    return learn_sequence(build_network(config), tasks, config.learning)


def f1(pairs: list[dict[str, Any]]) -> dict[str, float]:
    """F1 of the decisions, with its parts."""
    found = sum(pair["transfer"] and pair["truth"] for pair in pairs)
    wrong = sum(pair["transfer"] and not pair["truth"] for pair in pairs)
    missed = sum(pair["truth"] and not pair["transfer"] for pair in pairs)
    return {"f1": 2 * found / max(1, 2 * found + wrong + missed), "found": found, "wrongly": wrong, "missed": missed}


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """The recorded results, held against their targets."""
    chose_nothing = tuple(name for name in HELD_OUT if name in results)
    for heading, names in (("all that are recorded", tuple(results)), ("those that chose nothing", chose_nothing)):
        if not names:
            continue
        row = f1([pair for name in names for by_seed in results[name].values() for pair in by_seed["pairs"]])
        note = f"{row['found']:.0f} pairs found, {row['missed']:.0f} missed, {row['wrongly']:.0f} wrongly"
        yield Figure(
            "L4", f"to transfer or not, F1 of the final decision: {heading}", row["f1"], ">= 0.9", ">= 0.97", note=note
        )
    for name in REVIEWED:
        differences = [by_seed["difference"] for by_seed in results[name].values()]
        what = f"accuracy with the defaults minus that without transfer, points: {name}"
        note = f"{len(differences)} seeds; the least of them"
        yield Figure("L5", what, min(differences), ">= -0.3", ">= 0", differences, note)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--sequences", nargs="+", default=list(SEQUENCES), choices=SEQUENCES)
    parser.add_argument("--epochs", type=int, default=SETTINGS["epochs"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.sequences:
        by_seed: dict[str, Any] = {}
        for seed in arguments.seeds:
            by_seed[f"seed {seed}"] = made = measure(name, seed, {"epochs": arguments.epochs})
            say(f"{name:13s} seed {seed}  {f1(made['pairs'])}  measured - none {made['difference']:+.2f}")
        if arguments.record:
            write_result("known_truth", name, by_seed, {**SETTINGS, "epochs": arguments.epochs})


if __name__ == "__main__":
    main()
