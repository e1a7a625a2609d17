"""The soak's server: bundles pushed to it under load, some of them damaged, while its workers are killed."""

from __future__ import annotations

import json
import multiprocessing
import random
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from served import pss, workers_of
from soak_book import Book, BrokenError, Done, Etcl, leftovers
from soak_disk import SmallDisk
from soak_traffic import Ask, Known, MayAnswer, Retired, Workers, traffic

from etcl_deploy.bundle.bundle import load_bundle
from etcl_deploy.errors import EtclError
from etcl_deploy.runtime.predictor import Predictor
from etcl_deploy.serve.process import still_running
from etcl_deploy.serve.properties import any_free_port
from etcl_deploy.serve.server import Server, known

NAME, WORKERS = "soak", 2
RECOVERY_SECONDS = 120  # for a worker that was killed
BETWEEN_KILLS = (8.0, 30.0)  # seconds


def answers(bundle: Path, images: Sequence[bytes]) -> Known:
    """What a bundle says of every image, asked for every task."""
    predictor = Predictor(load_bundle(bundle))
    found: dict[tuple[str, int], tuple[int, Sequence[float]]] = {}
    for task in predictor.bundle.tasks:
        for number, answer in enumerate(predictor.predict(images, [task] * len(images))):
            found[task, number] = (answer.index, list(answer.scores.values()))
    return found


