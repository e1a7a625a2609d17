"""S8: how many tasks one worker serves at the same p99.

    python benchmarks/many_tasks.py --work DIR

One worker, four connections. Two servers are up at a time, one with ten tasks and one with many; loads take turns, five
times. Tasks are asked for as in Zipf(1), and, at worst, in turn (none twice in a row of all), so that nearly every
request finds its task cold.
The bundle of ten thousand tasks has 1.8 GB: this takes 8 GB of memory and as much disk.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from record import read_options, write_result
from served import apply_load, order_of, pss, requests_for, show, workers_of, write_made

from etcl_deploy.export.to_mar import archive
from etcl_deploy.serve.process import serving
from etcl_deploy.serve.properties import any_free_port
from etcl_deploy.serve.server import Server
from etcl_deploy.serve.start import ServeOptions

FEW, CONNECTIONS, ROUNDS = 10, 4, 5
MIXES = ("zipf", "distinct")


def _beside(few: list[dict[str, Any]], many: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """A column with few tasks and with many, and the median of the ratios, round by round."""
    ratios = [large[key] / small[key] for small, large in zip(few, many, strict=True)]
    medians = [median(row[key] for row in rows) for rows in (few, many)]
    return {"ratio": median(ratios), "ratios": ratios, "few": medians[0], "many": medians[1]}


def main(say: Callable[[str], None]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--tasks", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--seconds", type=float, default=6.0, help="of every load")
    parser.add_argument("--warm", type=int, default=4000, help="requests before anything is measured")
    arguments = read_options(parser, tasks=[100], seconds=2.0, warm=1000)
    result = {}
    for many in arguments.tasks:
        with ExitStack() as stack:
            servers: dict[int, Server] = {}
            started = {}
            for count in (FEW, many):
                store = arguments.work / str(count)
                bundle = write_made(store / "made.etcl", count)
                archive(bundle, f"m{count}", store, ServeOptions(workers=1).settings())
                began = time.monotonic()
                servers[count] = stack.enter_context(serving(f"m{count}", store, any_free_port(), 1))
                started[count] = time.monotonic() - began
                say(f"{count} tasks: started in {started[count]:.1f} s")
            for count, server in servers.items():
                order = order_of("distinct", arguments.warm, count)
                apply_load(server, requests_for(server, range(count)), order, CONNECTIONS)
            mixes = {}
            for mix in MIXES:
                rows: dict[int, list[dict[str, Any]]] = {count: [] for count in servers}
                for seed in range(ROUNDS):
                    for count, server in servers.items():
                        order = order_of(mix, 20_000, count, seed)
                        requests = requests_for(server, range(count))
                        found = apply_load(server, requests, order, CONNECTIONS, arguments.seconds)
                        rows[count].append(found.columns())
                        say(show(mix=mix, tasks=count, **rows[count][-1]))
                mixes[mix] = {key: _beside(rows[FEW], rows[many], key) for key in ("p50_ms", "p99_ms", "throughput")}
                say(f"{mix}, {many} tasks: p99 {mixes[mix]['p99_ms']['ratio']:.3f} of that with {FEW}")
            memory = {count: pss(workers_of(server)[0]) for count, server in servers.items()}
        result[many] = {"mixes": mixes, "start_seconds": started, "worker_bytes": memory}
    settings = {"few": FEW, "connections": CONNECTIONS, "rounds": ROUNDS, "seconds": arguments.seconds}
    write_result("many_tasks", ["S8"], result, settings)


if __name__ == "__main__":
    main(partial(print, flush=True))
