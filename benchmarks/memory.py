"""Memory: what a further task and a further worker take (S1, S2), and a hundred archives beside one.

    python benchmarks/memory.py --work DIR
    python benchmarks/memory.py --work DIR --parts tasks

`tasks`: one worker with a cache of one task is asked about every task; the slope of its proportional set size from 1 to
101 tasks, the median of three servers at each of five points, beside a dense fp32 copy (S1). The same with heads in
fp16, and with the default cache, which fills up. Of the mapped files that hold backbone and masks, what a second worker
adds, beside what the first takes (S2).

`archives`: archives with a dense model each are added to one TorchServe, a worker each, until a hundred are there or
memory runs out: time until all can answer, memory of all processes, requests a second over all of them in turn. The
same for one archive with as many tasks and a worker for every core. Draws docs/pictures/archives.png.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

import load
import psutil
from dense import write_dense
from record import Figure, new_parser, say, show, write_result
from served import apply_load, images, order_of, pss, requests_for, served, workers_of, write_made

from etcl_deploy.bundle.bundle import load_bundle
from etcl_deploy.bundle.summary import separate_bytes
from etcl_deploy.core.pixels import png
from etcl_deploy.serve.process import serving
from etcl_deploy.serve.properties import any_free_port
from etcl_deploy.serve.server import Server

SLOPES: dict[str, tuple[str, int | None]] = {  # precision of heads, bytes of the cache
    "S1": ("fp32", 5_000_000),
    "S1, fp16": ("fp16", 5_000_000),
    "S1, default cache": ("fp32", None),
}
POINTS = (1, 26, 51, 76, 101)  # tasks
COUNTS = (1, 10, 25, 50, 75, 100)  # archives
CONNECTIONS, REQUESTS = 32, 2000
SPARE = 2e9  # bytes that have to stay free
PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "archives.png"


def mapped(process: psutil.Process) -> int:
    """Its share of the files with the bundle and with what was made of it."""
    total, ours = 0, False
    for row in Path(f"/proc/{process.pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", row):
            ours = row.endswith("bundle.etcl") or "/ready-" in row
        elif ours and row.startswith("Pss:"):
            total += 1024 * int(row.split()[1])
    return total


def asked(bundle: Path, store: Path, tasks: int, workers: int, cache_bytes: int | None) -> tuple[list[int], list[int]]:
    """Memory of every worker, and its mapped files, once every task was asked about."""
    with served(bundle, "memory", store, workers=workers, cache_bytes=cache_bytes) as server:
        # As many requests for every count of tasks, so that what grows with them alone is not counted.
        apply_load(server, requests_for(server, range(tasks)), order_of("distinct", 1212, tasks), 4)
        processes = workers_of(server)
        return [pss(process) for process in processes], [mapped(process) for process in processes]


def slope(work: Path, kind: str, points: Sequence[int], starts: int) -> dict[str, Any]:
    """Bytes of one task more, beside a dense copy."""
    precision, cache_bytes = SLOPES[kind]
    taken = {}
    for count in points:
        bundle = write_made(work / "made.etcl", count, precision=precision)
        # What the allocator keeps varies by megabytes from start to start.
        taken[count] = [asked(bundle, work, count, 1, cache_bytes)[0][0] for _ in range(starts)]
        say(f"{kind}: {count} tasks, {[round(size / 1e6, 1) for size in taken[count]]} MB")
    each = linear_regression([float(count) for count in taken], [median(sizes) for sizes in taken.values()]).slope
    dense = separate_bytes(load_bundle(bundle)) / points[-1]
    return {"pss": taken, "bytes_each": each, "dense": dense, "ratio": each / dense}


def second_worker(work: Path) -> dict[str, float]:
    """Bytes of mapped files with one worker and with two."""
    bundle = write_made(work / "made.etcl", 100)
    one, two = (sum(asked(bundle, work, 100, workers, 5_000_000)[1]) for workers in (1, 2))
    return {"one": one, "two": two, "ratio": (two - one) / one}


def whole(server: Server) -> int:
    """Bytes of Java and of all workers."""
    process = server.process()
    assert process is not None
    return process.memory_info().rss + sum(pss(worker) for worker in workers_of(server))


def dense_requests(server: Server, count: int) -> list[bytes]:
    """A request for each of the archives."""
    token, files = server.token(), [png(image) for image in images()]
    headers = {"Content-Type": "image/png"}
    return [load.request(f"/predictions/d{n}", files[n % len(files)], token, headers) for n in range(count)]


def is_ready(server: Server, name: str) -> bool:
    """Whether all workers of a model can answer."""
    workers = server.manage("GET", f"/models/{name}")[0]["workers"]
    return bool(workers) and all(worker["status"] == "READY" for worker in workers)


def measured(server: Server, requests: list[bytes], seconds: float) -> dict[str, Any]:
    """Memory and throughput of a server that took so long to start."""
    for _ in range(2):  # the first makes Java warm
        answered = apply_load(server, requests, order_of("distinct", REQUESTS, len(requests)), CONNECTIONS)
    return {"start_seconds": seconds, "bytes": whole(server), **answered.columns()}


def many_archives(bundle: Path, store: Path) -> dict[int, Any]:
    """Archives of dense models, one after another."""
    settings = {"minWorkers": 1, "maxWorkers": 1, "batchSize": 8, "maxBatchDelay": 1, "threads": 1}
    write_dense(bundle, "d0", store, settings, "onnxruntime")
    rows: dict[int, Any] = {}
    began = time.monotonic()
    with serving("d0", store, any_free_port(), 1, pushes=True) as server:
        spent, there = time.monotonic() - began, 1
        for count in COUNTS:
            began = time.monotonic()
            each = sum(pss(worker) for worker in workers_of(server)) / there
            if psutil.virtual_memory().available - each * (count - there) < SPARE:
                rows[count] = None
                say(f"{count} archives do not fit")
                break
            added = [f"d{number}" for number in range(there, count)]
            for name in added:
                shutil.copy(store / "d0.mar", store / f"{name}.mar")
                options = {"model_name": name, "initial_workers": 1, "synchronous": "false"}
                server.manage("POST", "/models", url=f"{name}.mar", **options)
            while not all(is_ready(server, name) for name in added):
                time.sleep(0.5)
            spent, there = spent + time.monotonic() - began, count
            rows[count] = measured(server, dense_requests(server, count), spent)
            say(f"{count} archives: {show(**rows[count])}")
    return rows


def one_archive(work: Path) -> dict[int, Any]:
    """One archive with as many tasks."""
    rows = {}
    for count in COUNTS:
        bundle = write_made(work / "tasks.etcl", count)
        began = time.monotonic()
        with served(bundle, "tasks", work) as server:
            rows[count] = measured(server, requests_for(server, range(count)), time.monotonic() - began)
        say(f"one archive, {count} tasks: {show(**rows[count])}")
    return rows


def draw(rows: Mapping[str, Mapping[int, Any]]) -> None:
    """Start time, memory and throughput over the number of tasks."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    panels = {
        "start, seconds": lambda row: row["start_seconds"],
        "memory, GB": lambda row: row["bytes"] / 1e9,
        "requests a second": lambda row: row["throughput"],
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(10, 3.2), layout="constrained")
    for axis, (title, value) in zip(axes, panels.items(), strict=True):
        for name, own in rows.items():
            known = {count: value(row) for count, row in own.items() if row}
            axis.plot(list(known), list(known.values()), "o-", label=name)
        axis.set(title=title, xlabel="tasks", ylim=(0, None))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    figure.savefig(PICTURE, dpi=110)


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """The recorded results, held against their targets."""
    row, second = results["tasks"]["S1"], results["tasks"]["S2"]
    counts = [float(count) for count in row["pss"]]
    each = [linear_regression(counts, sizes).slope / row["dense"] for sizes in zip(*row["pss"].values(), strict=True)]
    kept = results["tasks"]["S1, default cache"]["ratio"]
    note = f"1/{1 / row['ratio']:.1f} with a cache of one task; with the default cache, which fills up, {kept:.2f}"
    yield Figure("S1", "memory of one task more / a dense fp32 copy", row["ratio"], "<= 1/20", "<= 1/26", each, note)
    what = "backbone and masks in memory: what a second worker adds / the first"
    yield Figure("S2", what, second["ratio"], "<= 0.25", "<= 0.05", note=f"{second['one']:,} bytes of the first")


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", default=("tasks", "archives"), choices=("tasks", "archives"))
    parser.add_argument("--points", type=int, nargs="+", default=POINTS, help="tasks, to find the slope by")
    parser.add_argument("--starts", type=int, default=3, help="of a server at each of these points")
    arguments = parser.parse_args()
    work: Path = arguments.work
    if "tasks" in arguments.parts:
        result: dict[str, Any] = {kind: slope(work, kind, arguments.points, arguments.starts) for kind in SLOPES}
        result["S2"] = second_worker(work)
        say(show(**{name: row["ratio"] for name, row in result.items()}))
        if arguments.record:
            write_result("memory", "tasks", result, {"tasks": arguments.points, "starts": arguments.starts})
    if "archives" in arguments.parts:
        bundle = write_made(work / "made.etcl", 1)
        rows = {"one archive": one_archive(work / "one"), "an archive each": many_archives(bundle, work / "many")}
        if arguments.record:
            settings = {"connections": CONNECTIONS, "requests": REQUESTS, "spare_bytes": SPARE}
            write_result("memory", "archives", rows, settings)
            draw(rows)


if __name__ == "__main__":
    main()
