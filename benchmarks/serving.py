"""Requests a second of a hundred tasks behind one model (S3, S4), and p99 with many tasks (S8).

    python benchmarks/serving.py --work DIR
    python benchmarks/serving.py --work DIR --parts many_tasks --tasks 1000

`throughput`: the other side is one dense network of the same shape with a handler of its own (dense_handler.py) that
does nothing but decode, run and answer. It is tuned first: torch or onnxruntime, batch size, delay, workers; the best
setting of all is the other side, the best with torch runs beside it, because that is what people have. Ours runs as
`etcl serve` starts it, and once more with a cache of one task. All servers are up; loads of a few seconds take turns,
five times for every mix, from another process with 32 keep-alive connections. Last, where the time of a request goes.

`many_tasks`: one worker, four connections; a server with ten tasks and one with many, in turns, five times. Tasks are
asked for as in Zipf(1), and, at worst, in turn (none twice in a row of all), so that nearly every request finds its
task cold. The bundle of ten thousand tasks has 1.8 GB: this takes 8 GB of memory and as much disk.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from dense import write_dense
from record import Figure, new_parser, say, show, write_result
from served import MIXES, apply_load, order_of, pss, requests_for, served, workers_of, write_made

from etcl_deploy.serve.process import serving
from etcl_deploy.serve.properties import any_free_port
from etcl_deploy.serve.server import Server

TASKS, FEW, ROUNDS = 100, 10, 5
CACHES = (512, 5)  # MB; the first is the default, the second holds one task
OURS = f"cache {CACHES[0]} MB"
DenseChoice = tuple[str, int, int, int]  # engine, workers, batch size, delay in milliseconds
GRID = [
    (engine, workers, batch, delay)
    for engine in ("torch", "onnxruntime")
    for workers in (1, 2)
    for batch, delay in ((1, 1), (8, 1), (16, 5))
]


@contextmanager
def dense_server(bundle: Path, store: Path, choice: DenseChoice) -> Iterator[Server]:
    """A server with one dense network."""
    engine, workers, batch, delay = choice
    settings = {"minWorkers": workers, "maxWorkers": workers, "batchSize": batch, "maxBatchDelay": delay}
    name = f"dense-{engine}"
    write_dense(bundle, name, store, settings, engine)
    with serving(name, store, any_free_port(), workers) as server:
        yield server


@dataclass(frozen=True)
class Loads:
    """How servers are asked."""

    connections: int
    warm: int  # requests before anything is measured: Java compiles as it goes
    seconds: float

    def warm_up(self, server: Server, tasks: int) -> None:
        """Ask before anything is measured."""
        order = order_of("distinct", self.warm, tasks)
        apply_load(server, requests_for(server, range(tasks)), order, self.connections)

    def measure(self, server: Server, tasks: int, mix: str, seed: int) -> dict[str, Any]:
        """One load, in the columns of TorchServe's own benchmark."""
        order = order_of(mix, 100_000, tasks, seed)
        requests = requests_for(server, range(tasks))
        return apply_load(server, requests, order, self.connections, self.seconds).columns()


def throughput(work: Path, mixes: Sequence[str], choices: Sequence[DenseChoice], loads: Loads) -> dict[str, Any]:
    """For every mix the columns of every server, and the median of the ratios to the dense one, round by round."""
    bundle = write_made(work / "made.etcl", TASKS)
    reached = {}
    for choice in choices:
        with dense_server(bundle, work / "dense", choice) as server:
            loads.warm_up(server, TASKS)
            reached[choice] = max(loads.measure(server, TASKS, "identical", seed)["throughput"] for seed in range(2))
        say(f"dense {choice}: {reached[choice]}")
    tried = dict(sorted(reached.items(), key=lambda item: -item[1]))
    chosen = {"dense": next(iter(tried))}
    for other in [choice for choice in tried if choice[0] == "torch" != chosen["dense"][0]][:1]:
        chosen["dense, torch"] = other
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(dense_server(bundle, work / "dense", choice)) for name, choice in chosen.items()
        }
        for size in CACHES:
            ours = served(bundle, f"m{size}", work / "ours", cache_bytes=size * 1_000_000)
            servers[f"cache {size} MB"] = stack.enter_context(ours)
        for server in servers.values():
            loads.warm_up(server, TASKS)
        table = {mix: _in_turns(servers, mix, loads) for mix in mixes}
        stages = stages_of(servers[OURS])
    say(show(**stages))
    tuning = {" ".join(map(str, choice)): rate for choice, rate in tried.items()}
    return {"mixes": table, "stages_ms": stages, "tuning": tuning, "chosen": chosen}


def _in_turns(servers: Mapping[str, Server], mix: str, loads: Loads) -> dict[str, Any]:
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
    for seed in range(ROUNDS):
        for name, server in servers.items():
            rows[name].append(loads.measure(server, TASKS, mix, seed))
    table = {}
    for name, own in rows.items():
        ratios = [row["throughput"] / other["throughput"] for row, other in zip(own, rows["dense"], strict=True)]
        columns = {key: median(row[key] for row in own) for key in own[0]}
        table[name] = {**columns, "ratio": median(ratios), "ratios": ratios}
        say(f"{mix} {name}: {show(**columns, ratio=median(ratios))}")
    return table


