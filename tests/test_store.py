from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Learned
from factories import same_tensors

from etcl_deploy.core.atomic import locked
from etcl_deploy.core.plan import Plan
from etcl_deploy.errors import RunError
from etcl_deploy.learn.trainer import predict
from etcl_deploy.runs import store
from etcl_deploy.runs.logs import read_events


def test_a_loaded_run_answers_with_the_same_bytes(learned: Learned) -> None:
    """Everything the network needs is in the directory, and everything that is known of the tasks."""
    stored = store.load_run(learned.directory)
    assert stored.config == learned.config
    assert stored.run.matrix == learned.run.matrix
    assert stored.run.versions == learned.run.versions
    assert stored.run.summary(stored.config) == learned.run.summary(learned.config)
    for task in learned.tasks:
        ours = predict(stored.run.network, task.name, task.test_x)
        assert torch.equal(ours, predict(learned.run.network, task.name, task.test_x))
        memory = stored.run.records[task.name].memory
        assert "inputs/space" in memory and same_tensors(memory, learned.run.records[task.name].memory)
    assert any(change.kept for known in stored.run.records.values() for change in known.changes)


def test_nothing_but_the_newest_state_is_kept(learned: Learned) -> None:
    """One record, one backbone, one file a task, the logs; nothing of a task under way."""
    names = sorted(path.name for path in learned.directory.iterdir() if path.is_file())
    assert names[0] == ".lock" and names[1].startswith("backbone-")
    assert names[2:] == ["epochs.csv", "events.jsonl", "run.json"]
    assert sorted(path.name[:3] for path in (learned.directory / "tasks").iterdir()) == [f"00{n}" for n in range(5)]


def test_the_log_tells_what_happened(learned: Learned) -> None:
    """Every task, every comparison, every epoch with its loss and accuracy."""
    events = list(read_events(learned.directory))
    kinds = [event["event"] for event in events]
    assert kinds[:4] == ["TaskStarted", "Compared", "EpochDone", "EpochDone"]
    assert kinds.count("TaskDone") == 5
    assert all(0 <= event["validation"] <= 100 and event["loss"] > 0 for event in events if "loss" in event)


def test_one_process_at_a_time(learned: Learned) -> None:
    """A second one is told, and changes nothing."""
    refused = pytest.raises(RunError, match="another process is at work")
    with locked(learned.directory), refused, locked(learned.directory):
        raise AssertionError("two processes hold the lock")


def test_a_run_that_is_saved_meanwhile_is_read_as_it_is_then(
    learned: Learned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the record and the files it names another process may replace both."""
    directory = tmp_path / "run"
    shutil.copytree(learned.directory, directory)
    newer = store.load_run(directory)
    with torch.no_grad():
        newer.run.network.masked_layers["stem_conv"].weight += 1
    real = store.Plan.from_json

    def save_and_go_on(values: object) -> Plan:
        store.save(newer, directory)
        return real(values)

    monkeypatch.setattr(store.Plan, "from_json", save_and_go_on)
    read = store.load_run(directory).run.network.masked_layers["stem_conv"].weight
    assert torch.equal(read, newer.run.network.masked_layers["stem_conv"].weight)
    next(directory.glob("backbone-*")).unlink()
    monkeypatch.undo()
    with pytest.raises(RunError, match="No such file"):
        store.load_run(directory)


def test_a_crash_while_saving_leaves_the_old_run(
    learned: Learned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If either of the two writes fails, the directory still loads as it was before."""
    directory = tmp_path / "run"
    shutil.copytree(learned.directory, directory)
    before = (directory / "run.json").read_bytes()
    stored = store.load_run(directory)
    with torch.no_grad():
        stored.run.network.masked_layers["stem_conv"].weight += 1
    real = Path.replace
    for fatal in ("backbone-", "run.json"):

        def replace(self: Path, target: Path, fatal: str = fatal) -> Path:
            if Path(target).name.startswith(fatal):
                raise OSError(28, "No space left on device")
            return real(self, target)

        monkeypatch.setattr(Path, "replace", replace)
        with pytest.raises(OSError, match="No space left"):
            store.save(stored, directory)
        monkeypatch.undo()
        assert (directory / "run.json").read_bytes() == before
        assert store.load_run(directory).run.matrix == learned.run.matrix
        hidden = [path.name for path in directory.iterdir() if path.name.startswith(".")]
        assert hidden in ([], [".lock"]), "no half-written file stays"


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def rewrite(path: Path, change: Callable[[Any], object]) -> None:
    """Change the values of a JSON file."""
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no record": (lambda run: (run / "run.json").unlink(), "holds no run"),
    "no state": (lambda run: next(run.glob("backbone-*")).unlink(), "cannot read"),
    "flipped state": (lambda run: flip(next(run.glob("backbone-*"))), "digest differs"),
    "flipped task": (lambda run: flip(next(run.glob("tasks/002-*"))), "digest differs"),
    "not json": (lambda run: (run / "run.json").write_text("{"), "is damaged"),
    "lost task": (lambda run: rewrite(run / "run.json", lambda record: record["tasks"].pop()), "is damaged"),
    "later format": (lambda run: rewrite(run / "run.json", lambda record: record.update(format=99)), "has format 99"),
    "unsaid setting": (
        lambda run: rewrite(run / "run.json", lambda record: record["config"]["learning"]["transfer"].pop("warm_rate")),
        "does not say warm_rate: it is of another version",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_run_is_refused(learned: Learned, tmp_path: Path, what: str) -> None:
    """With its reason, never with a traceback."""
    damage, reason = DAMAGE[what]
    directory = tmp_path / "run"
    shutil.copytree(learned.directory, directory)
    damage(directory)
    with pytest.raises(RunError, match=reason):
        store.load_run(directory)


def test_a_directory_in_use_is_refused(learned: Learned, tmp_path: Path) -> None:
    """Training never writes over anything."""
    with pytest.raises(RunError, match="already holds a run"):
        store.check_free(learned.directory)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="is not a directory one can write to"):
        store.check_free(tmp_path / "notes.txt" / "run")
    with pytest.raises(RunError, match="not an empty directory"):
        store.check_free(tmp_path)
