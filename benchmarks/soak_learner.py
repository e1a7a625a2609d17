"""The soak's learner: a run that grows task by task while its trainer is killed and its disk fills up."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from soak_book import Book, BrokenError, Done, Etcl, leftovers
from soak_disk import SmallDisk

from etcl_deploy.bundle.bundle import load_bundle
from etcl_deploy.core.task import percent_right
from etcl_deploy.data.digits import digits
from etcl_deploy.errors import EtclError
from etcl_deploy.runs.store import load
from etcl_deploy.runs.task_loading import tasks_of
from etcl_deploy.runtime.predictor import Predictor

SETTINGS = [
    "--set",
    "width=4",
    "--set",
    "size=8",
    "--epochs",
    "2",
    "--set",
    "checkpoint_seconds=0.2",
    "--device",
    "cpu",
]
FIRST_TASKS = 2
ITEMS = 240  # of each later task


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


@dataclass(frozen=True)
class Finished:
    """A task as it was when it was finished: what run.json says of it, and its row of accuracies."""

    entry: dict[str, Any]
    row: list[float | None]


class Learner:
    """One run, its bundle file, and what they must still hold."""

    def __init__(self, work: Path, etcl: Etcl, chance: random.Random, book: Book, seed: int) -> None:
        self.run, self.bundle = work / "run", work / "out" / "soak.etcl"
        self.finished: dict[str, Finished] = {}
        self.lost: list[str] = []
        self._work, self._etcl, self._chance, self._book, self._seed = work, etcl, chance, book, seed

    def begin(self) -> None:
        """Learn the first tasks, and bundle them."""
        self._etcl.must("train", "digits", "--run", self.run, "--tasks", FIRST_TASKS, *SETTINGS)
        self._remember()
        self.write_bundle()

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
            same = load(twin).digest == load(self.run).digest
            self._book.check(same, f"{name}: the run that was killed {kills} times is not the one that was not")
            self._book.counts["runs compared with an undisturbed twin"] += 1
            shutil.rmtree(twin)
        self._book.check(not leftovers(self.run), f"left in the run: {leftovers(self.run)}")
        self._book.counts["tasks learned"] += 1

    def _add(self, name: str, folder: Path, kills: int) -> None:
        while True:
            stored = load(self.run, finished=False)  # which must be possible whenever it was killed
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
        found = [Finished(*pair) for pair in zip(record["tasks"], record["matrix"], strict=True)]
        for task in found:
            before = self.finished.setdefault(task.entry["name"], task)
            if task != before:
                self.lost.append(f"task {task.entry['name']} is no longer what it was")
        missing = self.finished.keys() - {task.entry["name"] for task in found}
        self.lost += [f"task {name} is gone" for name in missing]
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

    def fill_disk_of_bundle(self, disk: SmallDisk) -> None:
        """A bundle that finds no room: refused, the old one stays, and with room it is written."""
        target, folder = disk.folder / "small.etcl", disk.folder
        self._etcl.must("bundle", self.run, "-o", target)
        old = target.read_bytes()
        bound = disk.fill(self._chance.randrange(len(old)))
        self._book.fault("full disk: bundle")
        # Packed, since what is there already might be taken for what was to be written.
        done = self._etcl.run("bundle", self.run, "-o", target, "--encoding", "packed", largest=bound)
        self._refused(done, alone=True)
        self._book.check(target.read_bytes() == old, "a full disk cost the old bundle")
        self._book.check(disk.listed() == [target.name], f"a full disk left {disk.listed()} in {folder.name}")
        disk.clear()
        self._etcl.must("bundle", self.run, "-o", target, "--encoding", "packed")
        self._etcl.must("verify", target)
        target.unlink()

    def fill_disk_of_run(self, disk: SmallDisk) -> None:
        """A run that finds no room at some moment: refused, and with room it ends as if nothing had been."""
        whole, run = self._work / "whole", disk.folder / "run"
        words = ("train", "digits", "--tasks", 1, *SETTINGS)
        if not whole.exists():
            self._etcl.must(*words, "--run", whole)
        size = sum(path.stat().st_size for path in whole.rglob("*.safetensors"))
        bound = disk.fill(int(self._chance.uniform(0.05, 1.2) * size))
        self._book.fault("full disk: train")
        done = self._etcl.run(*words, "--run", run, largest=bound)
        if done.code:
            self._refused(done)
            left = leftovers(disk.folder)
            self._book.check(not left, f"a full disk left {left}")
        disk.clear()
        if done.code and (run / "run.json").exists():
            self._etcl.must("train", "--run", run, "--resume")
            self._book.counts["resumes"] += 1
        elif done.code:
            self._etcl.must(*words, "--run", run)
        self._book.check(load(run).digest == load(whole).digest, "a full disk changed what was learned")
        shutil.rmtree(run)

    def _refused(self, done: Done, *, alone: bool = False) -> None:
        lines = done.err.strip().splitlines()
        good = done.refused() and (len(lines) == 1 or not alone)
        self._book.check(good, f"etcl {done.words[0]} on a full disk: code {done.code}, {lines[-3:]}")
        self._book.note("full disk", said=done.complaint)

    def check_at_end(self) -> None:
        """The run holds every task that was ever finished, each as accurate as the run says, and nothing else."""
        self._remember()
        told = json.loads(self._etcl.must("eval", self.run, "--json").out)
        self._book.check(told["tasks"] == list(self.finished), f"etcl eval tells of {told['tasks']}")
        try:
            stored, predictor = load(self.run), Predictor(load_bundle(self.bundle))
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
        files = {task.entry["file"]["name"] for task in self.finished.values()}
        there = {path.name for path in (self.run / "tasks").iterdir()}
        self._book.check(there == files, f"in the run's tasks: {sorted(there ^ files)}")
