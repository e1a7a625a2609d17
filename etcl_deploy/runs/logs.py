"""Logs of a run: every event as a line of JSON, every epoch as a line of CSV.

RUN/events.jsonl      tasks, comparisons, epochs, warnings, resumptions
RUN/epochs.csv        task, epoch, loss, validation accuracy; an epoch repeated after a crash is there twice
RUN/tensorboard/      the same for TensorBoard, with `--tensorboard` and the extra of that name
"""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from etcl_deploy.errors import ConfigError
from etcl_deploy.learn.events import EpochDone, Event, ProbeStepDone, Report, StepDone, TaskDone

EVENTS, EPOCHS = "events.jsonl", "epochs.csv"
COLUMNS = ("task", "epoch", "loss", "validation")


def write_logs(directory: Path) -> Report:
    """Writes every event but single steps to the logs in a directory."""

    def write(event: Event) -> None:
        if isinstance(event, StepDone | ProbeStepDone):
            return
        _append(directory / EVENTS, json.dumps(_as_json(event), allow_nan=False) + "\n")
        if isinstance(event, EpochDone):
            _append(directory / EPOCHS, _row(getattr(event, name) for name in COLUMNS), first=_row(COLUMNS))

    return write


def _append(path: Path, line: str, first: str = "") -> None:
    """Add a line to a file, wholly or not at all; `first` begins a new one."""
    with path.open("a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        whole = not size or (file.seek(-1, os.SEEK_END) and file.read(1) == b"\n")  # else somebody was killed meanwhile
        data = ((first if not size else "" if whole else "\n") + line).encode()
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        except OSError as error:
            os.truncate(path, size)
            error.filename = str(path)
            raise


def _row(values: Iterable[Any]) -> str:
    """A line of CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue()


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
        values: dict[str, float | None]
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
        values["heads"] = [asdict(change) for change in event.run.records[event.task].changes]
    else:
        values = asdict(event)
    return {"event": type(event).__name__, "time": time.time(), **values}
