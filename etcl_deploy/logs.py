"""What a run writes down while it learns: every event as a line of JSON, every epoch as a line of CSV.

RUN/events.jsonl      tasks, comparisons, epochs, warnings, resumptions
RUN/epochs.csv        task, epoch, loss, validation accuracy; an epoch repeated after a crash is there twice
RUN/tensorboard/      the same for TensorBoard, with `--tensorboard` and the extra of that name
"""

from __future__ import annotations

import csv
import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from etcl_deploy.errors import ConfigError
from etcl_deploy.learn.events import EpochDone, Event, Report, StepDone, TaskDone

EVENTS, EPOCHS = "events.jsonl", "epochs.csv"
COLUMNS = ("task", "epoch", "loss", "validation")


def write_logs(directory: Path) -> Report:
    """Writes every event but single steps to the logs in a directory."""

    def write(event: Event) -> None:
        if isinstance(event, StepDone):
            return
        with (directory / EVENTS).open("a+b") as file:
            whole = not file.tell() or (file.seek(-1, os.SEEK_END) and file.read(1) == b"\n")
            line = json.dumps(_as_json(event), allow_nan=False) + "\n"
            file.write((line if whole else f"\n{line}").encode())  # a process that was killed may have left half a line
        if isinstance(event, EpochDone):
            with (directory / EPOCHS).open("a", encoding="utf-8", newline="") as table:
                writer = csv.writer(table, lineterminator="\n")
                if not table.tell():
                    writer.writerow(COLUMNS)
                writer.writerow([getattr(event, name) for name in COLUMNS])

    return write


def read_events(directory: Path) -> Iterator[dict[str, Any]]:
    """The events a run has logged; what is not whole is left out."""
    path = directory / EVENTS
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            yield json.loads(line)


def write_tensorboard(directory: Path) -> Report:
    """Writes epochs and accuracies for TensorBoard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError("tensorboard is not installed: pip install 'etcl-deploy[tensorboard]'") from None
    boards: list[Any] = []

    def write(event: Event) -> None:
        if not boards:  # only now: a run starts in an empty directory
            boards.append(SummaryWriter(str(directory / "tensorboard")))
        values: dict[str, float | None] = {}
        if isinstance(event, StepDone):
            return
        if isinstance(event, EpochDone):
            values, step = {f"loss/{event.task}": event.loss, f"validation/{event.task}": event.validation}, event.epoch
        elif isinstance(event, TaskDone):
            step = len(event.run.tasks)
            row = zip(event.run.tasks, event.run.matrix[-1], strict=True)
            values = {f"accuracy/{name}": value for name, value in row}
            values["claimed"] = event.run.network.claimed()
        else:
            return
        for name, value in values.items():
            if value is not None:
                boards[0].add_scalar(name, value, step)
        boards[0].flush()

    return write


def _as_json(event: Event) -> dict[str, Any]:
    """An event as the log keeps it."""
    if isinstance(event, TaskDone):
        values: dict[str, Any] = {"task": event.task, "accuracy": list(event.run.matrix[-1])}
        values["heads"] = [asdict(change) for change in event.run.knowledge[event.task].changes]
    else:
        values = asdict(event)
    return {"event": type(event).__name__, "time": time.time(), **values}
