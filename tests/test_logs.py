"""The logs of a run."""

from __future__ import annotations

import csv
import json
import resource
from pathlib import Path

import pytest
from factories import PHOTO_SETTINGS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_cli import answer

from etcl_deploy.learn.events import EpochDone, Resumed
from etcl_deploy.runs.logs import read_events, write_logs


def test_epochs_as_a_table_and_for_tensorboard(photos: Path, tmp_path: Path) -> None:
    """All three logs have the same figures, and the accuracy that was measured."""
    words = [word for key, value in PHOTO_SETTINGS.items() for word in ("--set", f"{key}={value}")]
    summary = answer("train", "--data", photos, "--run", tmp_path / "run", "--tensorboard", *words)
    with (tmp_path / "run" / "epochs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    events = [event for event in read_events(tmp_path / "run") if event["event"] == "EpochDone"]
    assert [(row["task"], int(row["epoch"])) for row in rows] == [(event["task"], event["epoch"]) for event in events]
    assert [float(row["loss"]) for row in rows] == [event["loss"] for event in events]
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    losses = [scalar.value for task in summary["tasks"] for scalar in board.Scalars(f"loss/{task}")]
    assert losses == pytest.approx([float(row["loss"]) for row in rows], abs=1e-5)
    last = summary["tasks"][-1]
    assert abs(board.Scalars(f"accuracy/{last}")[-1].value - summary["matrix"][-1][-1]) < 1e-3


def test_half_a_line_costs_no_other(tmp_path: Path) -> None:
    """A process that was killed while it wrote leaves the log readable, and what comes later is whole."""
    log = tmp_path / "events.jsonl"
    write_logs(tmp_path)(Resumed("a", 1))
    log.write_bytes(log.read_bytes() + b'{"event": "Epo')
    write_logs(tmp_path)(Resumed("b", 2))
    assert [event["task"] for event in read_events(tmp_path)] == ["a", "b"]
    assert json.loads(log.read_text().splitlines()[-1])["epoch"] == 2


@pytest.mark.parametrize("name", ["events.jsonl", "epochs.csv"])
def test_a_full_disk_leaves_no_half_line(tmp_path: Path, name: str) -> None:
    """If a log has room for a part of a line only, nothing of it is written; later lines are whole."""
    limits, log = resource.getrlimit(resource.RLIMIT_FSIZE), tmp_path / name
    before = b"earlier\n" * 1000
    log.write_bytes(before)  # so that the other log has room
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, limits[1]))
    try:
        with pytest.raises(OSError, match=name):
            write_logs(tmp_path)(EpochDone("a", 1, 3, 0.5, None))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert log.read_bytes() == before
    write_logs(tmp_path)(EpochDone("a", 2, 3, 0.25, None))
    assert len(log.read_bytes().splitlines()) == 1001
