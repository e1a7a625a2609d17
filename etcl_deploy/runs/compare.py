"""Methods side by side: each learns the same tasks with the same budget, seed by seed, in a run directory of its own.

DIR/runs/METHOD-SEED/     one run each; one that was interrupted goes on, one that is complete is not repeated
DIR/compare.json          the table and every run's summary
DIR/compare.csv           the table
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from etcl_deploy.config import Config
from etcl_deploy.core import atomic
from etcl_deploy.core.atomic import locked
from etcl_deploy.errors import LearningError, RunError
from etcl_deploy.learn.methods import METHODS
from etcl_deploy.learn.run import RunSummary
from etcl_deploy.runs import store
from etcl_deploy.runs.session import Session, resume, train
from etcl_deploy.runs.statistics import needed_bytes
from etcl_deploy.runs.task_loading import find_tasks, origin_of

RECORD, TABLE, RUNS = "compare.json", "compare.csv", "runs"
FIGURES = ("acc", "fwt", "bwt", "seconds", "bytes")


@dataclass(frozen=True)
class SeedMean:
    """A mean over seeds and its sample deviation; None where it is not known, or of one seed."""

    mean: float | None
    deviation: float | None


@dataclass(frozen=True)
class MethodRow:
    """A method's figures."""

    method: str
    seeds: tuple[int, ...]
    acc: SeedMean  # percent
    fwt: SeedMean
    bwt: SeedMean
    seconds: SeedMean
    bytes: SeedMean  # needed to predict all tasks; see `needed_bytes`


@dataclass(frozen=True)
class MethodComparison:
    """The table, and the summary of every run behind it."""

    configs: Mapping[str, Config]  # by method, with the first of its seeds
    rows: tuple[MethodRow, ...]
    runs: tuple[Mapping[str, Any], ...]
    failed: tuple[str, ...] = ()  # what could not be learned, and why

    @classmethod
    def of(cls, configs: Mapping[str, Config], runs: Sequence[Mapping[str, Any]]) -> MethodComparison:
        """The table of these runs, in the order of the methods and their seeds."""
        rows, ordered = [], []
        for method in configs:
            own = sorted((run for run in runs if run["method"] == method), key=lambda run: int(run["seed"]))
            if not own:
                continue
            figures = (_figure([run[name] for run in own]) for name in FIGURES)
            rows.append(MethodRow(method, tuple(run["seed"] for run in own), *figures))
            ordered += own
        return cls({row.method: configs[row.method] for row in rows}, tuple(rows), tuple(ordered))

    def as_json(self) -> dict[str, Any]:
        """The document that `etcl compare --json` prints."""
        return {
            "recipe": next((config.recipe for config in self.configs.values()), None),
            "methods": [asdict(row) for row in self.rows],
            "runs": list(self.runs),
            "failed": list(self.failed),
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
    directory: Path,
    *,
    data: Path | None = None,
    seeds: int = 1,
    session: Session = Session(),
) -> MethodComparison:
    """Learn with every method, by its config, and every seed what is not learned yet; tables are written after each.

    The table is of all runs in the directory, also of those that other processes learn there at the same time. A method
    that cannot learn a task stops nobody else.
    """
    _check_runs(directory, configs, data, session.data_root)
    failed: list[str] = []
    for seed in range(seeds):
        for method, config in configs.items():
            run = directory / RUNS / f"{method}-{seed}"
            if _is_complete(run):
                continue
            session.note(f"{method}, seed {seed}")
            try:
                if (run / store.RECORD).exists():
                    resume(run, session=session)
                else:
                    train(config.with_values({"method": method, "seed": seed}), run, data=data, session=session)
            except LearningError as error:
                failed.append(f"{method}, seed {seed}: {error}")
                session.note(failed[-1])
            _write_table(directory, list(configs), failed)
    return _write_table(directory, list(configs), failed)


def _write_table(directory: Path, first: Sequence[str], failed: Sequence[str]) -> MethodComparison:
    """The table of what is there by now; other processes may be at it, too."""
    with locked(directory, wait=True):
        made = replace(_table(directory, first), failed=tuple(failed))
        atomic.write_bytes(directory / RECORD, json.dumps(made.as_json(), indent=1, allow_nan=False).encode())
        atomic.write_bytes(directory / TABLE, made.as_csv().encode())
    return made


def summary_beside(stored: store.StoredRun, run: Path) -> RunSummary:
    """The figures of the run in a directory; with forward transfer, if a fitting run of `one` is beside it."""
    one = run.parent / f"one-{run.name.rpartition('-')[2]}"
    if run.parent.name == RUNS and one != run and (one / store.RECORD).exists():
        with suppress(RunError):
            return stored.summary(store.load_run(one))
    return stored.summary()


def _check_runs(directory: Path, configs: Mapping[str, Config], data: Path | None, root: Path | None) -> None:
    """Refuse a directory with runs of other settings or items, before anything is learned."""
    any_config = next(iter(configs.values()))
    items: dict[int, list[tuple[str, str]]] = {}  # by seed: names and digests of the tasks to be learned
    for run in _runs(directory):
        stored = store.load_run(run, finished=False)
        method, seed = stored.config.learning.method, stored.config.learning.seed
        wanted = configs.get(method, stored.config).with_values({"method": method, "seed": seed})
        if stored.config != wanted or stored.config.budget() != any_config.budget():
            raise RunError(f"{run} was learned with other settings; remove it, or compare in another directory")
        if seed not in items:
            tasks = find_tasks(any_config.with_values({"seed": seed}), data, root)
            items[seed] = list(origin_of(tasks, data).tasks)
        if [task for origin in stored.origins for task in origin.tasks] != items[seed]:
            raise RunError(f"{run} was learned from other tasks or items; remove it, or compare in another directory")


def _runs(directory: Path) -> list[Path]:
    """The runs that were learned or begun here."""
    return [path.parent for path in sorted((directory / RUNS).glob(f"*-*/{store.RECORD}"))]


def _is_complete(run: Path) -> bool:
    return (run / store.RECORD).exists() and not store.load_run(run, finished=False).waiting


def _table(directory: Path, first: Sequence[str]) -> MethodComparison:
    """The runs in a directory that are complete, method by method: those in `first`, then any others."""
    configs: dict[str, Config] = {}
    complete = []
    for run in _runs(directory):
        stored = store.load_run(run, finished=False)
        learning = stored.config.learning
        is_copy = run.name != f"{learning.method}-{learning.seed}"
        if stored.run.tasks and not stored.waiting and not is_copy:
            size = sum(needed_bytes(stored.run.network).values())
            summary = summary_beside(stored, run).as_json()
            complete.append({**summary, "bytes": size, "versions": dict(stored.run.versions)})
            configs.setdefault(learning.method, stored.config)
    order = [method for method in dict.fromkeys((*first, *METHODS)) if method in configs]
    return MethodComparison.of({method: configs[method] for method in order}, complete)


def _figure(values: Sequence[float | None]) -> SeedMean:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return SeedMean(None, None)
    return SeedMean(fmean(known), stdev(known) if len(known) > 1 else None)
