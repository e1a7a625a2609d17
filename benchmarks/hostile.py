"""S6, S7: a hundred thousand requests of which a tenth is bad, from 32 connections.

    python benchmarks/hostile.py --work DIR

First every question is asked alone, and its answer held against a plain masked network computed apart. Then the same
questions come mixed with bad ones: every good one must get the same bytes again, every bad one its own status; no
worker may be restarted, no memory grow (first against last quarter). Before that, throughput with a tenth of bad
requests beside throughput without, in turns. `--try` prints the result and writes nothing.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import struct
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import load
import psutil
import torch
from PIL import Image
from record import read_options, write_result
from served import apply_load, images, plain_scores, pss, requests_for, workers_of, write_made

from etcl_deploy.bundle.bundle import load_bundle
from etcl_deploy.core.pixels import png
from etcl_deploy.export.to_mar import archive
from etcl_deploy.serve.process import serving
from etcl_deploy.serve.properties import any_free_port
from etcl_deploy.serve.server import Server
from etcl_deploy.serve.start import ServeOptions

CONNECTIONS = 32
BAD_SHARE = 0.1
PICTURES = 5  # of each task
FURTHEST = 1e-5  # from the plain network, in probability
ROUNDS = 5


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb() -> bytes:
    """A PNG of a few kilobytes with 400 million pixels."""
    header = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 0, 0, 0, 0)
    rows = zlib.compress(bytes(1_000_000), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def corrupt_jpeg() -> bytes:
    buffer = io.BytesIO()
    Image.frombytes("RGB", (64, 64), random.Random(0).randbytes(64 * 64 * 3)).save(buffer, "JPEG")
    return buffer.getvalue()[:-900]


def bad_requests(server: Server, task: str = "task-0") -> dict[str, tuple[bytes, int, str, int]]:
    """Kind -> request, the status and code it must get, how often of a hundred; `task` is one that is served."""
    path, token = f"/predictions/{server.name}", server.token()
    good = png(images(1)[0])
    named = {"X-ETCL-Task": task, "Content-Type": "image/png"}
    text = {"Content-Type": "application/json"}
    deep = f'{{"task": "{task}", "instances": '.encode() + b"[" * 100_000 + b"]" * 100_000 + b"}"

    def asked(body: bytes, headers: dict[str, str]) -> bytes:
        return load.request(path, body, token, headers)

    return {
        "unknown task": (asked(good, {**named, "X-ETCL-Task": "nobody"}), 404, "unknown_task", 15),
        "corrupt JPEG": (asked(corrupt_jpeg(), named), 400, "bad_image", 15),
        "decompression bomb": (asked(bomb(), named), 413, "too_large", 10),
        "20 MB body": (asked(bytes(20_000_000), named), 413, "", 1),
        "wrong type": (asked(b"hello", {**named, "Content-Type": "text/plain"}), 415, "unsupported_media", 14),
        "broken JSON": (asked(b'{"task": ', text), 400, "bad_request", 15),
        "deep JSON": (asked(deep, text), 400, "bad_request", 5),
        "missing task": (asked(good, {"Content-Type": "image/png"}), 400, "missing_task", 15),
        "describe header": (asked(good, {**named, "describe": "True"}), 200, "", 10),
    }


def mixed(good: int, kinds: list[tuple[int, int]], count: int, seed: int) -> list[int]:
    """Numbers of good requests with a tenth of bad ones among them; `kinds` are number and weight."""
    chance = random.Random(seed)
    numbers, weights = zip(*kinds, strict=True)
    return [
        chance.choices(numbers, weights)[0] if chance.random() < BAD_SHARE else chance.randrange(good)
        for _ in range(count)
    ]


def alone(server: Server, bundle: Path, tasks: int, requests: list[bytes]) -> tuple[list[bytes], float]:
    """The answer to each request when nothing else is asked, and the largest difference to the plain network.

    Request n is about task n % tasks, with image n % tasks + n // tasks.
    """
    found: list[bytes] = [b""] * len(requests)

    def heard(answer: load.Answer) -> None:
        if answer.status != 200:
            raise SystemExit(f"request {answer.number} got {answer.status}: {answer.body!r}")
        found[answer.number] = answer.body

    load.run(server.port, requests, range(len(requests)), 1, heard)
    loaded, pictures, worst = load_bundle(bundle), images(), 0.0
    for number, body in enumerate(found):
        task, image = f"task-{number % tasks}", pictures[(number % tasks + number // tasks) % len(pictures)]
        expected = plain_scores(loaded, task, image.unsqueeze(0))[0]
        answer = json.loads(body)
        scores = torch.tensor(list(answer["scores"].values()))
        worst = max(worst, float((scores - expected).abs().max()))
        if answer["index"] != int(expected.argmax()) or worst > FURTHEST:
            raise SystemExit(f"{task}: {answer}, but the plain network says {expected.tolist()}")
    return found, worst


class Watch:
    """Memory of the server and its workers, over time."""

    def __init__(self, server: Server) -> None:
        self.rows: list[dict[str, int]] = []
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        process = self._server.process()
        workers = workers_of(self._server)
        while process and not self._stop.wait(1):
            try:
                row = {f"worker {number}": pss(worker) for number, worker in enumerate(workers)}
                self.rows.append({**row, "java": process.memory_info().rss})
            except psutil.Error:
                return

    def stop(self) -> dict[str, dict[str, float]]:
        """Mean megabytes of the first and last quarter of the time, and their ratio."""
        self._stop.set()
        self._thread.join()
        quarter = max(1, len(self.rows) // 4)
        found = {}
        for name in self.rows[0]:
            values = [row[name] / 1e6 for row in self.rows]
            first, last = fmean(values[:quarter]), fmean(values[-quarter:])
            found[name] = {"first_mb": first, "last_mb": last, "ratio": last / first}
        return found


def storm(
    server: Server, requests: list[bytes], expected: list[bytes], bad: dict[str, Any], order: list[int]
) -> dict[str, Any]:
    """Send everything and judge every answer."""
    kinds = list(bad)
    counts: Counter[str] = Counter()
    wrong: list[str] = []

    def heard(answer: load.Answer) -> None:
        if answer.number < len(expected):
            right = answer.status == 200 and answer.body == expected[answer.number]
            counts["good"] += 1
            counts["same bytes"] += right
            name = f"request {answer.number}"
        else:
            name = kinds[answer.number - len(expected)]
            _, status, code, _ = bad[name]
            told = json.loads(answer.body).get("error", {}).get("code", "") if answer.body and code else ""
            right = answer.status == status and told == code
            counts[f"{name}: {answer.status}"] += 1
        if not right and len(wrong) < 20:
            wrong.append(f"{name}: {answer.status} {answer.body[:200]!r}")
        counts["wrong"] += not right

    took = load.run(server.port, requests, order, CONNECTIONS, heard)
    return {"seconds": took, "counts": dict(sorted(counts.items())), "wrong": wrong}


def main(say: Callable[[str], None]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--try", action="store_true", dest="trying")
    parser.add_argument("--seconds", type=float, default=5.0, help="of every load beside the other")
    arguments = read_options(parser, requests=3000, tasks=20, seconds=2.0)
    work, tasks = arguments.work, arguments.tasks
    work.mkdir(parents=True, exist_ok=True)
    bundle = write_made(work / "made.etcl", tasks)
    settings = ServeOptions().settings()
    archive(bundle, "hostile", work, settings)
    with serving("hostile", work, any_free_port(), settings["minWorkers"]) as server:
        good = [request for first in range(PICTURES) for request in requests_for(server, range(tasks), first)]
        bad = bad_requests(server)
        requests = good + [request for request, *_ in bad.values()]
        kinds = [(len(good) + number, weight) for number, (*_, weight) in enumerate(bad.values())]
        expected, worst = alone(server, bundle, tasks, good)
        apply_load(server, good, [n % len(good) for n in range(4000 if not arguments.trying else 200)], CONNECTIONS)
        ratios = []
        for seed in range(0 if arguments.trying else ROUNDS):
            both = [
                apply_load(server, requests, mixed(len(good), sent, 50_000, seed), CONNECTIONS, arguments.seconds)
                for sent in ([(0, 1)], kinds)
            ]
            # Of good answers, beside nine tenths of a clean run: refusals are quick and count for nothing. Those with a
            # describe header are answered 200, too.
            expected_share = 1 - BAD_SHARE * (1 - bad["describe header"][3] / 100)
            answered = (both[1].requests - both[1].errors) / both[1].seconds
            ratios.append(answered / expected_share / both[0].throughput)
            say(f"good answers a second with bad requests / nine tenths of those without: {ratios[-1]:.3f}")
        before = sorted(worker.pid for worker in workers_of(server))
        watch = Watch(server)
        began = time.monotonic()
        found = storm(server, requests, expected, bad, mixed(len(good), kinds, arguments.requests, 99))
        memory = watch.stop()
        same_workers = sorted(worker.pid for worker in workers_of(server)) == before
    result = {
        **found,
        "S6": {"right": 1 - found["counts"]["wrong"] / arguments.requests, "ratio": median(ratios) if ratios else None},
        "S7": {"same_bytes": found["counts"]["same bytes"] / found["counts"]["good"], "to_plain_network": worst},
        "ratios": ratios,
        "memory": memory,
        "same_workers": same_workers,
    }
    say(json.dumps(result, indent=1))
    if arguments.trying:
        sys.exit(bool(found["wrong"]) or not same_workers)
    say(f"{time.monotonic() - began:.0f} s")
    write_result("hostile", ["S6", "S7"], result, {"requests": arguments.requests, "tasks": tasks, **settings})


if __name__ == "__main__":
    main(partial(print, flush=True))
