"""The soak's server: bundles pushed to it under load, some of them damaged, while its workers are killed.

A right answer is one of a bundle that was served at some moment between the request and the answer. A request may fail
only while a worker is down; a bad request gets its own status.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from soak_book import Answers, Book, BrokenError, Done, Etcl, Question, Span, answers_of, leftovers, same_answer

from etcl_deploy.bundle.bundle import load_bundle
from etcl_deploy.errors import EtclError
from etcl_deploy.serve.process import still_running
from etcl_deploy.serve.properties import any_free_port
from etcl_deploy.serve.server import Server, known

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import load
from hostile import bad_requests
from served import pss, workers_of

NAME, WORKERS = "soak", 2
CONNECTIONS, RATE = 8, 100  # requests a second, at most
BAD_SHARE = 0.1
RECOVERY_SECONDS = 120  # for a worker that was killed
BETWEEN_KILLS = (8.0, 30.0)  # seconds


class Traffic(threading.Thread):
    """Requests all the while, and the judgement of every answer."""

    def __init__(self, server: Server, tasks: Sequence[str], images: Sequence[bytes], book: Book, seed: float) -> None:
        super().__init__(daemon=True)
        self.counts: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()  # while a worker was down
        self.bad: dict[str, Counter[str]] = {}
        self.longest = 0.0
        self.tasks = tasks  # what to ask about; every bundle that may answer holds these
        self.served: dict[str, tuple[Span, Answers]] = {}  # by the name of the bundle's file
        self.down: list[Span] = []  # when a worker was
        self.over = threading.Event()
        self._server, self._images, self._book, self._chance = server, images, book, random.Random(seed)
        self._asked: dict[int, Question] = {}
        self._read_token()

    def _read_token(self) -> None:
        server, task = self._server, self.tasks[0]
        self._token = server.token()
        self._bad = {kind: row for kind, row in bad_requests(server, task).items() if row[1] != 200}
        refused = self._request(task, 0, "nobody")
        self._bad["wrong token"] = (refused, 400, "InvalidKeyException", 10)

    def _request(self, task: str, image: int, token: str) -> bytes:
        headers = {"X-ETCL-Task": task, "Content-Type": "image/png"}
        return load.request(f"/predictions/{NAME}", self._images[image], token, headers)

    def run(self) -> None:
        """Ask until it is over."""
        try:
            load.run(self._server.port, self._questions(), CONNECTIONS, self._heard)
        except OSError as error:
            self._book.trouble(f"the load ended: {error}")

    def _questions(self) -> Iterator[tuple[int, bytes]]:
        chance, number = self._chance, 0
        while not self.over.wait(chance.uniform(0.5, 1.5) / RATE):
            number += 1
            task, image = chance.choice(self.tasks), chance.randrange(len(self._images))
            if chance.random() < BAD_SHARE:
                (kind,) = chance.choices(list(self._bad), [row[3] for row in self._bad.values()])
                request, status, code, _ = self._bad[kind]
                self._asked[number] = Question(task, image, self._token, kind, status, code)
            else:
                request = self._request(task, image, self._token)
                self._asked[number] = Question(task, image, self._token)
            yield number, request

    def _heard(self, answer: load.Answer) -> None:
        now, question = time.monotonic(), self._asked.pop(answer.number)
        sent = now - answer.seconds
        self.longest = max(self.longest, answer.seconds)
        if b"InvalidKey" in answer.body and self._server.token() != question.token:  # as happens once in an hour
            self.counts["tokens renewed"] += 1
            self._read_token()
        elif question.kind:
            self.counts["bad"] += 1
            self.bad.setdefault(question.kind, Counter())[str(answer.status)] += 1
            if answer.status != question.status or question.code.encode() not in answer.body:
                self._failure(question, answer, sent, now)
        else:
            self.counts["good"] += 1
            live = [answers for span, answers in list(self.served.values()) if span.meets(sent, now)]
            if answer.status != 200:
                self._failure(question, answer, sent, now)
            elif any(same_answer(answers, question, answer.body) for answers in live):
                self.counts["answered right"] += 1
            else:
                self.counts["wrong answers"] += 1
                self._book.note("WRONG", question=str(question), body=answer.body.decode("utf-8", "replace"))

    def end(self) -> dict[str, Any]:
        """Stop asking; what came of it."""
        self.over.set()
        self.join()
        bad = {kind: dict(statuses) for kind, statuses in sorted(self.bad.items())}
        return {**self.counts, "failed, and why": dict(self.failed), "bad requests": bad, "longest wait": self.longest}

    def _failure(self, question: Question, answer: load.Answer, sent: float, now: float) -> None:
        words = answer.body[:200].decode("utf-8", "replace")
        lost = answer.status in (0, 500, 503, 507) and any(span.meets(sent, now) for span in self.down)
        self.counts["failed while a worker was down" if lost else "failed for no reason"] += 1
        if lost:
            self.failed[f"{answer.status} {words}"] += 1
        self._book.note("failed" if lost else "FAILED", question=str(question), status=answer.status, body=words)


class Service:
    """A TorchServe with two workers, load on it, and what it serves by right."""

    def __init__(
        self, store: Path, bundle: Path, etcl: Etcl, chance: random.Random, book: Book, images: Sequence[bytes]
    ) -> None:
        self._store, self._etcl, self._chance, self._book, self._images = store, etcl, chance, book, images
        words = ("--name", NAME, "--model-store", store, "--port", any_free_port(), "--workers", WORKERS)
        self._etcl.must("serve", bundle, *words, "--allow-push")
        self.server, self.served = known(NAME, store), bundle
        self._over = threading.Event()
        self._killer = threading.Thread(target=self._kill_workers)
        self._last_kill = 0.0  # when workers were last known not to be whole
        self._chance_of_kills = random.Random(chance.random())
        self.traffic = Traffic(self.server, list(load_bundle(bundle).tasks), images, book, chance.random())

    def begin(self) -> None:
        """Put load on it, and kill workers now and then."""
        self._may_answer(self.served)
        self.traffic.start()
        self._killer.start()

    def _may_answer(self, bundle: Path) -> None:
        self.traffic.served[bundle.name] = (Span(time.monotonic()), answers_of(bundle, self._images))

    def _kill_workers(self) -> None:
        chance = self._chance_of_kills
        pause = chance.uniform(2, 8)
        while not self._over.wait(pause):
            pause = chance.uniform(*BETWEEN_KILLS)
            workers = workers_of(self.server) if self.server.process() else []
            if not workers:
                self._book.trouble("the server has no worker, or is gone")
                return
            victims = workers if chance.random() < 0.2 else [chance.choice(workers)]
            self.traffic.down.append(Span(time.monotonic()))
            for victim in victims:
                with suppress(psutil.Error):  # it has ended meanwhile
                    victim.kill()
                self._book.fault("worker killed", pid=victim.pid)
            began = self._last_kill = time.monotonic()
            while not self._whole({victim.pid for victim in victims}):
                self._last_kill = time.monotonic()
                if self._last_kill - began > RECOVERY_SECONDS:
                    self._book.trouble(f"a worker did not come back within {RECOVERY_SECONDS} s")
                    break
                time.sleep(0.2)
            self.traffic.down[-1].end = time.monotonic()
            self._book.note("workers whole", after=round(time.monotonic() - began, 2))

    def _whole(self, gone: set[int]) -> bool:
        """Whether every version has all its workers, and none of those that are gone."""
        with suppress(EtclError, KeyError, TypeError, ValueError):
            for version in self.server.manage("GET", f"/models/{NAME}/all"):
                ready = {int(worker["pid"]) for worker in version["workers"] if worker["status"] == "READY"}
                if len(ready) != WORKERS or ready & gone:
                    return False
            return True
        return False

    def push(self, bundle: Path, file: Path, *, kill: bool = False, full: bool = False) -> None:
        """Serve a bundle in the place of the one before, from its own file or from a delta to that."""
        self._may_answer(bundle)
        if full:
            self._push_without_room(bundle, file)
            file = bundle  # a delta may have been applied
        if kill:
            self._push(file, killed=True)
            digests = {load_bundle(path).digest for path in (self.served, bundle)}
            intact = load_bundle(self.server.bundle).digest in digests
            self._book.check(intact, "a killed `etcl push` left another bundle than the old or the new one")
            file = bundle
        for _ in range(5):
            began = time.monotonic()
            done = self._push(file)
            if done.code == 0:
                break
            excused = done.refused() and self._last_kill >= began
            self._book.check(excused, f"etcl push failed while all workers were well: {done.err[-500:]}")
            self._book.counts["pushes repeated since a worker was killed meanwhile"] += 1
            file = bundle
        else:
            raise BrokenError("five pushes in a row failed")
        self.traffic.served[self.served.name][0].end = time.monotonic()
        self.traffic.tasks = list(load_bundle(bundle).tasks)
        self._book.check(json.loads(done.out)["digest"] == load_bundle(bundle).digest, "etcl push tells another digest")
        self._book.counts["pushes"] += 1
        self.served = bundle
        self._check_store()

    def _push(self, file: Path, *, killed: bool = False, largest: int | None = None) -> Done:
        words = ("push", file, "--to", self.server.inference_url, "--model-store", self._store, "--json")
        return self._etcl.run(*words, killed=killed, largest=largest)

    def _push_without_room(self, bundle: Path, file: Path) -> None:
        """It must be refused, and the old bundle go on alone; unless there was room enough."""
        self._book.fault("full disk: push")
        archive = self._store / f"{NAME}.mar"
        done = self._push(file, largest=self._chance.randrange(2 * archive.stat().st_size))
        if done.code == 0:
            return
        self._book.check(done.refused(), f"etcl push on a full disk: code {done.code}, {done.err[-300:]}")
        self.traffic.served[bundle.name][0].end = time.monotonic()
        time.sleep(3)  # in which only the old one may answer
        self._may_answer(bundle)

    def push_damaged(self, bundle: Path, file: Path) -> None:
        """A bundle one bit of which is wrong is refused; nobody ever gets an answer from it."""
        data, before = bytearray(bundle.read_bytes()), self.server.bundle.read_bytes()
        data[self._chance.randrange(len(data))] ^= 1 << self._chance.randrange(8)
        file.write_bytes(data)
        self._book.fault("damaged bundle pushed")
        done = self._push(file)
        self._book.check(done.refused(), f"a damaged bundle: code {done.code}, {done.err[-300:]}")
        self._book.check(self.server.bundle.read_bytes() == before, "a damaged bundle took the place of the good one")
        file.unlink()

    def _check_store(self) -> None:
        """Nothing is left of pushes that failed, and the server holds one version."""
        self._book.check(self.server.bundle.read_bytes() == self.served.read_bytes(), "the server keeps another bundle")
        names = sorted(path.name for path in self._store.iterdir())
        self._book.check(names == ["servers", f"{NAME}.mar"], f"in the store: {names}")
        left = [*leftovers(self._store), *Path(self.server.directory).glob("pushed*")]
        self._book.check(not left, f"left in the store: {left}")

    def memory(self) -> dict[str, float]:
        """Megabytes of the server and of its workers."""
        process, workers = self.server.process(), 0
        for worker in workers_of(self.server):
            with suppress(psutil.Error):
                workers += pss(worker)
        return {"java_mb": process.memory_info().rss / 1e6 if process else 0, "workers_mb": workers / 1e6}

    def calm(self) -> dict[str, Any]:
        """Kill no more workers, wait until all are there, end the load; what came of that."""
        self._over.set()
        self._killer.join()
        time.sleep(2)
        return self.traffic.end()

    def check_at_end(self) -> None:
        """The last bundle is served, whole, in one version; archives of earlier ones are gone."""
        told = self.server.describe(customized=True)["customizedMetadata"]
        tasks = [task["name"] for task in told["tasks"]]
        self._book.check(tasks == list(load_bundle(self.served).tasks), f"the server answers for {tasks}")
        versions = self.server.manage("GET", f"/models/{NAME}/all")
        self._book.check(len(versions) == 1, f"{len(versions)} versions are served")
        extracted = list((Path(self.server.temporary) / "models").glob("*/"))
        self._book.check(len(extracted) == 1, f"{len(extracted)} archives are unpacked in the server's folder")
        self._etcl.must("verify", self.server.bundle)
        self._check_store()

    def stop(self) -> None:
        """End everything, by `etcl serve --stop`."""
        self._over.set()
        self.traffic.over.set()
        if self._killer.is_alive():
            self._killer.join()
        family = [self.server.process(), *workers_of(self.server)] if self.server.process() else []
        self._etcl.run("serve", "--name", NAME, "--model-store", self._store, "--stop")
        left = [process.pid for process in still_running([process for process in family if process], 0)]
        self._book.check(not left, f"still running: {left}")
        self._book.check(not Path(self.server.temporary).exists(), "the server's temporary folder is left")
