"""For the soak: its book of events, `etcl` as a process that can be killed, and which answers are right."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from etcl_deploy.bundle.bundle import load_bundle
from etcl_deploy.runtime.predictor import Predictor

Answers = Mapping[tuple[str, int], tuple[int, Sequence[float]]]  # task, number of the image -> class, scores
FURTHEST = 1e-5  # between scores
PATIENCE = 400  # seconds for any command: longer than `etcl push` waits for an answer of the server


class BrokenError(Exception):
    """Something without which the soak cannot go on."""


class Book:
    """Every event as a line of JSON, how often each fault was injected, and all that should not have been."""

    def __init__(self, path: Path, began: float) -> None:
        self.path, self.began = path, began
        self.faults: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.troubles: list[str] = []
        self._lock = threading.Lock()

    def note(self, event: str, **details: Any) -> None:
        """Write a line."""
        line = json.dumps({"at": round(time.monotonic() - self.began, 3), "event": event, **details}) + "\n"
        with self._lock, self.path.open("a") as file:
            file.write(line)

    def fault(self, kind: str, **details: Any) -> None:
        """Something bad is being done."""
        self.faults[kind] += 1
        self.note("fault", kind=kind, **details)

    def trouble(self, words: str) -> None:
        """Something went wrong that must not."""
        self.troubles.append(words)
        self.note("TROUBLE", words=words)

    def check(self, holds: bool, words: str) -> None:
        """Note as trouble what does not hold."""
        if not holds:
            self.trouble(words)


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    words: tuple[str, ...]
    code: int
    out: str
    err: str
    seconds: float

    @property
    def killed(self) -> bool:
        return self.code == -9

    @property
    def complaint(self) -> str:
        """The last line it said to a person."""
        return (self.err.strip().splitlines() or [""])[-1]

    def refused(self) -> bool:
        """Whether it failed as a command should: code 1 and one line that says why."""
        return self.code == 1 and self.complaint.startswith("error: ") and "Traceback" not in self.err


class Etcl:
    """`etcl` from this interpreter, one command at a time."""

    def __init__(self, folder: Path, chance: random.Random, book: Book) -> None:
        self._folder, self._chance, self._book = folder, chance, book
        (folder / "tmp").mkdir()
        self._seconds: dict[str, float] = {}  # how long each command took when nobody disturbed it
        self._process: subprocess.Popen[str] | None = None

    def run(self, *words: object, killed: bool = False, largest: int | None = None) -> Done:
        """Run it to its end, or kill it at a random moment; `largest` bounds the files it may write, in bytes."""
        told = tuple(map(str, words))
        limit = self._chance.uniform(0, 1.1 * self._seconds.get(told[0], 6.0)) if killed else PATIENCE
        began = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "etcl_deploy", *told],
            cwd=self._folder,  # not in the checkout, whose folder of that name is only half of the package
            env=self._environment(told[0]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=None if largest is None else _limiter(largest),
        )
        try:
            out, err = self._process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            self._process.kill()
            out, err = self._process.communicate()
            if killed:
                self._book.fault(f"etcl {told[0]} killed", after=round(limit, 2))
            else:
                self._book.trouble(f"etcl {told[0]} did not end within {PATIENCE} s")
        done = Done(told, self._process.returncode, out, err, time.monotonic() - began)
        if done.code == 0:
            self._seconds[told[0]] = done.seconds
        self._book.note("command", words=told[:2], code=done.code, seconds=round(done.seconds, 2), err=done.complaint)
        return done

    def _environment(self, command: str) -> dict[str, str]:
        """Temporary files where we see them; but for the server's, whose sockets need a short path."""
        own = {} if command == "serve" else {"TMPDIR": str(self._folder / "tmp")}
        return {**os.environ, "OMP_NUM_THREADS": "1", **own}

    def must(self, *words: object) -> Done:
        """Run it; it has to end well."""
        done = self.run(*words)
        if done.code:
            raise BrokenError(f"etcl {' '.join(done.words)} ended with {done.code}: {done.err[-500:]}")
        return done

    def end(self) -> None:
        """Kill the command that runs, if there is one."""
        if self._process and self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


def _limiter(largest: int) -> Any:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))


def leftovers(folder: Path) -> list[str]:
    """Half-written files below a folder."""
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if "half_" in path.name]


def answers_of(bundle: Path, images: Sequence[bytes]) -> Answers:
    """The answers of a bundle to every image, for every task."""
    predictor = Predictor(load_bundle(bundle))
    return {
        (task, number): (answer.index, list(answer.scores.values()))
        for task in predictor.bundle.tasks
        for number, answer in enumerate(predictor.predict(images, [task] * len(images)))
    }


@dataclass
class Span:
    """A time during which something holds."""

    begin: float
    end: float = inf

    def meets(self, sent: float, received: float) -> bool:
        """Whether it held at some moment between the two."""
        return self.begin <= received and sent <= self.end


@dataclass(frozen=True)
class Question:
    """A request: for a task and an image, or a bad one of some kind, which has a status and a code to get."""

    task: str
    image: int
    token: str
    kind: str = ""
    status: int = 200
    code: str = ""


def same_answer(answers: Answers, question: Question, body: bytes) -> bool:
    """Whether this is one of the answers, up to rounding."""
    try:
        index, scores = answers[question.task, question.image]
        told = json.loads(body)
        pairs = zip(told["scores"].values(), scores, strict=True)
        same_class = told["task"] == question.task and told["index"] == index
        return same_class and all(abs(a - b) <= FURTHEST for a, b in pairs)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
