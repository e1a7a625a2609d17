"""Does a later task harm an earlier one? Changed labels and styles (L11), and crops of photographs one by one (L14).

    python benchmarks/harm.py
    python benchmarks/harm.py --parts changes --seeds 0 --cases swapped permuted

`changes`: a sample of MNIST, then another sample of it with 8 and 9 swapped, all labels permuted, class 9 missing or
rare, another style, or as it is; once with the first task's validation items at hand, as in one run of `etcl train`,
and once without them. Given is the fall of the class that lost most, on 10,000 test items, and what the first task
gained. `permuted-third` has a normal second task before it. `crops`: photographs of five crops, learned one after
another with few and many epochs; given is the largest fall of any task after any later one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
import torch
from known_truth import GREY, ITEMS, SETTINGS, TEN, Draws, labels, looks, shuffled
from record import Figure, new_parser, say, write_result
from scipy.ndimage import grey_dilation, rotate

from etcl_deploy.config import Config
from etcl_deploy.core.task import Task
from etcl_deploy.data.inventory import data_root, read_data_set
from etcl_deploy.data.source import Part, Source
from etcl_deploy.learn.run import Run
from etcl_deploy.learn.trainer import learn_sequence, predict
from etcl_deploy.runs.build import build_network
from etcl_deploy.runs.task_loading import find_tasks

TESTED = 10_000  # items of MNIST's own test part: all of them, since a class of two hundred tells no single point
CROPS_EPOCHS = (3, 5, 20)


def swapped(values: np.ndarray) -> np.ndarray:
    """8 as 9 and 9 as 8."""
    return np.where(values == 8, 9, np.where(values == 9, 8, values))


def without_nine(part: Part) -> Part:
    """No item of class 9."""
    return part.take(np.flatnonzero(part.labels != 9))


def rare_nine(part: Part) -> Part:
    """Of class 9 one item in twenty."""
    nines = np.flatnonzero(part.labels == 9)
    return part.take(np.setdiff1d(np.arange(len(part)), np.delete(nines, np.s_[::20])))


def bold(images: np.ndarray) -> np.ndarray:
    """Strokes two pixels wider."""
    return grey_dilation(images, (1, 3, 3))


def tilted(images: np.ndarray) -> np.ndarray:
    """Turned by 30 degrees."""
    return rotate(images, 30, axes=(1, 2), reshape=False, order=1)


CASES: dict[str, Callable[[int], Callable[[Part], Part]]] = {
    "as-it-is": lambda seed: lambda part: part,
    "swapped": lambda seed: labels(swapped),
    "permuted": lambda seed: labels(lambda y: shuffled(seed)[y]),
    "permuted-third": lambda seed: labels(lambda y: shuffled(seed)[y]),
    "class-missing": lambda seed: without_nine,
    "class-rare": lambda seed: rare_nine,
    "bold": lambda seed: looks(bold),
    "inverted": lambda seed: looks(lambda x: 255 - x),
    "tilted": lambda seed: looks(tilted),
}
HARMFUL = tuple(name for name in CASES if name != "as-it-is")


def changes(seed: int, cases: list[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """For every case and with or without the first task's items: the worst class and the whole of the first task."""
    config = Config().with_values({**SETTINGS, "size": 28, "channels": 1, "seed": seed, **values})
    draws = Draws(data_root(), seed)
    whole = read_data_set("mnist", data_root())[0].test

    def task(number: int, change: Callable[[Part], Part] = lambda part: part) -> Task:
        train, _ = draws.part("mnist", number)
        test = whole.take(np.arange(TESTED))
        return Source(f"task-{number}", TEN, change(train), change(test)).prepared(GREY)

    first = task(0)
    start = learn_sequence(build_network(config), [first], config.learning)
    made: dict[str, Any] = {}
    for case in cases:
        change = CASES[case](seed)
        for held in (True, False):
            run = copy.deepcopy(start)
            known = [first]
            if case == "permuted-third":
                between = task(2)
                run = learn_sequence(run.network, [between], config.learning, before=run, earlier=known)
                known.append(between)
            before = [by_class(run, one) for one in known]
            run = learn_sequence(
                run.network, [task(1, change)], config.learning, before=run, earlier=known if held else []
            )
            after = [by_class(run, one) for one in known]
            gained = [one - other for one, other in zip(after, before, strict=True)]
            record = run.records["task-1"]
            made[f"{case}, {'with' if held else 'without'} its items"] = row = {
                "worst_class": float(min(gain.min() for gain in gained)),
                "gained": float(np.mean([gain.mean() for gain in gained])),
                "second_task": run.matrix[-1][-1],
                "similar": [f"{c.task} {c.similar} {c.reason}" for c in record.comparisons],
                "kept": [c.kept for c in record.changes],
                "contradicted": {c.task: list(c.contradicted) for c in record.comparisons if c.contradicted},
            }
            say(f"seed {seed}  {case:15s} held {held!s:5}  {row}")
    return made


