"""The soak: learn, bundle, push and ask while everything that can go wrong does.

    python tests/stress/soak.py --work DIR --minutes 20 --seed 0

A run grows task by task and every new bundle is pushed to a server under load, all with the real commands. Meanwhile,
at random: workers, trainer, `etcl bundle` and `etcl push` are killed with signal 9, damaged bundles are pushed, files
may not grow to the size they need, a tenth of the requests is bad. Every answer is held against the bundles that could
have given it; at the end everything that was ever finished must be there. DIR/soak.jsonl has a line for every event.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from soak_book import Book, BrokenError, Etcl, leftovers
from soak_server import CONNECTIONS, RATE, WORKERS, Service

from etcl_deploy.bundle.bundle import load_bundle
from etcl_deploy.core.pixels import png
from etcl_deploy.core.task import percent_right
from etcl_deploy.data.digits import digits
from etcl_deploy.errors import EtclError
from etcl_deploy.runs.store import load_run
from etcl_deploy.runs.task_loading import tasks_of
from etcl_deploy.runtime.predictor import Predictor

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from record import new_parser, say, write_result

SETTINGS = ("--set", "width=4", "--set", "size=8", "--set", "checkpoint_seconds=0.2", "--epochs", 2, "--device", "cpu")
FIRST_TASKS, ITEMS = 2, 240  # learned before there is load; items of each later task
IMAGES = 10  # to ask with
Finished = tuple[dict[str, Any], list[float | None]]  # what run.json says of a task, and its row of accuracies
FAULTS = ("kill trainer", "damaged push", "kill bundle", "full disk", "kill push")
FAULTS_A_ROUND = 2


def write_task(folder: Path, number: int, seed: int) -> None:
    """A task of real digits, some of them, turned, mirrored or inverted, as a folder of images."""
    chance = np.random.default_rng([seed, number])
    source = digits()[0].train
    chosen = chance.permutation(len(source))[:ITEMS]
    images = np.rot90(source.images[chosen], int(chance.integers(4)), (1, 2))
    images = images[:, :, ::-1] if chance.random() < 0.5 else images
    images = 255 - images if chance.random() < 0.5 else images
    for place, (image, label) in enumerate(zip(images, source.labels[chosen], strict=True)):
        path = folder / f"digit {label}" / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.ascontiguousarray(image)).save(path)


class Learner:
    """One run, its bundle file, and what they must still hold."""

    def __init__(self, work: Path, etcl: Etcl, chance: random.Random, book: Book, seed: int) -> None:
        self.run, self.bundle = work / "run", work / "out" / "soak.etcl"
        self.finished: dict[str, Finished] = {}  # by name, as they were when they were finished
        self.lost: list[str] = []
        self._work, self._etcl, self._chance, self._book, self._seed = work, etcl, chance, book, seed

    def begin(self) -> None:
        """Learn the first tasks, and bundle them."""
        self._etcl.must("train", "digits", "--run", self.run, "--tasks", FIRST_TASKS, *SETTINGS)
        self._remember()
        self.write_bundle()

    def copy_of_bundle(self) -> Path:
        """The bundle as it is now."""
        copy = self._work / "bundles" / f"{len(self.finished)}-tasks.etcl"
        copy.parent.mkdir(exist_ok=True)
        return Path(shutil.copyfile(self.bundle, copy))

    def learn(self, kills: int = 0) -> None:
        """One task more; if its trainer was killed, the run must be the one that a twin became that was not."""
        number = len(self.finished)
        name, folder = f"task-{number}", self._work / "images" / str(number)
        write_task(folder / name, number, self._seed)
        twin = Path(shutil.copytree(self.run, self._work / "twin")) if kills else None
        self._add(name, folder, kills)
        self._remember()
        if twin:
            self._etcl.must("add", twin, "--data", folder, "--device", "cpu")
            same = load_run(twin).digest == load_run(self.run).digest
            self._book.check(same, f"{name}: the run that was killed {kills} times is not the one that was not")
            self._book.counts["runs compared with an undisturbed twin"] += 1
            shutil.rmtree(twin)
        self._book.check(not leftovers(self.run), f"left in the run: {leftovers(self.run)}")
        self._book.counts["tasks learned"] += 1

    def _add(self, name: str, folder: Path, kills: int) -> None:
        while True:
            stored = load_run(self.run, finished=False)  # which must be possible whenever it was killed
            if name in stored.run.tasks:
                return
            begun = name in stored.waiting
            words = ("train", "--run", self.run, "--resume") if begun else ("add", self.run, "--data", folder)
            done = self._etcl.run(*words, "--device", "cpu", killed=kills > 0)
            self._book.counts["resumes"] += begun
            kills -= 1
            if done.code and not done.killed:
                raise BrokenError(f"{name} could not be learned: {done.err[-500:]}")

    def _remember(self) -> None:
        """Write down what is finished, and compare what was before."""
        record = json.loads((self.run / "run.json").read_text())
        tasks = {entry["name"]: (entry, row) for entry, row in zip(record["tasks"], record["matrix"], strict=True)}
        for name, task in tasks.items():
            if task != self.finished.setdefault(name, task):
                self.lost.append(f"task {name} is no longer what it was")
        self.lost += [f"task {name} is gone" for name in self.finished.keys() - tasks.keys()]
        rows = [line.split(",") for line in (self.run / "epochs.csv").read_text().splitlines()]
        self._book.check(all(len(row) == len(rows[0]) for row in rows), "epochs.csv has a row that is not whole")

    def write_bundle(self, *, kill: bool = False) -> None:
        """Bundle the run in the place of the bundle before; killed, the old or the new one is there as a whole."""
        if kill:
            old = self.bundle.read_bytes()
            done = self._etcl.run("bundle", self.run, "-o", self.bundle, killed=True)
            now = self.bundle.read_bytes()
            new = now != old and list(load_bundle(self.bundle).tasks) == list(self.finished)
            self._book.check(new or (done.killed and now == old), "a killed `etcl bundle` left neither bundle")
        self._etcl.must("bundle", self.run, "-o", self.bundle)
        left = leftovers(self.bundle.parent)
        self._book.check(not left, f"left beside the bundle: {left}")

    def check_at_end(self) -> None:
        """The run holds every task that was ever finished, each as accurate as the run says, and nothing else."""
        self._remember()
        told = json.loads(self._etcl.must("eval", self.run, "--json").out)
        self._book.check(told["tasks"] == list(self.finished), f"etcl eval tells of {told['tasks']}")
        try:
            stored, predictor = load_run(self.run), Predictor(load_bundle(self.bundle))
            said = dict(zip(stored.run.tasks, stored.run.matrix[-1], strict=True))
            for task in tasks_of(stored, self.lost.append, None):
                accuracy = percent_right([(predictor.logits(task.name, task.test.images), task.test.labels)])
                if abs(accuracy - (said[task.name] or 0)) > 1e-3:
                    self.lost.append(f"task {task.name} gets {accuracy} % right, the run says {said[task.name]}")
        except EtclError as error:
            self.lost.append(str(error))
        usual = {"run.json", ".lock", "tasks", "events.jsonl", "epochs.csv"}
        names = {path.name for path in self.run.iterdir() if not path.name.startswith("backbone-")}
        self._book.check(names == usual, f"in the run directory: {sorted(names)}")
        files = {entry["file"]["name"] for entry, _ in self.finished.values()}
        there = {path.name for path in (self.run / "tasks").iterdir()}
        self._book.check(there == files, f"in the run's tasks: {sorted(there ^ files)}")


def hands(chance: random.Random) -> Iterator[set[str]]:
    """The faults of each round, dealt from a shuffled pack of all of them."""
    pack: list[str] = []
    while True:
        if len(pack) < FAULTS_A_ROUND:
            pack += chance.sample(FAULTS, len(FAULTS))
        yield set(pack[:FAULTS_A_ROUND])
        del pack[:FAULTS_A_ROUND]


def one_round(hand: set[str], learner: Learner, service: Service, etcl: Etcl, chance: random.Random) -> None:
    """One task more, from its images to the answers about it."""
    learner.learn(kills=chance.choice((1, 1, 2)) if "kill trainer" in hand else 0)
    learner.write_bundle(kill="kill bundle" in hand)
    new = learner.copy_of_bundle()
    if "damaged push" in hand:
        service.push_damaged(new, new.with_name("damaged.etcl"))
    file = new
    if chance.random() < 0.5:
        file = new.with_suffix(".delta")
        etcl.must("delta", service.served, new, "-o", file)
    service.push(new, file, kill="kill push" in hand, full="full disk" in hand)


def soak(work: Path, minutes: float, seed: int) -> dict[str, Any]:
    """Rounds until the time is over, then a look at what is there; what it came to."""
    began, chance = time.monotonic(), random.Random(seed)
    book = Book(work / "soak.jsonl", began)
    etcl = Etcl(work, chance, book)
    learner = Learner(work, etcl, chance, book, seed)
    summary: dict[str, Any] = {}
    try:
        learner.begin()
        images = torch.from_numpy(digits()[2].test.images[:IMAGES].copy()).unsqueeze(-1)
        service = Service(
            work / "store", learner.copy_of_bundle(), etcl, chance, book, [png(image) for image in images]
        )
        try:
            service.begin()
            summary["memory at the beginning"] = service.memory()
            end = time.monotonic() + 60 * minutes
            for hand in hands(chance):
                book.note("round", faults=sorted(hand), memory=service.memory())
                one_round(hand, learner, service, etcl, chance)
                if time.monotonic() > end:
                    break
            summary |= service.calm()
            summary["memory at the end"] = service.memory()
            service.check_at_end()
        finally:
            etcl.end()
            service.stop()
        etcl.must("verify", learner.bundle)
        learner.check_at_end()
    except (BrokenError, EtclError, OSError) as error:
        book.trouble(f"{type(error).__name__}: {error}")
    counted = {"minutes": round((time.monotonic() - began) / 60, 1), "faults": dict(book.faults), **book.counts}
    return {**counted, **summary, "lost data": learner.lost, "troubles": book.troubles}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="a new folder")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    work: Path = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if any(work.iterdir()):
        raise SystemExit(f"{work} is not empty; name a new folder")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it stops what it has started
    summary = soak(work, arguments.minutes, arguments.seed)
    say(json.dumps(summary, indent=1))
    if arguments.record:
        write_result("soak", "soak", summary, {"workers": WORKERS, "connections": CONNECTIONS, "rate": RATE})
    bad = ("wrong answers", "failed for no reason", "lost data", "troubles")
    sys.exit(any(summary.get(name) for name in bad) or not summary.get("answered right"))


if __name__ == "__main__":
    main()