def stages_of(server: Server) -> dict[str, float]:
    """Milliseconds of one request at a time, by stage, tasks taking turns."""
    before = metrics(server)
    load = apply_load(server, requests_for(server, range(TASKS)), order_of("uniform", 600, TASKS, 5), 1)
    after = metrics(server)

    def spent(*words: str) -> float:
        rows = [name for name in after if all(word in name for word in words)]
        return sum(after[name] - before.get(name, 0) for name in rows) / load.requests / 1000

    parts = {stage: spent("etcl_stage", f'stage="{stage}"') for stage in ("decode", "materialize", "infer")}
    return {**parts, "in TorchServe, all": spent("ts_inference_latency"), "whole request": load.percentile(0.5)}


def metrics(server: Server) -> dict[str, float]:
    """All metrics by name and labels, as Prometheus reads them."""
    time.sleep(6)  # the handler tells every five seconds what it counted
    text = httpx.get(server.metrics_url, trust_env=False).text
    rows = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in rows}


def many_tasks(work: Path, many: int, loads: Loads) -> dict[str, Any]:
    """Latency and throughput with many tasks, beside those with few."""
    with ExitStack() as stack:
        servers: dict[int, Server] = {}
        started = {}
        for count in (FEW, many):
            bundle = write_made(work / str(count) / "made.etcl", count)
            began = time.monotonic()
            servers[count] = stack.enter_context(served(bundle, f"m{count}", work / str(count), workers=1))
            started[count] = time.monotonic() - began
            loads.warm_up(servers[count], count)
        mixes = {}
        for mix in ("zipf", "distinct"):
            rows: dict[int, list[dict[str, Any]]] = {count: [] for count in servers}
            for seed in range(ROUNDS):
                for count, server in servers.items():
                    rows[count].append(loads.measure(server, count, mix, seed))
            mixes[mix] = {key: _beside(rows[FEW], rows[many], key) for key in ("p50_ms", "p99_ms", "throughput")}
            say(f"{mix}, {many} tasks: p99 {mixes[mix]['p99_ms']['ratio']:.3f} of that with {FEW}")
        memory = {count: pss(workers_of(server)[0]) for count, server in servers.items()}
    return {"mixes": mixes, "start_seconds": started, "worker_bytes": memory}


def _beside(few: list[dict[str, Any]], many: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """A column with few tasks and with many, and the median of the ratios, round by round."""
    ratios = [large[key] / small[key] for small, large in zip(few, many, strict=True)]
    medians = [median(row[key] for row in rows) for rows in (few, many)]
    return {"ratio": median(ratios), "ratios": ratios, "few": medians[0], "many": medians[1]}


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """The recorded results, held against their targets."""
    mixes = results["throughput"]["mixes"]
    for target, mix, label, now, aim in (
        ("S3", "zipf", "Zipf(1)", ">= 0.9", ">= 1.5"),
        ("S4", "uniform", "uniform", ">= 0.6", ">= 1"),
    ):
        row = mixes[mix][OURS]
        what = f"requests a second, 100 tasks {label} / the best-tuned single dense model"
        note = f"{row['throughput']:.0f} and {mixes[mix]['dense']['throughput']:.0f} a second"
        yield Figure(target, what, row["ratio"], now, aim, row["ratios"], note)
    tasks = max(results["many_tasks"], key=int)
    for mix, label in (("zipf", "Zipf(1)"), ("distinct", "all in turn")):
        row = results["many_tasks"][tasks]["mixes"][mix]["p99_ms"]
        asks = "" if int(tasks) >= 10_000 else "with 10,000 tasks"
        what = f"p99 of one worker with {int(tasks):,} tasks / with ten: {label}"
        note = f"{row['many']:.0f} and {row['few']:.0f} ms"
        yield Figure("S8", what, row["ratio"], "<= 1.2", "<= 1.2", row["ratios"], note, asks)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parts = ("throughput", "many_tasks")
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument("--mixes", nargs="+", default=MIXES, choices=MIXES)
    parser.add_argument("--tasks", type=int, nargs="+", default=[1000, 10_000], help="of `many_tasks`")
    parser.add_argument("--warm", type=int, default=4000, help="requests before anything is measured")
    parser.add_argument("--seconds", type=float, default=5.0, help="of every load")
    parser.add_argument("--tuning", type=int, default=len(GRID), help="try only the last so many settings")
    arguments = parser.parse_args()
    if "throughput" in arguments.parts:
        loads = Loads(32, arguments.warm, arguments.seconds)
        result = throughput(arguments.work, arguments.mixes, GRID[-arguments.tuning :], loads)
        if arguments.record:
            settings = {"tasks": TASKS, "connections": 32, "rounds": ROUNDS, "seconds": loads.seconds}
            write_result("serving", "throughput", result, settings)
    if "many_tasks" in arguments.parts:
        loads = Loads(4, arguments.warm, arguments.seconds)
        result = {str(many): many_tasks(arguments.work, many, loads) for many in arguments.tasks}
        if arguments.record:
            settings = {"few": FEW, "connections": 4, "rounds": ROUNDS, "seconds": loads.seconds}
            write_result("serving", "many_tasks", result, settings)


if __name__ == "__main__":
    main()
