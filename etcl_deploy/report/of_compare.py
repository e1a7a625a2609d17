"""The page of a comparison."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from etcl_deploy.errors import RunError
from etcl_deploy.report import figures
from etcl_deploy.report.page import Page, Section, Table
from etcl_deploy.report.tables import COMPARE_COLUMNS, compare_cells
from etcl_deploy.runs.compare import RECORD
from etcl_deploy.settings import flat

BARS = {
    "acc": ("Accuracy", "ACC, %", "{:.2f}", "Mean test accuracy of all tasks at the end."),
    "fwt": (
        "Forward transfer",
        "FWT",
        "{:+.3f}",
        "How much better tasks are learned than by a separate network for each.",
    ),
    "bwt": (
        "Backward transfer",
        "BWT",
        "{:+.3f}",
        "What later tasks added to earlier ones; a value below zero is forgetting.",
    ),
}


def compare_page(directory: Path) -> Page:
    """The page of a comparison, finished or not."""
    try:
        record = json.loads((directory / RECORD).read_text("utf-8"))
        methods, runs = record["methods"], record["runs"]
        first = runs[0]
        return Page(
            title=f"{record['recipe'] or directory.name}: {len(methods)} methods side by side",
            lead=f"{len(first['tasks'])} tasks, the same items, epochs and order for each.",
            notes=[*sorted({words for run in runs for words in run["partial"]}), *record["failed"]],
            facts=[("methods", str(len(methods))), ("tasks", str(len(first["tasks"]))), ("runs", str(len(runs)))],
            sections=[_table(methods), *_bars(methods), _over_time(runs), _settings(record["configs"], runs)],
            footer="made with etcl compare",
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise RunError(f"{directory / RECORD} is damaged: {error!r}") from None


def _table(methods: Sequence[Mapping[str, Any]]) -> Section:
    table = Table(COMPARE_COLUMNS, [compare_cells(row) for row in methods])
    lead = "Mean and deviation over the seeds. Size is what all tasks together need to predict."
    return Section("table", "Methods", lead, tables=[table])


def _bars(methods: Sequence[Mapping[str, Any]]) -> list[Section]:
    sections = []
    for name, (title, label, form, lead) in BARS.items():
        means = {row["method"]: row[name]["mean"] for row in methods}
        deviations = {row["method"]: row[name]["deviation"] for row in methods}
        if any(mean is not None for mean in means.values()):
            sections.append(Section(name, title, lead, {lead: figures.bars(means, label, form, deviations)}))
    return sections


def _over_time(runs: Sequence[Mapping[str, Any]]) -> Section:
    series: dict[str, list[float | None]] = {}
    for method in dict.fromkeys(run["method"] for run in runs):
        matrices = [run["matrix"] for run in runs if run["method"] == method]
        means = [[None if None in row else fmean(row) for row in matrix] for matrix in matrices]
        columns = zip(*means, strict=False)
        series[method] = [None if None in column else fmean(column) for column in columns]
    lead = "Mean test accuracy of all tasks learned so far, after every task; mean over the seeds."
    picture = figures.lines(series, "tasks learned", "mean test accuracy, %")
    return Section("over-time", "Accuracy over time", lead, {lead: picture})


def _settings(configs: Mapping[str, Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> Section:
    """The settings all methods share, and a table of those they do not."""
    settings = {method: flat(config) for method, config in configs.items()}
    first = next(iter(settings.values()))
    shared = {key: value for key, value in first.items() if all(own[key] == value for own in settings.values())}
    apart = [key for key in first if key not in shared and key != "method"]
    versions = {f"{name} {version}" for run in runs for name, version in run["versions"].items()}
    lead = f"Learned with {', '.join(sorted(versions))}."
    if apart:
        lead += " The table shows the settings that differ, the text below those that all methods share."
    rows = [[method, *(str(own[key]) for key in apart)] for method, own in settings.items()]
    tables = [Table(["method", *apart], rows)] if apart else []
    return Section("settings", "Settings and versions", lead, tables=tables, text=json.dumps(shared, indent=2))
