"""One archive with a hundred tasks, beside a hundred archives with a dense model each.

    python benchmarks/archives.py --work DIR

Archives are added to one TorchServe, a worker each, until a hundred are there or memory runs out: time until all can
answer, memory of all processes, throughput over all of them in turn. The same for one archive with as many tasks and
a worker for every core. Draws docs/pictures/archives.png.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import load
import matplotlib as mpl
import psutil
from dense import write_dense
from record import write_result
from served import apply_load, images, order_of, pss, requests_for, show, workers_of, write_made

from etcl_deploy.core.pixels import png
from etcl_deploy.export.to_mar import archive
from etcl_deploy.serve.process import serving
from etcl_deploy.serve.properties import any_free_port
from etcl_deploy.serve.server import Server
from etcl_deploy.serve.start import ServeOptions

mpl.use("agg")

COUNTS = (1, 10, 25, 50, 75, 100)
CONNECTIONS, REQUESTS = 32, 2000
SPARE = 2e9  # bytes that have to stay free
PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "archives.png"


def memory(server: Server) -> int:
    process = server.process()
    assert process is not None
    return process.memory_info().rss + sum(pss(worker) for worker in workers_of(server))


def dense_requests(server: Server, count: int) -> list[bytes]:
    token, files = server.token(), [png(image) for image in images()]
    headers = {"Content-Type": "image/png"}
    return [load.request(f"/predictions/d{n}", files[n % len(files)], token, headers) for n in range(count)]


def is_ready(server: Server, name: str) -> bool:
    workers = server.manage("GET", f"/models/{name}")[0]["workers"]
    return bool(workers) and all(worker["status"] == "READY" for worker in workers)


def measured(server: Server, requests: list[bytes], seconds: float) -> dict[str, Any]:
    for _ in range(2):  # the first makes Java warm
        found = apply_load(server, requests, order_of("distinct", REQUESTS, len(requests)), CONNECTIONS)
    return {"start_seconds": seconds, "bytes": memory(server), **found.columns()}


def many_archives(bundle: Path, store: Path, say: Callable[[str], None]) -> dict[int, Any]:
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
            for number in range(there, count):
                shutil.copy(store / "d0.mar", store / f"d{number}.mar")
                server.manage(
                    "POST",
                    "/models",
                    url=f"d{number}.mar",
                    model_name=f"d{number}",
                    initial_workers=1,
                    synchronous="false",
                )
            while not all(is_ready(server, f"d{number}") for number in range(there, count)):
                time.sleep(0.5)
            spent, there = spent + time.monotonic() - began, count
            rows[count] = measured(server, dense_requests(server, count), spent)
            say(f"{count} archives: {show(**rows[count])}")
    return rows


def one_archive(work: Path, say: Callable[[str], None]) -> dict[int, Any]:
    """One archive with as many tasks."""
    rows = {}
    for count in COUNTS:
        bundle = write_made(work / "tasks.etcl", count)
        settings = ServeOptions().settings()
        archive(bundle, "tasks", work, settings)
        began = time.monotonic()
        with serving("tasks", work, any_free_port(), settings["minWorkers"]) as server:
            spent = time.monotonic() - began
            rows[count] = measured(server, requests_for(server, range(count)), spent)
        say(f"one archive, {count} tasks: {show(**rows[count])}")
    return rows


def draw(rows: dict[str, dict[int, Any]]) -> None:
    from matplotlib import pyplot as plt

    panels = {
        "start, seconds": lambda row: row["start_seconds"],
        "memory, GB": lambda row: row["bytes"] / 1e9,
        "requests a second": lambda row: row["throughput"],
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(10, 3.2), layout="constrained")
    for axis, (title, value) in zip(axes, panels.items(), strict=True):
        for name, found in rows.items():
            known = {count: value(row) for count, row in found.items() if row}
            axis.plot(list(known), list(known.values()), "o-", label=name)
        axis.set(title=title, xlabel="tasks", ylim=(0, None))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    figure.savefig(PICTURE, dpi=110)


def main(say: Callable[[str], None]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    work: Path = parser.parse_args().work
    bundle = write_made(work / "made.etcl", 1)
    rows = {"one archive": one_archive(work / "one", say), "an archive each": many_archives(bundle, work / "many", say)}
    write_result("archives", [], rows, {"connections": CONNECTIONS, "requests": REQUESTS, "spare_bytes": SPARE})
    draw(rows)


if __name__ == "__main__":
    main(partial(print, flush=True))
