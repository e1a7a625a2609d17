"""Workers killed with signal 9 and bundles replaced under load.

    python tests/stress/faults.py --work DIR --pushes 1 --kills 1

Requests come from 16 connections all the while. Every answer is held against the bundles that could have given it: it
must be, byte for byte, what one of them answers when nothing else is asked.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

from etcl_deploy.serve.process import stop
from etcl_deploy.serve.properties import any_free_port
from etcl_deploy.serve.push import push_bundle
from etcl_deploy.serve.server import Server
from etcl_deploy.serve.start import ServeOptions, serve_bundle

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import load
from hostile import alone
from record import new_parser, say, write_result
from served import requests_for, workers_of, write_made

TASKS, PICTURES, CONNECTIONS = 20, 3, 16


def questions(server: Server) -> list[bytes]:
    """Some images for every task."""
    return [request for first in range(PICTURES) for request in requests_for(server, range(TASKS), first)]


@contextmanager
def asking(server: Server, known: list[set[bytes]]) -> Iterator[dict[str, Any]]:
    """Ask while it lasts; afterwards the dict says what came back and how long the longest wait was."""
    counts: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    waits: list[float] = []
    over = threading.Event()

    def heard(answer: load.Answer) -> None:
        waits.append(answer.seconds)
        if answer.status == 200:
            counts["right" if answer.body in known[answer.number] else "WRONG"] += 1
        else:
            counts[str(answer.status)] += 1
            failures[f"{answer.status} {answer.body[:160].decode('utf-8', 'replace')}"] += 1

    requests = questions(server)
    asked = load.in_order(requests, cycle(range(len(requests))), lambda: not over.is_set())
    thread = threading.Thread(target=load.run, args=(server.port, asked, CONNECTIONS, heard))
    thread.start()
    told: dict[str, Any] = {}
    try:
        yield told
    finally:
        over.set()
        thread.join()
    told |= {"counts": dict(counts), "failures": dict(failures.most_common(5)), "longest_seconds": max(waits)}


def seconds_to_recover(server: Server) -> float:
    """Kill a worker; how long it takes until all are ready again."""
    os.kill(workers_of(server)[0].pid, signal.SIGKILL)
    began = time.monotonic()
    time.sleep(1)
    while not (len(workers_of(server)) == server.workers and server.is_ready()):
        time.sleep(0.2)
    return time.monotonic() - began


def seconds_of_push(bundle: Path, server: Server) -> float:
    """Serve a bundle in the place of the one before."""
    began = time.monotonic()
    push_bundle(bundle, server)
    return time.monotonic() - began


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--pushes", type=int, default=10)
    parser.add_argument("--kills", type=int, default=5)
    arguments = parser.parse_args()
    work: Path = arguments.work
    bundles = [write_made(work / f"{name}.etcl", TASKS, seed) for seed, name in enumerate("ab")]
    server = serve_bundle(bundles[0], "faults", work / "store", ServeOptions(any_free_port(), pushes=True))
    try:
        first = alone(server, questions(server))
        push_bundle(bundles[1], server)
        second = alone(server, questions(server))
        assert not set(first) & set(second), "the bundles must answer differently"
        known = [{one, other} for one, other in zip(first, second, strict=True)]
        with asking(server, known) as pushes:
            time.sleep(2)
            pushes["seconds"] = [seconds_of_push(bundles[turn % 2], server) for turn in range(arguments.pushes)]
        with asking(server, known) as kills:
            kills["seconds_to_recover"] = []
            for _ in range(arguments.kills):
                time.sleep(5)
                kills["seconds_to_recover"].append(seconds_to_recover(server))
            time.sleep(5)
    finally:
        stop(server)
    result = {"pushes": pushes, "kills": kills}
    say(json.dumps(result, indent=1))
    if set(pushes["counts"]) != {"right"} or "WRONG" in kills["counts"]:
        raise SystemExit("a request failed while a bundle was replaced, or got a wrong answer")
    if arguments.record:
        settings = {"tasks": TASKS, "connections": CONNECTIONS, "pushes": arguments.pushes, "kills": arguments.kills}
        write_result("faults", "faults", result, settings)


if __name__ == "__main__":
    main()
