"""The soak: learn, bundle, push and ask for twenty minutes while everything that can go wrong does.

    python benchmarks/soak.py --work DIR --minutes 20 --seed 0

A run grows task by task and every new bundle is pushed to a server under load, all with the real commands. Meanwhile,
at random: workers, trainer, `etcl bundle` and `etcl push` are killed with signal 9, damaged bundles are pushed, disks
fill up, a tenth of the requests is bad. Every answer is held against the bundles that could have given it; at the end
everything that was ever finished must be there. DIR/soak.jsonl has a line for every event. `--try` prints the summary
and writes no result.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import psutil
import torch
from record import write_result
from soak_book import Book, BrokenError, Etcl
from soak_disk import SmallDisk
from soak_learner import SETTINGS, Learner
from soak_service import WORKERS, Service
from soak_traffic import CONNECTIONS, RATE

from etcl_deploy.core.pixels import png
from etcl_deploy.data.digits import digits
from etcl_deploy.errors import EtclError

IMAGES = 10
STORE_BYTES, DISK_BYTES = 256 << 20, 16 << 20
# In every round some of them, each equally often.
FAULTS = (
    "kill trainer",
    "damaged push",
    "kill bundle",
    "full disk: push",
    "kill push",
    "full disk: bundle",
    "full disk: train",
)
FAULTS_A_ROUND = 3


def hands(chance: random.Random) -> Iterator[set[str]]:
    """The faults of each round, dealt from a shuffled pack of all of them."""
    pack: list[str] = []
    while True:
        if len(pack) < FAULTS_A_ROUND:
            pack += chance.sample(FAULTS, len(FAULTS))
        hand = set(pack[:FAULTS_A_ROUND])
        del pack[:FAULTS_A_ROUND]
        yield hand


class Soak:
    """Everything that takes part."""

    def __init__(self, work: Path, minutes: float, seed: int) -> None:
        self.began = time.monotonic()
        self._minutes, self._end = minutes, inf  # from when there is load
        self.work, self._chance = work, random.Random(seed)
        self.book = Book(work / "soak.jsonl", self.began)
        self.disk, store = SmallDisk(work / "small", DISK_BYTES), SmallDisk(work / "store", STORE_BYTES)
        self._disks = (self.disk, store)
        self.etcl = Etcl(work, self._chance, self.book)
        self.learner = Learner(work, self.etcl, self._chance, self.book, seed)
        images = torch.from_numpy(digits()[2].test.images[:IMAGES].copy()).unsqueeze(-1)
        self.service = Service(store, self.etcl, self._chance, self.book, [png(image) for image in images], seed)
        self.found: dict[str, Any] = {}

    def go(self) -> None:
        """The whole of it; what goes wrong is in the book."""
        for part in (self._work, self._look_back):
            try:
                part()
            except (BrokenError, EtclError, OSError, EOFError) as error:
                self.book.trouble(f"{type(error).__name__}: {error}")

    def _work(self) -> None:
        """Rounds, until the time is over."""
        self.learner.begin()
        self.service.start(self._kept())
        self._end = time.monotonic() + 60 * self._minutes
        time.sleep(2)
        self.found["memory at the beginning"] = self.service.memory()
        for hand in hands(self._chance):
            self._round(hand)
            self.book.note("memory", **self.service.memory())
            if time.monotonic() > self._end:
                break

    def _look_back(self) -> None:
        """Is everything there that should be?"""
        self.found["load"] = self.service.calm()
        self.found["memory at the end"] = self.service.memory()
        self.service.check_at_end()
        self.etcl.must("verify", self.learner.bundle)
        self.learner.check_at_end()

    def _round(self, hand: set[str]) -> None:
        """One task more, from its images to the answers about it."""
        chance, learner, service = self._chance, self.learner, self.service
        self.book.note("round", faults=sorted(hand))

        def drawn(fault: str) -> bool:
            return fault in hand and time.monotonic() < self._end

        learner.learn(kills=chance.choice((1, 1, 2)) if drawn("kill trainer") else 0)
        if drawn("full disk: train"):
            learner.fill_disk_of_run(self.disk)
        learner.write_bundle(kill=drawn("kill bundle"))
        if drawn("full disk: bundle"):
            learner.fill_disk_of_bundle(self.disk)
        old, new = service.served, self._kept()
        if drawn("damaged push"):
            service.push_damaged(new, self.work / "damaged.etcl")
        file = new
        if chance.random() < 0.5:
            file = self.work / "out" / "soak.delta"
            self.etcl.must("delta", old, new, "-o", file)
            self.book.counts["deltas made"] += 1
        service.push(new, file, kill=drawn("kill push"), full=drawn("full disk: push"))

    def _kept(self) -> Path:
        """A copy of the bundle as it is now."""
        copy = self.work / "bundles" / f"{len(self.learner.finished)}-tasks.etcl"
        copy.parent.mkdir(exist_ok=True)
        return Path(shutil.copyfile(self.learner.bundle, copy))

    def close(self) -> None:
        """Stop all that was started, whatever happened."""
        self.etcl.end()
        self.service.stop()
        for disk in self._disks:
            disk.close()
        above = {process.pid for process in (psutil.Process(), *psutil.Process().parents())}
        left = [process.pid for process in psutil.process_iter() if process.pid not in above and self._is_ours(process)]
        self.book.check(not left, f"still running: {left}")

    def _is_ours(self, process: psutil.Process) -> bool:
        """Whether it is at work in our folder; those that started us only name it."""
        try:
            words = process.cmdline()
            return process.name().startswith(("python", "java")) and any(str(self.work) in word for word in words)
        except psutil.Error:
            return False

    def summary(self) -> dict[str, Any]:
        """What it came to."""
        load: Mapping[str, Any] = self.found.get("load", {"counts": {}, "failed": {}, "bad": {}, "longest": None})
        counts = load["counts"]
        return {
            "minutes": round((time.monotonic() - self.began) / 60, 1),
            "requests": counts.get("good", 0) + counts.get("bad", 0),
            "good": counts.get("good", 0),
            "answered right": counts.get("right", 0),
            "wrong answers": counts.get("wrong", 0),
            "failed for no reason": counts.get("failed for no reason", 0),
            "failed while a worker was down": load["failed"],
            "bad requests": load["bad"],
            "connections given up": counts.get("connections given up", 0),
            "tokens renewed": counts.get("token renewed", 0),
            "longest wait in seconds": load["longest"],
            "faults": dict(sorted(self.book.faults.items())),
            **dict(sorted(self.book.counts.items())),
            "lost data": self.learner.lost,
            "troubles": self.book.troubles,
            **{name: value for name, value in self.found.items() if name != "load"},
        }


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def main(say: Callable[[str], None]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="A new folder.")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--try", action="store_true", dest="trying")
    arguments = parser.parse_args()
    work: Path = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if any(work.iterdir()):
        raise SystemExit(f"{work} is not empty; name a new folder")
    signal.signal(signal.SIGTERM, interrupted)
    soak = Soak(work, arguments.minutes, arguments.seed)
    try:
        soak.go()
    finally:
        soak.close()
    summary = soak.summary()
    say(json.dumps(summary, indent=1))
    if not arguments.trying:
        settings = {"train": SETTINGS, "workers": WORKERS, "connections": CONNECTIONS, "rate": RATE}
        write_result("soak", [], summary, {**settings, "mounted disks": soak.disk.real})
    nothing = ("wrong answers", "failed for no reason", "connections given up", "lost data", "troubles")
    sys.exit(any(summary[name] for name in nothing) or not summary["answered right"])


if __name__ == "__main__":
    main(partial(print, flush=True))
