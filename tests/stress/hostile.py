"""A hundred thousand requests of which a tenth is bad, from 32 connections (S6, S7).

    python tests/stress/hostile.py --work DIR --requests 3000 --tasks 20 --rounds 1

First every question is asked alone, and its answer held against a plain masked network computed apart. Then the same
questions come mixed with bad ones: every good one must get the same bytes again, every bad one its own status; no
worker may be restarted, no memory grow (first against last quarter). Before that, throughput with a tenth of bad
requests beside throughput without, in turns.
"""

from __future__ import annotations

import io
import json
import random
import struct
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil
import torch
from PIL import Image
from torch import Tensor

from etcl_deploy.bundle.bundle import Bundle, load_bundle
from etcl_deploy.bundle.layout import split
from etcl_deploy.core.operations import NORMS, apply_weight, normalize
from etcl_deploy.core.pixels import png
from etcl_deploy.core.plan import Step
from etcl_deploy.serve.server import Server

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import load
from record import Figure, new_parser, say, write_result
from served import apply_load, images, pss, requests_for, served, workers_of, write_made

CONNECTIONS = 32
BAD_SHARE = 0.1
PICTURES = 5  # of each task
FURTHEST = 1e-5  # from the plain network, in probability


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


def alone(server: Server, requests: list[bytes]) -> list[bytes]:
    """The answer to each request when nothing else is asked."""
    answers = [b""] * len(requests)

    def heard(answer: load.Answer) -> None:
        if answer.status != 200:
            raise SystemExit(f"request {answer.number} got {answer.status}: {answer.body!r}")
        answers[answer.number] = answer.body

    load.run(server.port, load.in_order(requests, range(len(requests))), 1, heard)
    return answers


def to_plain_network(bundle: Bundle, answers: list[bytes]) -> float:
    """The largest difference between these answers and a plain network's.

    Answer n is about task n % tasks, with image n % tasks + n // tasks.
    """
    pictures, tasks, worst = images(), len(bundle.tasks), 0.0
    for number, body in enumerate(answers):
        task, image = f"task-{number % tasks}", pictures[(number % tasks + number // tasks) % len(pictures)]
        expected = plain_scores(bundle, task, image.unsqueeze(0))[0]
        answer = json.loads(body)
        scores = torch.tensor(list(answer["scores"].values()))
        worst = max(worst, float((scores - expected).abs().max()))
        if answer["index"] != int(expected.argmax()) or worst > FURTHEST:
            raise SystemExit(f"{task}: {answer}, but the plain network says {expected.tolist()}")
    return worst


def plain_scores(bundle: Bundle, name: str, pixels: Tensor) -> Tensor:
    """Probabilities from a plain masked network, computed apart: weight times mask, normalization as a step."""
    layout, task = bundle.layout, bundle.task(name)
    weights = split(bundle.weights * bundle.mask(name), layout.weights)
    norms = split(task.norm, layout.norms)

    def apply(step: Step, x: Tensor) -> Tensor:
        if step.op in NORMS:
            return normalize(step.op, step.settings, x, *norms[step.name])
        return apply_weight(step.op, step.settings, x, weights[step.name])

    features = bundle.plan.run(bundle.preprocessing.normalize(pixels), apply)
    head = task.head_values()
    return torch.nn.functional.linear(features, head["weight"], head.get("bias")).softmax(1)


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
        memory = {}
        for name in self.rows[0]:
            values = [row[name] / 1e6 for row in self.rows]
            first, last = fmean(values[:quarter]), fmean(values[-quarter:])
            memory[name] = {"first_mb": first, "last_mb": last, "ratio": last / first}
        return memory


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

    took = load.run(server.port, load.in_order(requests, order), CONNECTIONS, heard)
    return {"seconds": took, "counts": dict(sorted(counts.items())), "wrong": wrong}


def beside_clean(
    server: Server, bad: dict[str, Any], requests: list[bytes], rounds: int, seconds: float
) -> list[float]:
    """Good answers a second with bad requests among them, beside nine tenths of a clean run; one ratio a round."""
    good = len(requests) - len(bad)
    kinds = _weighted(good, bad)
    # Refusals are quick and count for nothing. Requests with a describe header are answered 200, too.
    expected = 1 - BAD_SHARE * (1 - bad["describe header"][3] / 100)
    ratios = []
    for seed in range(rounds):
        clean, mixture = (
            apply_load(server, requests, mixed(good, sent, 50_000, seed), CONNECTIONS, seconds)
            for sent in ([(0, 1)], kinds)
        )
        answered = (mixture.requests - mixture.errors) / mixture.seconds
        ratios.append(answered / expected / clean.throughput)
        say(f"good answers a second with bad requests / nine tenths of those without: {ratios[-1]:.3f}")
    return ratios


def _weighted(good: int, bad: dict[str, Any]) -> list[tuple[int, int]]:
    """The numbers of bad requests, which come after the good ones, with their weights."""
    return [(good + number, weight) for number, (*_, weight) in enumerate(bad.values())]


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """The recorded results, held against their targets."""
    row = results["hostile"]
    what = "10 % bad requests: share answered as it must be"
    yield Figure("S6", what, row["S6"]["right"], "= 1", "= 1", note=f"{row['counts']['good']:,} of them good")
    what = "10 % bad requests: good answers a second / a clean run"
    yield Figure("S6", what, row["S6"]["ratio"], ">= 0.9", ">= 0.98", row["ratios"])
    what = "answers with the same bytes alone and in any batch and mix of tasks, share"
    note = f"at most {row['S7']['to_plain_network']:.1e} from a plain masked network computed apart"
    yield Figure("S7", what, row["S7"]["same_bytes"], "= 1", "= 1", note=note)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5, help="of throughput with bad requests beside without")
    parser.add_argument("--seconds", type=float, default=5.0, help="of every load beside the other")
    arguments = parser.parse_args()
    bundle = write_made(arguments.work / "made.etcl", arguments.tasks)
    with served(bundle, "hostile", arguments.work) as server:
        good = [request for first in range(PICTURES) for request in requests_for(server, range(arguments.tasks), first)]
        bad = bad_requests(server)
        requests = good + [request for request, *_ in bad.values()]
        expected = alone(server, good)
        worst = to_plain_network(load_bundle(bundle), expected)
        apply_load(server, good, [n % len(good) for n in range(200 + 760 * arguments.rounds)], CONNECTIONS)
        ratios = beside_clean(server, bad, requests, arguments.rounds, arguments.seconds)
        before = sorted(worker.pid for worker in workers_of(server))
        watch = Watch(server)
        order = mixed(len(good), _weighted(len(good), bad), arguments.requests, 99)
        told = storm(server, requests, expected, bad, order)
        memory = watch.stop()
        same_workers = sorted(worker.pid for worker in workers_of(server)) == before
    counts = told["counts"]
    result = {
        **told,
        "S6": {"right": 1 - counts["wrong"] / arguments.requests, "ratio": median(ratios) if ratios else None},
        "S7": {"same_bytes": counts["same bytes"] / counts["good"], "to_plain_network": worst},
        "ratios": ratios,
        "memory": memory,
        "same_workers": same_workers,
    }
    say(json.dumps(result, indent=1))
    if arguments.record:
        settings = {"requests": arguments.requests, "tasks": arguments.tasks}
        write_result("hostile", "hostile", result, settings)
    sys.exit(bool(told["wrong"]) or not same_workers)


if __name__ == "__main__":
    main()
