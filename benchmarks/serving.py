"""S3, S4: throughput of 100 tasks behind one model, beside the best single dense model in its own archive.

    python benchmarks/serving.py --work DIR

The other side is one dense network of the same shape with a handler of its own (dense_handler.py) that does nothing but
decode, run and answer. It is tuned first: torch or onnxruntime, batch size, delay, workers. Ours runs as `etcl serve`
starts it. Both servers are up; loads of a few seconds take turns, five times for every mix, from another process
with 32 keep-alive connections. The same for other sizes of our cache. Last, where the time of one request goes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from dense import write_dense
from record import write_result
from served import MIXES, apply_load, metrics, order_of, requests_for, show, write_made

from etcl_deploy.deploy import Wishes
from etcl_deploy.export.to_mar import archive
from etcl_deploy.serve.process import serving
from etcl_deploy.serve.properties import any_free_port
from etcl_deploy.serve.server import Server

TASKS = 100
CONNECTIONS = 32
WARM = 4000  # requests before anything is measured: Java compiles as it goes
SECONDS = 5.0
ROUNDS = 5
CACHES = (5, 256, 512)  # MB; 256 is the default
GRID = [
    (engine, workers, batch, delay)
    for engine in ("torch", "onnxruntime")
    for workers in (1, 2)
    for batch, delay in ((1, 1), (8, 1), (16, 5))
]


@contextmanager
def dense_server(bundle: Path, store: Path, choice: tuple[str, int, int, int]) -> Iterator[Server]:
    engine, workers, batch, delay = choice
    settings = {"minWorkers": workers, "maxWorkers": workers, "batchSize": batch, "maxBatchDelay": delay}
    write_dense(bundle, "dense", store, settings, engine)
    with serving("dense", store, any_free_port(), workers) as server:
        yield server


@contextmanager
def our_server(bundle: Path, store: Path, name: str, cache_mb: int) -> Iterator[Server]:
    settings = Wishes(cache_bytes=cache_mb * 1_000_000).settings()
    archive(bundle, name, store, settings)
    with serving(name, store, any_free_port(), settings["minWorkers"]) as server:
        yield server


def warm(server: Server) -> None:
    apply_load(server, requests_for(server, range(TASKS)), order_of("distinct", WARM, TASKS), CONNECTIONS)


def measured(server: Server, mix: str, seed: int) -> dict[str, Any]:
    order = order_of(mix, 100_000, TASKS, seed)
    return apply_load(server, requests_for(server, range(TASKS)), order, CONNECTIONS, SECONDS).columns()


def tune(bundle: Path, store: Path, say: Callable[[str], None]) -> tuple[tuple[str, int, int, int], dict[str, Any]]:
    """The best settings of the other side."""
    found = {}
    for choice in GRID:
        with dense_server(bundle, store, choice) as server:
            warm(server)
            found[choice] = max(measured(server, "identical", seed)["throughput"] for seed in range(2))
        say(f"dense {choice}: {found[choice]}")
    return max(found, key=lambda choice: found[choice]), {" ".join(map(str, c)): value for c, value in found.items()}


def compare(servers: dict[str, Server], say: Callable[[str], None]) -> dict[str, Any]:
    """For every mix the columns of every server and the median of the ratios to the other side, round by round."""
    found: dict[str, Any] = {}
    for mix in MIXES:
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
        for seed in range(ROUNDS):
            for name, server in servers.items():
                rows[name].append(measured(server, mix, seed))
        other = [row["throughput"] for row in rows["dense"]]
        for name, own in rows.items():
            ratios = [row["throughput"] / before for row, before in zip(own, other, strict=True)]
            columns = {key: median(row[key] for row in own) for key in own[0]}
            found.setdefault(mix, {})[name] = {**columns, "ratio": median(ratios), "ratios": ratios}
            say(f"{mix} {name}: " + show(**{**columns, "ratio": round(median(ratios), 3)}))
    return found


def stages(server: Server) -> dict[str, float]:
    """Milliseconds of one request at a time, by stage, tasks taking turns."""
    before = metrics(server)
    load = apply_load(server, requests_for(server, range(TASKS)), order_of("uniform", 600, TASKS, 5), 1)
    after = metrics(server)

    def spent(*words: str) -> float:
        rows = [name for name in after if all(word in name for word in words)]
        return sum(after[name] - before.get(name, 0) for name in rows) / load.requests / 1000

    parts = {stage: spent("etcl_stage", f'stage="{stage}"') for stage in ("decode", "materialize", "infer")}
    inside = spent("ts_inference_latency")
    return {**parts, "in TorchServe, all": inside, "whole request": load.percentile(0.5)}


def main(say: Callable[[str], None]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    work: Path = parser.parse_args().work
    work.mkdir(parents=True, exist_ok=True)
    bundle = write_made(work / "made.etcl", TASKS)
    best, tried = tune(bundle, work / "dense", say)
    say(f"the other side does best with {best}")
    results = {}
    with ExitStack() as stack:
        servers = {"dense": stack.enter_context(dense_server(bundle, work / "dense", best))}
        for size in CACHES:
            servers[f"cache {size} MB"] = stack.enter_context(our_server(bundle, work / "ours", f"m{size}", size))
        for server in servers.values():
            warm(server)
        results = compare(servers, say)
        where = stages(servers["cache 256 MB"])
    say(show(**{name: round(value, 3) for name, value in where.items()}))
    figures = {
        target: {"ratio": results[mix]["cache 256 MB"]["ratio"], "unit": "requests a second"}
        for target, mix in (("S3", "zipf"), ("S4", "uniform"))
    }
    settings = {"tasks": TASKS, "connections": CONNECTIONS, "rounds": ROUNDS, "seconds": SECONDS, "dense": best}
    result = {"figures": figures, "mixes": results, "stages_ms": where, "tuning": tried}
    write_result("serving", ["S3", "S4"], result, settings)


if __name__ == "__main__":
    main(partial(print, flush=True))
