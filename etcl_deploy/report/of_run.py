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
from etcl_deploy.report.page import Page, Picture, Section, Table
from etcl_deploy.report.tables import shown, size
from etcl_deploy.runs.compare import summary_beside
from etcl_deploy.runs.logs import read_events
from etcl_deploy.runs.statistics import needed_bytes, overlap, used_over_time
from etcl_deploy.runs.store import StoredRun, how_to_go_on, load_run

MANY = 40  # tasks: more than that many cannot each be shown


def run_page(directory: Path) -> Page:
    """What a run came to, as far as it got."""
    stored = load_run(directory)
    summary = summary_beside(stored, directory)
    tasks = f"{len(summary.tasks)} task{'s' if len(summary.tasks) > 1 else ''}"
    sections = [_accuracy(summary), *_curves(summary), *_similarity(summary), *_masks(stored), _sizes(stored)]
    sections += [*_progress(directory), _settings(stored)]
    return Page(
        title=f"{summary.recipe or directory.name}: {tasks} learned with {summary.method}",
        lead=f"{stored.config.network.backbone}, density {stored.config.network.density}, seed {summary.seed}",
        notes=_notes(stored, directory),
        facts=_facts(summary, stored),
        sections=sections,
        footer=f"run {stored.digest[:16]}, made with etcl-deploy {stored.run.versions['etcl_deploy']}",
    )


def _notes(stored: StoredRun, directory: Path) -> list[str]:
    notes = list(stored.partial)
    if stored.waiting:
        done, total = len(stored.run.tasks), len(stored.run.tasks) + len(stored.waiting)
        notes.append(f"{done} of {total} tasks are learned; go on with: {how_to_go_on(directory)}")
    return notes


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
        for task, value in enumerate(row):
            values[task, column] = np.nan if value is None else value
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
    rows = [
        [f"{task + 1} {name}", *("" if n < task else shown(matrix[n][task]) for n in range(len(matrix)))]
        for task, name in enumerate(names)
    ]
    lead = "Test accuracy of every task after each one was learned. A row that fades would be forgetting."
    return Section("accuracy", "Accuracy", lead, [Picture(lead, picture)], [Table(head, rows, "as a table")])


def _curves(summary: RunSummary) -> list[Section]:
    if len(summary.tasks) < 2:
        return []
    names, matrix = summary.tasks, summary.matrix
    lead = (
        "The same over time: each line begins where its task was learned. It stays level where nothing is forgotten, "
        "and rises where later tasks help. The colours go from blue, the first, to red, the last."
    )
    sections = [Section("over-time", "Accuracy over time", lead, [Picture(lead, figures.task_curves(matrix, names))])]
    learned_and_now = [(matrix[n][n], matrix[-1][n]) for n in range(len(names) - 1)]
    change = {
        name: (None if now is None or then is None else now - then, None)
        for name, (then, now) in zip(names, learned_and_now, strict=False)
    }
    if any(value for value, _ in change.values()):
        lead = "What later tasks gave to, or took from, each earlier one, in points of accuracy."
        if len(change) > MANY:
            largest = sorted(change, key=lambda name: -abs(change[name][0] or 0))[:MANY]
            change = {name: value for name, value in change.items() if name in largest}
            lead += f" The {MANY} that changed most."
        picture = figures.bars(change, "change since it was learned, points", "{:+.1f}")
        sections.append(Section("backward", "Backward transfer", lead, [Picture(lead, picture)]))
    return sections


