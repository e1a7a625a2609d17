"""S1, S2: what a further task and a further worker take.

    python benchmarks/memory.py --work DIR

S1: one worker with a cache of one task is asked about every task; the slope of its proportional set size from 1 to
101 tasks, the median of three servers at each of five points, beside a dense fp32 copy. The same with heads in fp16,
and with the default cache, which fills up. S2: of the mapped files that hold backbone and masks, what a second worker
adds, beside what the first takes.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from record import read_options, write_result
from served import apply_load, order_of, pss, requests_for, show, workers_of, write_made

from etcl_deploy.bundle.bundle import load_bundle
from etcl_deploy.bundle.summary import separate_bytes
from etcl_deploy.export.to_mar import archive
from etcl_deploy.serve.process import serving
from etcl_deploy.serve.properties import any_free_port
from etcl_deploy.serve.start import ServeOptions

# What is told to a server: precision of heads, bytes of its cache.
SLOPES: dict[str, tuple[str, int | None]] = {
    "S1": ("fp32", 5_000_000),
    "S1, fp16": ("fp16", 5_000_000),
    "S1, default cache": ("fp32", None),
}


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
    settings = ServeOptions(workers=workers, cache_bytes=cache_bytes).settings()
    archive(bundle, "memory", store, settings)
    with serving("memory", store, any_free_port(), workers) as server:
        # As many requests for every count of tasks, so that what grows with them alone is not counted.
        apply_load(server, requests_for(server, range(tasks)), order_of("distinct", 1212, tasks), 4)
        found = workers_of(server)
        return [pss(worker) for worker in found], [mapped(worker) for worker in found]


def slope(work: Path, kind: str, counts: list[int], starts: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Bytes of one task more, beside a dense copy."""
    precision, cache_bytes = SLOPES[kind]
    points = {}
    for count in counts:
        bundle = write_made(work / "made.etcl", count, precision=precision)
        points[count] = [asked(bundle, work, count, 1, cache_bytes)[0][0] for _ in range(starts)]
        say(f"{precision}, cache {cache_bytes}: {count} tasks, {[round(found / 1e6, 1) for found in points[count]]} MB")
    bytes_each = float(np.polyfit(list(points), [median(found) for found in points.values()], 1)[0])
    dense = separate_bytes(load_bundle(bundle)) / counts[-1]
    return {"pss": points, "bytes_each": bytes_each, "dense": dense, "ratio": bytes_each / dense}


def main(say: Callable[[str], None]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 26, 51, 76, 101], help="tasks")
    # What the allocator keeps varies by megabytes from start to start.
    parser.add_argument("--starts", type=int, default=3, help="of a server at each of these points")
    parser.add_argument("--slopes", nargs="+", default=list(SLOPES), choices=SLOPES)
    arguments = read_options(parser, counts=[1, 101], slopes=["S1"])
    work, counts, starts = arguments.work, arguments.counts, arguments.starts
    found = {kind: slope(work, kind, counts, starts, say) for kind in arguments.slopes}
    bundle = write_made(work / "made.etcl", 100)
    one, two = (sum(asked(bundle, work, 100, workers, 5_000_000)[1]) for workers in (1, 2))
    found["S2"] = {"one": one, "two": two, "ratio": (two - one) / one}
    for name, row in found.items():
        say(
            show(
                target=name,
                ratio=round(row["ratio"], 4),
                one_over=round(1 / row["ratio"], 1) if row["ratio"] > 0 else None,
            )
        )
    write_result("memory", ["S1", "S2"], found, {"tasks": counts, "starts": starts})


if __name__ == "__main__":
    main(partial(print, flush=True))
