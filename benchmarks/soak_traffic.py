"""The soak's load: requests from a process of its own, all the while, and the judgement of every answer.

It is told which bundles may answer from when to when, and when a worker is down. A right answer is one that such a
bundle gives to that image; a request may fail only while a worker is down; a bad request gets its own status.
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import load
from hostile import bad_requests
from soak_book import Book

from etcl_deploy.serve.server import Server

CONNECTIONS = 8
RATE = 100  # requests a second, at most
BAD_SHARE = 0.1
FURTHEST = 1e-5  # between scores
PATIENCE = 40  # seconds for one answer

Known = Mapping[tuple[str, int], tuple[int, Sequence[float]]]  # task, number of the image -> class, scores


@dataclass(frozen=True)
class MayAnswer:
    """From now on this bundle may answer."""

    bundle: str
    answers: Known


@dataclass(frozen=True)
class Retired:
    """From now on it may not."""

    bundle: str


@dataclass(frozen=True)
class Ask:
    """What to ask about from now on; every bundle that may answer holds these tasks."""

    tasks: Sequence[str]


@dataclass(frozen=True)
class Workers:
    """Some were killed; or all are there again."""

    whole: bool


@dataclass
class Span:
    """A time during which something holds."""

    begin: float
    end: float = inf

    def meets(self, sent: float, received: float) -> bool:
        return self.begin <= received and sent <= self.end


class Judge:
    """Every answer, held against what was possible between sending and receiving."""

    def __init__(self, book: Book) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()  # while a worker was down
        self.bad: dict[str, Counter[str]] = {}
        self.tasks: Sequence[str] = ()
        self.longest = 0.0
        self._book = book
        self._live: dict[str, tuple[Span, Known]] = {}
        self._down: list[Span] = []
        self._lock = threading.Lock()

    def learn(self, news: Any) -> None:
        """Something changed at the server."""
        now = time.monotonic()
        with self._lock:
            if isinstance(news, MayAnswer):
                self._live[news.bundle] = (Span(now), news.answers)
            elif isinstance(news, Retired):
                self._live[news.bundle][0].end = now
            elif isinstance(news, Ask):
                self.tasks = news.tasks
            elif not news.whole:
                self._down.append(Span(now))
            else:
                self._down[-1].end = now

    def good(self, task: str, image: int, status: int, body: bytes, sent: float) -> None:
        """The answer to a request that deserves one."""
        now = time.monotonic()
        with self._lock:
            self.counts["good"] += 1
            self.longest = max(self.longest, now - sent)
            if status != 200:
                self._failure(f"task {task}", status, body, sent, now)
            elif any(
                self._same(known, task, image, body) for span, known in self._live.values() if span.meets(sent, now)
            ):
                self.counts["right"] += 1
            else:
                self.counts["wrong"] += 1
                live = {name: vars(span) for name, (span, _) in self._live.items()}
                self._book.note("WRONG", task=task, image=image, body=body.decode("utf-8", "replace"), live=str(live))

    def refusal(self, kind: str, expected: tuple[int, str], status: int, body: bytes, sent: float) -> None:
        """The answer to a bad request."""
        with self._lock:
            self.counts["bad"] += 1
            self.bad.setdefault(kind, Counter())[str(status)] += 1
            if status != expected[0] or expected[1].encode() not in body:
                self._failure(kind, status, body, sent, time.monotonic())
            else:
                self.counts["refused as it should be"] += 1

    def _failure(self, what: str, status: int, body: bytes, sent: float, now: float) -> None:
        words = body[:200].decode("utf-8", "replace")
        reason = f"{status} {_message(body)}" if status else words
        lost = status in (0, 500, 503, 507) and any(span.meets(sent, now) for span in self._down)
        self.counts["failed while a worker was down" if lost else "failed for no reason"] += 1
        if lost:
            self.failed[reason] += 1
        self._book.note("failed" if lost else "FAILED", what=what, status=status, body=words, seconds=now - sent)

    @staticmethod
    def _same(known: Known, task: str, image: int, body: bytes) -> bool:
        if (task, image) not in known:
            return False
        index, scores = known[task, image]
        try:
            found = json.loads(body)
            pairs = zip(found["scores"].values(), scores, strict=True)
            return found["task"] == task and found["index"] == index and all(abs(a - b) <= FURTHEST for a, b in pairs)
        except (ValueError, KeyError, TypeError, AttributeError):
            return False


def _message(body: bytes) -> str:
    """What an error of TorchServe says, without what differs from one to the next."""
    try:
        return str(json.loads(body)["message"])[:60]
    except (ValueError, KeyError, TypeError):
        return "without a message"


class Requests:
    """What is sent, with the current token."""

    def __init__(self, server: Server, images: Sequence[bytes], task: str) -> None:
        self._server, self._images, self._task = server, images, task
        self._read()

    def _read(self) -> None:
        server = self._server
        self.token = server.token()
        self.bad = {kind: row for kind, row in bad_requests(server, self._task).items() if row[1] != 200}
        named = {"X-ETCL-Task": self._task, "Content-Type": "image/png"}
        refused = load.request(f"/predictions/{server.name}", self._images[0], "nobody", named)
        self.bad["wrong token"] = (refused, 400, "InvalidKeyException", 10)

    def good(self, task: str, image: int) -> bytes:
        """A request that deserves an answer."""
        named = {"X-ETCL-Task": task, "Content-Type": "image/png"}
        return load.request(f"/predictions/{self._server.name}", self._images[image], self.token, named)

    def renewed(self, used: str) -> bool:
        """Whether a refused token was replaced meanwhile, as happens once in an hour."""
        for _ in range(20):
            if self._server.token() != used:
                self._read()
                return True
            time.sleep(0.1)
        return False


def exchange(line: socket.socket, request: bytes) -> tuple[int, bytes, bool]:
    """Status, body and whether the connection stays open; status 0: it broke, or nothing came."""
    data = bytearray()
    with suppress(OSError):  # refused while it was being sent: the answer may be there
        line.sendall(request)
    try:
        while (found := load.parsed(data)) is None:
            part = line.recv(load.CHUNK)
            if not part:
                return 0, b"the connection broke", False
            data += part
    except TimeoutError:
        return 0, b"no answer", False
    except OSError:
        return 0, b"the connection broke", False
    return found


def ask(
    server: Server, requests: Requests, images: int, judge: Judge, chance: random.Random, over: threading.Event
) -> None:
    """One connection: a request, its answer, a pause."""
    line: socket.socket | None = None
    kinds = list(requests.bad)
    weights = [requests.bad[kind][3] for kind in kinds]
    while not over.wait(chance.uniform(0.5, 1.5) * CONNECTIONS / RATE):
        kind = chance.choices(kinds, weights)[0] if chance.random() < BAD_SHARE else ""
        task, image, used = chance.choice(judge.tasks), chance.randrange(images), requests.token
        request, status, code, _ = requests.bad[kind] if kind else (requests.good(task, image), 200, "", 0)
        sent = time.monotonic()
        found, body, lasts = 0, b"no connection", False
        with suppress(OSError):
            line = line or socket.create_connection(("127.0.0.1", server.port), PATIENCE)
            found, body, lasts = exchange(line, request)
        if line and not lasts:
            line.close()
            line = None
        if found == 400 and b"InvalidKey" in body and kind != "wrong token" and requests.renewed(used):
            judge.counts["token renewed"] += 1
        elif kind:
            judge.refusal(kind, (status, code), found, body, sent)
        else:
            judge.good(task, image, found, body, sent)
    if line:
        line.close()


def traffic(images: Sequence[bytes], news: Connection, log: Path, began: float, seed: int) -> None:
    """Ask until told to stop (or left alone), then tell what came of it; the process's whole life."""
    judge = Judge(Book(log, began))
    over, threads = threading.Event(), []
    server: Server = news.recv()
    while (heard := news.recv()) is not None:
        judge.learn(heard)
        news.send(True)
        if judge.tasks and not threads:
            requests = Requests(server, images, judge.tasks[0])
            threads = [
                threading.Thread(
                    target=ask,
                    args=(server, requests, len(images), judge, random.Random(f"{seed} {number}"), over),
                    daemon=True,  # if whoever started us is gone, so are we
                )
                for number in range(CONNECTIONS)
            ]
            for thread in threads:
                thread.start()
    judge.counts["connections given up"] = sum(not thread.is_alive() for thread in threads)
    over.set()
    for thread in threads:
        thread.join()
    bad = {kind: dict(statuses) for kind, statuses in sorted(judge.bad.items())}
    news.send({"counts": dict(judge.counts), "failed": dict(judge.failed), "bad": bad, "longest": judge.longest})
