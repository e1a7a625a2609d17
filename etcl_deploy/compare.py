"""Methods side by side: each learns the same tasks with the same budget, seed by seed, in a run directory of its own.

DIR/runs/METHOD-SEED/     one run each; one that was interrupted goes on, one that is complete is not repeated
DIR/compare.json          the table and every run's summary
DIR/compare.csv           the table
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from etcl_deploy import atomic
from etcl_deploy.config import Config
from etcl_deploy.errors import RunError
from etcl_deploy.learn import directory as directories
from etcl_deploy.learn.directory import Stored
from etcl_deploy.learn.events import Report
from etcl_deploy.learn.measures import needed_bytes
from etcl_deploy.origins import Note
from etcl_deploy.train import resume, train

RECORD, TABLE = "compare.json", "compare.csv"
FIGURES = ("acc", "fwt", "bwt", "seconds", "bytes")


@dataclass(frozen=True)
class Figure:
    """A mean over seeds and its sample deviation; None where it is not known, or of one seed."""

    mean: float | None
    deviation: float | None


@dataclass(frozen=True)
class Row:
    """A method's figures."""

    method: str
    seeds: tuple[int, ...]
    acc: Figure  # percent
    fwt: Figure
    bwt: Figure
    seconds: Figure
    bytes: Figure  # what it takes to predict all tasks: fp32 weights, normalization and heads, a bit a weight for masks


@dataclass(frozen=True)
class Comparison:
    """The table, and the summary of every run behind it."""

    configs: Mapping[str, Config]  # by method, but for the seed
    rows: tuple[Row, ...]
    runs: tuple[Mapping[str, Any], ...]

    def as_json(self) -> dict[str, Any]:
        """What `etcl compare --json` prints."""
        return {
            "recipe": next(iter(self.configs.values())).recipe,
            "methods": [asdict(row) for row in self.rows],
            "runs": list(self.runs),
            "configs": {method: config.as_json() for method, config in self.configs.items()},
        }

    def as_csv(self) -> str:
        """The table, a line a method."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["method", "seeds", *(f"{name}_{part}" for name in FIGURES for part in ("mean", "deviation"))])
        for row in self.rows:
            values = (getattr(getattr(row, name), part) for name in FIGURES for part in ("mean", "deviation"))
            writer.writerow([row.method, len(row.seeds), *("" if value is None else value for value in values)])
        return text.getvalue()


def compare(
    configs: Mapping[str, Config],
    data: Path | None,
    seeds: int,
    directory: Path,
    device: str,
    report: Report,
    note: Note = lambda text: None,
    stage: Callable[[str], None] = lambda text: None,
    root: Path | None = None,
) -> Comparison:
    """Learn with every method, by its config, and every seed what is not learned yet; tables are written after each."""
    found: dict[tuple[str, int], Stored] = {}
    for seed in range(seeds):
        for method, config in configs.items():
            stage(f"{method}, seed {seed}")
            run = directory / "runs" / f"{method}-{seed}"
            wanted = config.with_values({"method": method, "seed": seed})
            found[method, seed] = _learned(wanted, data, run, device, report, note, root)
            made = _table(configs, found)
            atomic.write_bytes(directory / RECORD, json.dumps(made.as_json(), indent=1, allow_nan=False).encode())
            atomic.write_bytes(directory / TABLE, made.as_csv().encode())
    return _table(configs, found)


def one_beside(run: Path) -> Path | None:
    """Where this run was learned by `etcl compare`: the run of `one` with its seed, if there is one."""
    one = run.parent / f"one-{run.name.rpartition('-')[2]}"
    beside = (run.parent.parent / RECORD).exists() and one != run and (one / directories.RECORD).exists()
    return one if beside else None


def _learned(
    config: Config, data: Path | None, run: Path, device: str, report: Report, note: Note, root: Path | None
) -> Stored:
    if not (run / directories.RECORD).exists():
        train(config, data, run, device, report, note, root)
        return directories.load(run)
    stored = directories.load(run, finished=False)
    if stored.config != config:
        raise RunError(f"{run} was learned with other settings; remove it, or compare in another directory")
    if stored.waiting:
        resume(run, device, report, note, root)
    return directories.load(run)


def _table(configs: Mapping[str, Config], found: Mapping[tuple[str, int], Stored]) -> Comparison:
    summaries = {}
    for (method, seed), stored in found.items():
        one = found.get(("one", seed)) if method != "one" else None
        size = sum(needed_bytes(stored.run.network).values())
        summaries[method, seed] = {**stored.summary(one), "bytes": size, "versions": dict(stored.run.versions)}
    rows = []
    for method in configs:
        runs = {seed: summary for (name, seed), summary in summaries.items() if name == method}
        if runs:
            figures = (_figure([run[name] for run in runs.values()]) for name in FIGURES)
            rows.append(Row(method, tuple(runs), *figures))
    return Comparison(configs, tuple(rows), tuple(summaries.values()))


def _figure(values: Sequence[float | None]) -> Figure:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return Figure(None, None)
    return Figure(fmean(known), stdev(known) if len(known) > 1 else None)
