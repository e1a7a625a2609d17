"""Run benchmarks, each in a process of its own, and hold what they found against the targets.

Nothing in the checkout is changed: results go to a folder of the run's own, not to `benchmarks/results/`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer

from etcl_deploy.bench.targets import VERDICTS, Benchmark, Figure, Part, Table, Target
from etcl_deploy.errors import BenchmarkError

Tell = Callable[[str], None]
RESULTS = "ETCL_RESULTS"  # the variable that tells a script where to write; benchmarks/record.py reads it
QUICK_SECONDS, QUICK_EACH = 14 * 60, 240  # what all quick runs and each of them may take
STOPS = ((0, signal.SIGINT), (30, signal.SIGKILL))  # seconds after its time is up; it has servers to stop


@dataclass(frozen=True)
class Outcome:
    """What became of one benchmark: its figures, or why there are none; `verdict` says which kind of why."""

    figures: tuple[Figure, ...] = ()
    verdict: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Row:
    """One part of a target: what was measured just now, what is recorded, and what that comes to."""

    target: Target
    part: Part
    measured: Figure | None
    recorded: Figure | None
    verdict: str
    reason: str = ""


def recorded(table: Table, results: Path | None = None) -> dict[str, tuple[Figure, ...]]:
    """The figures of every result in a folder, by benchmark; without one, of those that are part of the checkout."""
    folder = results or table.folder / "results"
    command = [sys.executable, str(table.folder / "figures.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"results in {folder} cannot be read: {_last_line(done.stderr)}")
    found = json.loads(done.stdout).items()
    return {
        name: tuple(Figure.from_json({**figure, "settings": row["settings"]}) for figure in row["figures"])
        for name, row in found
    }


def lacks(table: Table, benchmark: Benchmark) -> str:
    """Why a benchmark cannot be run here; empty if it can."""
    if not (table.folder / f"{benchmark.name}.py").exists():
        return f"there is no benchmarks/{benchmark.name}.py yet"
    if not benchmark.data:
        return ""
    from etcl_deploy.data.inventory import VARIABLE, data_root, place_of  # with torch behind it

    missing = [name for name in benchmark.data if place_of(name, data_root()) is None]
    return f"no {', '.join(missing)} below ${VARIABLE}" if missing else ""


def recorded_rows(table: Table) -> list[Row]:
    """A row for every part of all targets, as the checkout has them."""
    known = recorded(table)
    rows = []
    for target in table.targets.values():
        for part in target.parts:
            figure = _of(known.get(target.benchmark, ()), target, part)
            rows.append(Row(target, part, None, figure, part.judge(figure) if figure else "not measured yet"))
    return rows


def measure_named(table: Table, name: str | None, work: Path | None, tell: Tell, *, quick: bool) -> list[Row]:
    """Run what measures the targets of that name, or all; without `work` nothing is kept."""
    targets = table.named(name) if name else list(table.targets.values())
    if work:
        return measure(table, targets, work.resolve() / ("quick" if quick else "full"), tell, quick=quick)
    with TemporaryDirectory() as folder:
        return measure(table, targets, Path(folder), tell, quick=quick)


def measure(table: Table, targets: Sequence[Target], work: Path, tell: Tell, *, quick: bool) -> list[Row]:
    """Run what measures these targets, one after another; a row for each of their parts."""
    known, end = recorded(table), time.monotonic() + QUICK_SECONDS
    names = {target.benchmark for target in targets}
    wanted = [benchmark for benchmark in table.benchmarks.values() if benchmark.name in names]

    def outcome_of(benchmark: Benchmark) -> Outcome:
        limit = min(QUICK_EACH, end - time.monotonic()) if quick else None
        return _outcome(table, benchmark, work, tell, limit)

    outcomes: dict[str, Outcome] = {}
    # What is timed has the machine for itself; of the rest two run at once, each with one thread, which is faster.
    for group, at_once in (
        ([b for b in wanted if not b.timed], 2 if quick else 1),
        ([b for b in wanted if b.timed], 1),
    ):
        with ThreadPoolExecutor(at_once) as pool:
            outcomes |= dict(zip((b.name for b in group), pool.map(outcome_of, group), strict=True))
    rows = []
    for target in targets:
        benchmark, outcome = table.benchmarks[target.benchmark], outcomes[target.benchmark]
        smaller = benchmark.smaller if quick else ""
        for part in target.parts:
            old, new = (_of(figures, target, part) for figures in (known.get(benchmark.name, ()), outcome.figures))
            if outcome.verdict:
                verdict, reason = outcome.verdict, outcome.reason
            elif new:
                verdict, reason = part.judge(new, smaller=bool(smaller), grows=benchmark.grows), smaller
            else:
                verdict, reason = "skipped", "only in a full run" if quick else "the script gave no figure"
            rows.append(Row(target, part, new, old, verdict, reason))
    return rows


def verdict_of(rows: Iterable[Row]) -> str:
    """That of a target: the worst of its parts."""
    return min((row.verdict for row in rows), key=VERDICTS.index)


def _of(figures: Iterable[Figure], target: Target, part: Part) -> Figure | None:
    return next((f for f in figures if (f.target, f.label) == (target.id, part.label)), None)


def _outcome(table: Table, benchmark: Benchmark, work: Path, tell: Tell, limit: float | None) -> Outcome:
    """Run one benchmark, unless something is missing or no time is left."""
    reason = lacks(table, benchmark)
    if reason:
        return Outcome(verdict="skipped", reason=reason)
    if limit is not None and limit < 1:
        return Outcome(verdict="skipped", reason="no time was left")
    began = time.monotonic()
    tell(f"{benchmark.name} ...")
    results = work / "results" / benchmark.name
    code, last = _run(table, benchmark, work, results, tell, limit)
    seconds = time.monotonic() - began
    figures = recorded(table, results).get(benchmark.name, ())
    tell(f"{benchmark.name}: done after {seconds:.0f} s")
    if limit is not None and seconds >= limit:
        return Outcome(figures, "skipped", f"stopped after {seconds:.0f} s")
    return Outcome(figures, "failed", last) if code else Outcome(figures)


def _run(
    table: Table, benchmark: Benchmark, work: Path, results: Path, tell: Tell, limit: float | None
) -> tuple[int, str]:
    """Exit code and last line of a script, whose lines are passed on as they come."""
    words = [] if limit is None else ["--quick"]
    if benchmark.work:
        words += ["--work", str(work / benchmark.name)]
    results.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, RESULTS: str(results), "TMPDIR": str(work), "PYTHONUNBUFFERED": "1"}
    if limit is not None and not benchmark.timed:
        environment["OMP_NUM_THREADS"] = "1"
    process = subprocess.Popen(
        [sys.executable, str(table.folder / f"{benchmark.name}.py"), *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    timers = [Timer(limit + wait, process.send_signal, [number]) for wait, number in STOPS] if limit is not None else []
    last = ""
    try:
        for timer in timers:
            timer.start()
        for line in process.stdout or ():
            tell(f"{benchmark.name}: {line.rstrip()}")
            last = line.strip() or last
        return process.wait(), last
    finally:
        for timer in timers:
            timer.cancel()
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # it stops what it has started
            process.wait()


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]
