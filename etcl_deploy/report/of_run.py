"""The page of one run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from etcl_deploy.learn.methods import METHODS
from etcl_deploy.learn.run import RunSummary
from etcl_deploy.report import figures
from etcl_deploy.report.page import Page, Section, Table
from etcl_deploy.report.tables import accuracy_rows, shown, size
from etcl_deploy.runs.compare import summary_beside
from etcl_deploy.runs.logs import read_events
from etcl_deploy.runs.statistics import needed_bytes, overlap, used_over_time
from etcl_deploy.runs.store import StoredRun, how_to_go_on, load_run

MANY = 40  # tasks; with more, charts and tables that have a row for each leave some out


def run_page(directory: Path) -> Page:
    """The page of a run, finished or not."""
    stored = load_run(directory)
    summary = summary_beside(stored, directory)
    count = len(summary.tasks)
    notes = list(stored.partial)
    if stored.waiting:
        total = count + len(stored.waiting)
        notes.append(f"{count} of {total} tasks are learned; go on with: {how_to_go_on(directory)}")
    sections = [_accuracy(summary), *_curves(summary), *_similarity(summary), *_masks(stored), _sizes(stored)]
    return Page(
        title=f"{summary.recipe or directory.name}: {count} task{'s' if count > 1 else ''} "
        f"learned with {summary.method}",
        lead=f"{stored.config.network.backbone}, density {stored.config.network.density}, seed {summary.seed}"
        + (f", preset {summary.preset}" if summary.preset else ""),
        notes=notes,
        facts=_facts(summary, stored),
        sections=[*sections, *_progress(directory), _settings(stored)],
        footer=f"run {stored.digest[:16]}, made with etcl-deploy {stored.run.versions['etcl_deploy']}",
    )


def _facts(summary: RunSummary, stored: StoredRun) -> list[tuple[str, str]]:
    used = used_over_time(list(stored.run.network.finished.values()))[-1]
    return [
        ("average accuracy (ACC)", shown(summary.acc, "{:.2f} %")),
        ("backward transfer (BWT)", shown(summary.bwt, "{:+.4f}")),
        ("forward transfer (FWT)", shown(summary.fwt, "{:+.4f}")),
        ("backbone in use", f"{used:.0%}"),
        ("time", f"{summary.seconds:.0f} s"),
    ]


def _accuracy(summary: RunSummary) -> Section:
    names, matrix = summary.tasks, summary.matrix
    values = np.full((len(names), len(names)), np.nan)
    for column, row in enumerate(matrix):
        values[: len(row), column] = np.array(row, float)
    known = values[~np.isnan(values)]
    low = float(np.floor(known.min() / 10) * 10) if len(known) else 0.0
    picture = figures.heat_map(
        values,
        names,
        label="test accuracy, %",
        rows="task",
        columns="after learning task",
        limits=(min(low, 90.0), 100.0),
    )
    head = ["task", *(f"after {number + 1}" for number in range(len(names)))]
    table = Table(head, accuracy_rows(summary), "as a table")
    lead = "Test accuracy of every task after each one was learned. A row whose values fall shows forgetting."
    return Section("accuracy", "Accuracy", lead, {lead: picture}, [table])


def _curves(summary: RunSummary) -> list[Section]:
    """Accuracy over time, and what later tasks changed; nothing for a single task."""
    names, matrix = summary.tasks, summary.matrix
    if len(names) < 2:
        return []
    lead = (
        "Each line begins where its task was learned. It stays level where nothing is forgotten and rises where later "
        "tasks help. Colours go from blue, the first task, to red, the last."
    )
    sections = [Section("over-time", "Accuracy over time", lead, {lead: figures.task_curves(matrix, names)})]
    learned_and_now = [(matrix[n][n], matrix[-1][n]) for n in range(len(names) - 1)]
    change = {
        name: None if now is None or then is None else now - then
        for name, (then, now) in zip(names, learned_and_now, strict=False)
    }
    if any(change.values()):
        lead = "What later tasks added to, or took from, the accuracy of each earlier one, in points."
        if len(change) > MANY:
            largest = sorted(change, key=lambda name: -abs(change[name] or 0))[:MANY]
            change = {name: value for name, value in change.items() if name in largest}
            lead += f" The {MANY} that changed most."
        picture = figures.bars(change, "change since it was learned, points", "{:+.1f}")
        sections.append(Section("backward", "Backward transfer", lead, {lead: picture}))
    return sections


def _similarity(summary: RunSummary) -> list[Section]:
    """Which tasks were compared; nothing for methods that compare none."""
    pairs = [(task, pair) for task, comparisons in summary.comparisons.items() for pair in comparisons]
    if not pairs:
        return []
    names = summary.tasks
    gaps, marked = np.full((len(names), len(names)), np.nan), np.zeros((len(names), len(names)), dtype=bool)
    for task, pair in pairs:
        place = names.index(task), names.index(pair.task)
        gaps[place], marked[place] = pair.gap, pair.similar
    lead = (
        "The gap: how much closer two tasks are in the sub-network of the earlier one than in an untrained network. "
        "Frames mark tasks that were found similar, so that one helps the other."
    )
    picture = figures.heat_map(
        gaps,
        names,
        label="gap",
        rows="new task",
        columns="compared with",
        limits=(min(0.0, float(np.nanmin(gaps))), max(1.0, float(np.nanmax(gaps)))),
        marked=marked,
        form="{:.2f}",
    )
    tables = []
    if len(names) <= MANY:  # `etcl eval --json` has them all
        head = ["task", "compared with", "distance", "untrained", "gap", "similar", "reason"]
        rows = []
        for task, pair in pairs:
            numbers = (f"{value:.3f}" for value in (pair.distance, pair.original, pair.gap))
            rows.append([task, pair.task, *numbers, "yes" if pair.similar else "no", pair.reason])
        tables = [Table(head, rows, "as a table")]
    return [Section("similarity", "Similar tasks", lead, {lead: picture}, tables)]


def _masks(stored: StoredRun) -> list[Section]:
    """How masks overlap; nothing for methods without masks, or for a single one."""
    states = list(stored.run.network.finished.values())
    if METHODS[stored.config.learning.method].dense or len(states) < 2:
        return []
    overlaps = figures.heat_map(
        overlap(states).numpy(),
        stored.run.tasks,
        label="shared",
        rows="task",
        columns="task",
        limits=(0.0, 1.0),
        form="{:.2f}",
    )
    shares = [100 * share for share in used_over_time(states)]
    used = figures.lines({"in use": shares}, "tasks learned", "weights in use, %", 0)
    lead = (
        "Of the weights that either of two tasks uses, the share that both use; and the share of the backbone in use."
    )
    return [Section("masks", "Masks", lead, {"Overlap of masks": overlaps, "Weights in use over time": used})]


def _sizes(stored: StoredRun) -> Section:
    sizes = needed_bytes(stored.run.network)
    total = sum(sizes.values())
    lead = f"Predicting all tasks takes {size(total)}: weights in single precision, masks of one bit per weight."
    picture = figures.bars({part: count / 1e6 for part, count in sizes.items()}, "MB", "{:.2f}")
    rows = [[part, size(count), f"{count / total:.1%}"] for part, count in sizes.items()]
    return Section("sizes", "Sizes", lead, {lead: picture}, [Table(["part", "bytes", "share"], rows, "as a table")])


def _progress(directory: Path) -> list[Section]:
    """Loss and validation accuracy of every epoch in the log; of one that was repeated, the last time."""
    epochs: dict[tuple[str, int], Mapping[str, Any]] = {}
    for event in read_events(directory):
        if event["event"] == "EpochDone":
            task, number = event["task"], event["epoch"]
            epochs = {place: old for place, old in epochs.items() if place[0] != task or place[1] < number}
            epochs[task, number] = event
    if not epochs:
        return []
    losses = [event["loss"] for event in epochs.values()]
    validation = [event["validation"] for event in epochs.values()]
    over = "epochs, all tasks in a row"
    pictures = {"Training loss": figures.lines({"loss": losses}, over, "training loss", 0)}
    if any(value is not None for value in validation):
        drawn = figures.lines({"validation": validation}, over, "validation accuracy, %")
        pictures["Validation accuracy"] = drawn
    return [Section("learning", "Learning", "Epoch by epoch; every task begins with a jump.", pictures)]


def _settings(stored: StoredRun) -> Section:
    versions = ", ".join(f"{name} {version}" for name, version in sorted(stored.run.versions.items()))
    text = json.dumps(stored.config.as_json(), indent=2)
    return Section("settings", "Settings and versions", f"Learned with {versions}.", text=text)