class Service:
    """A TorchServe with two workers, load on it, and what it serves by right."""

    def __init__(
        self, store: SmallDisk, etcl: Etcl, chance: random.Random, book: Book, images: Sequence[bytes], seed: int
    ) -> None:
        self._store, self._etcl, self._chance, self._book, self._images = store, etcl, chance, book, images
        self._seed = seed
        self.server: Server | None = None
        self.served: Path  # the bundle that answers, as a file of its own
        self._link = threading.Lock()
        self._news, self._other = multiprocessing.get_context("spawn").Pipe()
        arguments = (images, self._other, book.path, book.began, seed)
        self._load = multiprocessing.get_context("spawn").Process(target=traffic, args=arguments)
        self._load.start()  # what it has to load takes seconds
        self._other.close()
        self._over = threading.Event()
        self._last_kill = 0.0  # when workers were last known not to be whole
        self._killer: threading.Thread | None = None
        self._abandoned = False

    def start(self, bundle: Path) -> None:
        """Serve a bundle, and put load on it."""
        words = ("--name", NAME, "--model-store", self._store.folder, "--port", any_free_port(), "--workers", WORKERS)
        self._etcl.must("serve", bundle, *words, "--allow-push")
        self.server, self.served = known(NAME, self._store.folder), bundle
        self._news.send(self.server)
        self._tell(MayAnswer(bundle.name, answers(bundle, self._images)))
        self._tell(Ask(list(load_bundle(bundle).tasks)))
        self._killer = threading.Thread(target=self._kill_workers, args=(random.Random(f"{self._seed} workers"),))
        self._killer.start()

    def _tell(self, news: Any) -> None:
        """Let the load know, before anything else happens."""
        with self._link:
            self._news.send(news)
            self._news.recv()

    def _kill_workers(self, chance: random.Random) -> None:
        assert self.server
        pause = chance.uniform(2, 8)
        while not self._over.wait(pause):
            pause = chance.uniform(*BETWEEN_KILLS)
            workers = workers_of(self.server) if self.server.process() else []
            if not workers:
                self._book.trouble("the server has no worker, or is gone")
                return
            victims = workers if chance.random() < 0.2 else [chance.choice(workers)]
            self._tell(Workers(whole=False))
            for victim in victims:
                with suppress(psutil.Error):  # it has ended meanwhile
                    victim.kill()
                self._book.fault("worker killed", pid=victim.pid)
            began = self._last_kill = time.monotonic()
            while not (self._whole({victim.pid for victim in victims}) or self._abandoned):
                self._last_kill = time.monotonic()
                if self._last_kill - began > RECOVERY_SECONDS:
                    self._book.trouble(f"a worker did not come back within {RECOVERY_SECONDS} s")
                    break
                time.sleep(0.2)
            self._tell(Workers(whole=True))
            self._book.note("workers whole", after=round(time.monotonic() - began, 2))

    def _whole(self, gone: set[int]) -> bool:
        """Whether every version has all its workers, and none of those that are gone."""
        assert self.server
        with suppress(EtclError, KeyError, TypeError, ValueError):
            for version in self.server.manage("GET", f"/models/{NAME}/all"):
                ready = {int(worker["pid"]) for worker in version["workers"] if worker["status"] == "READY"}
                if len(ready) != WORKERS or ready & gone:
                    return False
            return True
        return False

    def push(self, bundle: Path, file: Path, *, kill: bool = False, full: bool = False) -> None:
        """Serve a bundle in the place of the one before, from its own file or from a delta to that."""
        assert self.server
        self._tell(MayAnswer(bundle.name, answers(bundle, self._images)))
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
        self._tell(Retired(self.served.name))
        self._tell(Ask(list(load_bundle(bundle).tasks)))
        self._book.check(json.loads(done.out)["digest"] == load_bundle(bundle).digest, "etcl push tells another digest")
        self._book.counts["pushes"] += 1
        self.served = bundle
        self._check_store()

    def _push(self, file: Path, *, killed: bool = False, largest: int | None = None) -> Done:
        assert self.server
        words = ("push", file, "--to", self.server.inference_url, "--model-store", self._store.folder, "--json")
        return self._etcl.run(*words, killed=killed, largest=largest)

    def _push_without_room(self, bundle: Path, file: Path) -> None:
        """It must be refused, and the old bundle go on alone; unless there was room enough."""
        needed = bundle.stat().st_size + 2 * (self._store.folder / f"{NAME}.mar").stat().st_size
        bound = self._store.fill(self._chance.randrange(needed))
        self._book.fault("full disk: push")
        try:
            done = self._push(file, largest=bound)
        finally:
            self._store.clear()
        self._book.note("full disk", said=done.complaint)
        if done.code == 0:
            return
        self._book.check(done.refused(), f"etcl push on a full disk: code {done.code}, {done.err[-300:]}")
        self._tell(Retired(bundle.name))
        time.sleep(3)  # in which only the old one may answer
        self._tell(MayAnswer(bundle.name, answers(bundle, self._images)))

    def push_damaged(self, bundle: Path, file: Path) -> None:
        """A bundle one bit of which is wrong is refused; nobody ever gets an answer from it."""
        assert self.server
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
        assert self.server
        self._book.check(self.server.bundle.read_bytes() == self.served.read_bytes(), "the server keeps another bundle")
        found = sorted(path.name for path in self._store.folder.iterdir())
        self._book.check(found == ["servers", f"{NAME}.mar"], f"in the store: {found}")
        left = [*leftovers(self._store.folder), *Path(self.server.directory).glob("pushed*")]
        self._book.check(not left, f"left in the store: {left}")

    def memory(self) -> dict[str, float]:
        """Megabytes of the server and of its workers."""
        assert self.server
        process = self.server.process()
        java = process.memory_info().rss if process else 0
        workers = []
        for worker in workers_of(self.server):
            with suppress(psutil.Error):
                workers.append(pss(worker))
        return {"java_mb": round(java / 1e6, 1), "workers": len(workers), "workers_mb": round(sum(workers) / 1e6, 1)}

    def calm(self) -> Mapping[str, Any]:
        """Kill no more workers, wait until all are there, end the load; what came of that."""
        if self.server is None:
            raise BrokenError("nothing was served")
        self._over.set()
        if self._killer:
            self._killer.join()
        time.sleep(2)
        with self._link:
            self._news.send(None)
            found: Mapping[str, Any] = self._news.recv()
        self._load.join()
        return found

    def check_at_end(self) -> None:
        """What is served is the last bundle, whole, in one version; its archives of earlier ones are gone."""
        assert self.server
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
        self._abandoned = True
        if self._killer:
            self._killer.join()
        if self._load.is_alive():
            self._load.kill()
            self._load.join()
        if self.server:
            family = [self.server.process(), *workers_of(self.server)] if self.server.process() else []
            self._etcl.run("serve", "--name", NAME, "--model-store", self._store.folder, "--stop")
            left = [process.pid for process in still_running([process for process in family if process], 0)]
            self._book.check(not left, f"still running: {left}")
            self._book.check(not Path(self.server.temporary).exists(), "the server's temporary folder is left")
            self.server = None