def by_class(run: Run, task: Task) -> np.ndarray:
    """The accuracy of every class of a task, in percent."""
    answers = predict(run.network, task.name, task.test_x).argmax(1)
    right = (answers == task.test_y).double()
    return np.array([100 * float(right[task.test_y == number].mean()) for number in range(len(task.classes))])


def crops(seed: int, epochs: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """The largest fall of any task after any later one, and where; accuracies as learned and at the end."""
    config = Config().with_values({"epochs": epochs, "seed": seed, **values})
    tasks = find_tasks(config, data_root() / "plants").tasks
    run = learn_sequence(build_network(config), tasks, config.learning)
    falls = [
        ((before or 0) - (after or 0), earlier, tasks[number].name)
        for number, (one, two) in enumerate(pairwise(run.matrix), start=1)
        for before, after, earlier in zip(one, two, run.tasks, strict=False)
    ]
    fall, earlier, later = max(falls)
    row = {
        "largest_fall": fall,
        "where": f"{earlier} after {later}" if fall > 0 else "",
        "learned": [line[-1] for line in run.matrix],
        "at_end": list(run.matrix[-1]),
        "similar": {name: list(record.similar) for name, record in run.records.items() if record.similar},
        "kept": {name: {c.task: c.kept for c in record.changes} for name, record in run.records.items()},
        "reasons": [f"{n} {c.task}: {c.reason}" for n, record in run.records.items() for c in record.comparisons],
    }
    say(f"seed {seed}  crops, {epochs} epochs  {row}")
    return row


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """The recorded results, held against their targets."""
    found = results["changes"]
    worst = {
        f"{case}, {seed}": row["worst_class"]
        for seed, cases in found.items()
        for case, row in cases.items()
        if case.partition(",")[0] in HARMFUL
    }
    place = min(worst, key=lambda name: worst[name])
    what = "labels or style of a second task changed: largest loss of any class of the first, points"
    yield Figure("L11", what, -worst[place], "<= 1", "<= 0", note=f"{len(worst)} cases; {place}")
    falls = [
        (row["largest_fall"], row["where"]) for by_epochs in results["crops"].values() for row in by_epochs.values()
    ]
    largest, where = max(falls)
    what = "crops of photographs one by one: largest fall of any task after any later one, points"
    yield Figure("L14", what, largest, "<= 1", "<= 0", note=f"{len(falls)} runs; {where}")


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--parts", nargs="+", default=["changes", "crops"], choices=["changes", "crops"])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if "changes" in arguments.parts:
        rows = {f"seed {seed}": changes(seed, arguments.cases, {}) for seed in arguments.seeds}
        for case in next(iter(rows.values())):
            every = [by_case[case] for by_case in rows.values()]
            worst, gained = min(row["worst_class"] for row in every), fmean(row["gained"] for row in every)
            say(f"{case:35s} worst class {worst:+.2f}  gained {gained:+.2f}")
        if arguments.record:
            write_result("harm", "changes", rows, {**SETTINGS, "items": ITEMS, "tested": TESTED})
    if "crops" in arguments.parts:
        found = {
            f"seed {seed}": {str(epochs): crops(seed, epochs, {}) for epochs in CROPS_EPOCHS}
            for seed in arguments.seeds
        }
        if arguments.record:
            write_result("harm", "crops", found, {"epochs": CROPS_EPOCHS})


if __name__ == "__main__":
    main()
