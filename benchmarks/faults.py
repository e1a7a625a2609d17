"""A worker killed under load, and ten pushes under load.

    python benchmarks/faults.py --work DIR

Requests come from 16 connections all the while. Every answer is held against the bundles that could have given it: it
must be, byte for byte, what one of them answers when nothing else is asked. `--try` prints and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import load
from record import write_result
from served import requests_for, workers_of, write_made

from etcl_deploy.serve.process import stop
from etcl_deploy.serve.properties import any_free_port
from etcl_deploy.serve.push import push_bundle
from etcl_deploy.serve.server import Server
from etcl_deploy.serve.start import ServeOptions, serve_bundle

TASKS = 20
CONNECTIONS = 16


def questions(server: Server) -> list[bytes]:
    """Three images for every task."""
    return [request for first in range(3) for request in requests_for(server, range(TASKS), first)]


def answers_alone(server: Server) -> list[bytes]:
    """The answer to every task's question when nothing else is asked."""
    requests = questions(server)
    found = [b""] * len(requests)

    def heard(answer: load.Answer) -> None:
        assert answer.status == 200, answer
        found[answer.number] = answer.body

    load.run(server.port, requests, range(len(requests)), 1, heard)
    return found


def traffic(port: int, requests: list[bytes], known: list[set[bytes]], over: Path) -> dict[str, Any]:
    """Ask until there is a file `over`; what came back, and how long the longest wait was."""
    counts: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    longest = 0.0

    def heard(answer: load.Answer) -> None:
        nonlocal longest
        longest = max(longest, answer.seconds)
        if answer.status == 200:
            counts["right" if answer.body in known[answer.number] else "WRONG"] += 1
        else:
            counts[str(answer.status)] += 1
            failures[f"{answer.status} {answer.body[:160].decode('utf-8', 'replace')}"] += 1

    order = [number % len(requests) for number in range(1_000_000)]
    load.run(port, requests, order, CONNECTIONS, heard, lambda: not over.exists())
    return {"counts": dict(counts), "failures": dict(failures.most_common(5)), "longest_seconds": longest}


@contextmanager
def asking(pool: Pool, arguments: tuple[int, list[bytes], list[set[bytes]], Path]) -> Iterator[dict[str, Any]]:
    """Have another process ask while it lasts; afterwards what `traffic` found is in the dict."""
    over, found = arguments[-1], dict[str, Any]()
    asked = pool.apply_async(traffic, arguments)
    yield found
    over.touch()
    found |= asked.get()
    over.unlink()


def ready(server: Server) -> bool:
    return len(workers_of(server)) == server.workers and server.is_ready()


def main(say: Callable[[str], None]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--pushes", type=int, default=10)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--try", action="store_true", dest="trying")
    arguments = parser.parse_args()
    work: Path = arguments.work
    bundles = [write_made(work / f"{name}.etcl", TASKS, seed) for seed, name in enumerate("ab")]
    server = serve_bundle(bundles[0], "faults", work / "store", ServeOptions(any_free_port(), pushes=True))
    result: dict[str, Any] = {}
    try:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            first = answers_alone(server)
            push_bundle(bundles[1], server)
            second = answers_alone(server)
            assert not set(first) & set(second), "the bundles must answer differently"
            known = [{one, other} for one, other in zip(first, second, strict=True)]
            asked = partial(asking, pool, (server.port, questions(server), known, work / "over"))

            with asked() as found:
                time.sleep(2)
                times = []
                for turn in range(arguments.pushes):
                    began = time.monotonic()
                    push_bundle(bundles[turn % 2], server)
                    times.append(time.monotonic() - began)
                    say(f"push {turn + 1}: {times[-1]:.1f} s")
            result["pushes"] = {**found, "seconds": times}
            say(json.dumps(result["pushes"], indent=1))

            with asked() as found:
                recovered = []
                for _ in range(arguments.kills):
                    time.sleep(5)
                    victim = workers_of(server)[0]
                    os.kill(victim.pid, signal.SIGKILL)
                    began = time.monotonic()
                    time.sleep(1)
                    while not ready(server):
                        time.sleep(0.2)
                    recovered.append(time.monotonic() - began)
                    say(f"a worker killed; all ready again after {recovered[-1]:.1f} s")
                time.sleep(5)
            result["kills"] = {**found, "seconds_to_recover": recovered}
            say(json.dumps(result["kills"], indent=1))
    finally:
        stop(server)
    if set(result["pushes"]["counts"]) != {"right"} or "WRONG" in result["kills"]["counts"]:
        raise SystemExit("a request failed while a bundle was replaced, or got a wrong answer")
    if not arguments.trying:
        settings = {"tasks": TASKS, "connections": CONNECTIONS, "pushes": arguments.pushes, "kills": arguments.kills}
        write_result("faults", [], result, settings)


if __name__ == "__main__":
    main(partial(print, flush=True))