def _similarity(summary: RunSummary) -> list[Section]:
    rows = [(task, compared) for task, comparisons in summary.comparisons.items() for compared in comparisons]
    if not rows:
        return []
    names = summary.tasks
    place = {name: number for number, name in enumerate(names)}
    gaps, marked = np.full((len(names), len(names)), np.nan), np.zeros((len(names), len(names)), dtype=bool)
    for task, compared in rows:
        gaps[place[task], place[compared.task]] = compared.gap
        marked[place[task], place[compared.task]] = compared.similar
    lead = (
        "How much closer an earlier task's sub-network brings a new task than it was by nature (the gap). "
        "Framed: taken for similar, so that one helps the other."
    )
    picture = figures.heat_map(
        gaps,
        names,
        label="gap",
        rows="new task",
        columns="held against",
        limits=(min(0.0, float(np.nanmin(gaps))), max(1.0, float(np.nanmax(gaps)))),
        marked=marked,
        form="{:.2f}",
    )
    head = ["task", "held against", "distance", "untrained", "gap", "similar", "reason"]
    cells = [
        [
            task,
            compared.task,
            f"{compared.distance:.3f}",
            f"{compared.original:.3f}",
            f"{compared.gap:.3f}",
            "yes" if compared.similar else "no",
            compared.reason,
        ]
        for task, compared in rows
    ]
    tables = [Table(head, cells, "as a table")] if len(names) <= MANY else []  # `etcl eval --json` has it all
    return [Section("similarity", "Similar tasks", lead, [Picture(lead, picture)], tables)]


def _masks(stored: StoredRun) -> list[Section]:
    """Nothing of methods without masks, or of a single one."""
    states = list(stored.run.network.finished.values())
    if METHODS[stored.config.learning.method].dense or len(states) < 2:
        return []
    shared = overlap(states).numpy()
    drawn = figures.heat_map(
        shared, stored.run.tasks, label="shared", rows="task", columns="task", limits=(0.0, 1.0), form="{:.2f}"
    )
    shares = [100 * share for share in used_over_time(states)]
    used = figures.lines({"in use": shares}, "tasks learned", "weights in use, %", 0)
    lead = "Of the weights two tasks use, the share both do; and how much of the backbone some task uses."
    pictures = [Picture("Overlap of masks", drawn), Picture("Weights in use over time", used)]
    return [Section("masks", "Masks", lead, pictures)]


def _sizes(stored: StoredRun) -> Section:
    sizes = needed_bytes(stored.run.network)
    total = sum(sizes.values())
    lead = f"What it takes to predict all tasks: {size(total)}, weights in single precision, a bit a weight for masks."
    picture = figures.bars({part: (count / 1e6, None) for part, count in sizes.items()}, "MB", "{:.2f}")
    rows = [[part, size(count), f"{count / total:.1%}"] for part, count in sizes.items()]
    return Section(
        "sizes", "Sizes", lead, [Picture(lead, picture)], [Table(["part", "bytes", "share"], rows, "as a table")]
    )


def _progress(directory: Path) -> list[Section]:
    """Loss and validation accuracy epoch by epoch, from the log; what was repeated, as it was the last time."""
    epochs: dict[tuple[str, int], Mapping[str, Any]] = {}
    for event in read_events(directory):
        if event["event"] == "EpochDone":
            task, number = event["task"], event["epoch"]
            epochs = {place: old for place, old in epochs.items() if place[0] != task or place[1] < number}
            epochs[task, number] = event
    if not epochs:
        return []
    losses = [event["loss"] for event in epochs.values()]
    held = [event["validation"] for event in epochs.values()]
    pictures = [
        Picture("Training loss", figures.lines({"loss": losses}, "epochs, all tasks in a row", "training loss", 0))
    ]
    if any(value is not None for value in held):
        drawn = figures.lines({"validation": held}, "epochs, all tasks in a row", "validation accuracy, %")
        pictures.append(Picture("Validation accuracy", drawn))
    return [Section("learning", "Learning", "Epoch by epoch; every task begins with a jump.", pictures)]


def _settings(stored: StoredRun) -> Section:
    versions = ", ".join(f"{name} {version}" for name, version in sorted(stored.run.versions.items()))
    text = json.dumps(stored.config.as_json(), indent=2)
    return Section("settings", "Settings and versions", f"Learned with {versions}.", text=text)
