"""S3, S4: throughput of 100 tasks behind one model, beside the best single dense model in its own archive.

    python benchmarks/serving.py --work DIR

The other side is one dense network of the same shape with a handler of its own (dense_handler.py) that does nothing but
decode, run and answer. It is tuned first: torch or onnxruntime, batch size, delay, workers; the best setting of all is
the other side, the best with torch runs beside it, because that is what people have. Ours runs as `etcl serve` starts
it, and once more with a cache of one task. All servers are up; loads of a few seconds take turns, five times for every
mix, from another process with 32 keep-alive connections. Last, where the time of one request goes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from dense import write_dense
from record import RESULTS, read_options, write_result
from served import MIXES, apply_load, metrics, order_of, requests_for, show, write_made

from etcl_deploy.export.to_mar import archive
from etcl_deploy.serve.process import serving
from etcl_deploy.serve.properties import any_free_port
from etcl_deploy.serve.server import Server
from etcl_deploy.serve.start import ServeOptions

TASKS = 100
CONNECTIONS = 32
ROUNDS = 5
CACHES = (512, 5)  # MB; the first is the default, the second holds one task
OURS = f"cache {CACHES[0]} MB"
Choice = tuple[str, int, int, int]  # engine, workers, batch size, delay in milliseconds
GRID = [
    (engine, workers, batch, delay)
    for engine in ("torch", "onnxruntime")
    for workers in (1, 2)
    for batch, delay in ((1, 1), (8, 1), (16, 5))
]


@contextmanager
def dense_server(bundle: Path, store: Path, choice: Choice) -> Iterator[Server]:
    engine, workers, batch, delay = choice
    settings = {"minWorkers": workers, "maxWorkers": workers, "batchSize": batch, "maxBatchDelay": delay}
    name = f"dense-{engine}"
    write_dense(bundle, name, store, settings, engine)
    with serving(name, store, any_free_port(), workers) as server:
        yield server


@contextmanager
def our_server(bundle: Path, store: Path, name: str, cache_mb: int) -> Iterator[Server]:
    settings = ServeOptions(cache_bytes=cache_mb * 1_000_000).settings()
    archive(bundle, name, store, settings)
    with serving(name, store, any_free_port(), settings["minWorkers"]) as server:
        yield server


def recorded_best(count: int) -> list[Choice]:
    """The settings that were best for the other side when all were tried."""
    tuning = json.loads((RESULTS / "serving.json").read_text())["result"]["tuning"]
    return [choice for name in list(tuning)[:count] for choice in GRID if " ".join(map(str, choice)) == name]


@dataclass(frozen=True)
class Loads:
    """How long servers are asked."""

    warm: int  # requests before anything is measured: Java compiles as it goes
    seconds: float

    def warm_up(self, server: Server) -> None:
        order = order_of("distinct", self.warm, TASKS)
        apply_load(server, requests_for(server, range(TASKS)), order, CONNECTIONS)

    def measure(self, server: Server, mix: str, seed: int) -> dict[str, Any]:
        order = order_of(mix, 100_000, TASKS, seed)
        return apply_load(server, requests_for(server, range(TASKS)), order, CONNECTIONS, self.seconds).columns()


def tune(
    bundle: Path, store: Path, choices: Sequence[Choice], loads: Loads, say: Callable[[str], None]
) -> dict[Choice, float]:
    """What the other side reaches with each of its settings, best first."""
    found = {}
    for choice in choices:
        with dense_server(bundle, store, choice) as server:
            loads.warm_up(server)
            found[choice] = max(loads.measure(server, "identical", seed)["throughput"] for seed in range(2))
        say(f"dense {choice}: {found[choice]}")
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def compare(
    servers: dict[str, Server], mixes: Sequence[str], loads: Loads, say: Callable[[str], None]
) -> dict[str, Any]:
    """For every mix the columns of every server and the median of the ratios to the other side, round by round."""
    found: dict[str, Any] = {}
    for mix in mixes:
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
        for seed in range(ROUNDS):
            for name, server in servers.items():
                rows[name].append(loads.measure(server, mix, seed))
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
    parser.add_argument("--mixes", nargs="+", default=MIXES, choices=MIXES)
    parser.add_argument("--warm", type=int, default=4000, help="requests before anything is measured")
    parser.add_argument("--seconds", type=float, default=5.0, help="of every load")
    parser.add_argument("--tuning", type=int, default=len(GRID), help="try only so many, those recorded as the best")
    arguments = read_options(parser, mixes=["zipf", "uniform"], warm=1500, seconds=2.0, tuning=3)
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    loads = Loads(arguments.warm, arguments.seconds)
    bundle = write_made(work / "made.etcl", TASKS)
    choices = GRID if arguments.tuning >= len(GRID) else recorded_best(arguments.tuning)
    tried = tune(bundle, work / "dense", choices, loads, say)
    best = next(iter(tried))
    chosen = {"dense": best}
    if best[0] != "torch" and not arguments.quick:
        chosen["dense, torch"] = next(choice for choice in tried if choice[0] == "torch")
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(dense_server(bundle, work / "dense", choice)) for name, choice in chosen.items()
        }
        for size in CACHES[: 1 if arguments.quick else None]:
            servers[f"cache {size} MB"] = stack.enter_context(our_server(bundle, work / "ours", f"m{size}", size))
        for server in servers.values():
            loads.warm_up(server)
        results = compare(servers, arguments.mixes, loads, say)
        where = {} if arguments.quick else stages(servers[OURS])
    say(show(**{name: round(value, 3) for name, value in where.items()}))
    settings = {"tasks": TASKS, "connections": CONNECTIONS, "rounds": ROUNDS, "seconds": loads.seconds, **chosen}
    tuning = {" ".join(map(str, choice)): throughput for choice, throughput in tried.items()}
    result = {"mixes": results, "stages_ms": where, "tuning": tuning}
    write_result("serving", ["S3", "S4"], result, settings)


if __name__ == "__main__":
    main(partial(print, flush=True))
