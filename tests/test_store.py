from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import Learned

from etcl_deploy.core.atomic import locked
from etcl_deploy.core.plan import Plan
from etcl_deploy.errors import RunError
from etcl_deploy.learn.trainer import predict
from etcl_deploy.runs import store as directories


def test_a_loaded_run_answers_with_the_same_bytes(learned: Learned) -> None:
    """Everything the network needs is in the directory, and everything that is known of the tasks."""
    stored = directories.load_run(learned.directory)
    assert stored.config == learned.config
    assert stored.run.matrix == learned.run.matrix
    assert stored.run.versions == learned.run.versions
    assert stored.run.summary(stored.config) == learned.run.summary(learned.config)
    for task in learned.tasks:
        ours = predict(stored.run.network, task.name, task.test_x)
        assert torch.equal(ours, predict(learned.run.network, task.name, task.test_x))
        known, kept = learned.run.records[task.name], stored.run.records[task.name]
        assert known.memory.keys() == kept.memory.keys() and "inputs/space" in kept.memory
        assert all(torch.equal(value, kept.memory[name]) for name, value in known.memory.items())
    assert any(change.kept for known in stored.run.records.values() for change in known.changes)


def test_nothing_but_the_newest_state_is_kept(learned: Learned) -> None:
    """One record, one backbone, one file a task, the logs; nothing of a task under way."""
    names = sorted(path.name for path in learned.directory.iterdir() if path.is_file())
    assert names[0] == ".lock" and names[1].startswith("backbone-")
    assert names[2:] == ["epochs.csv", "events.jsonl", "run.json"]
    assert [path.name[:3] for path in sorted((learned.directory / "tasks").iterdir())] == [
        "000",
        "001",
        "002",
        "003",
        "004",
    ]


def test_the_log_tells_what_happened(learned: Learned) -> None:
    """One JSON object a line: every task, every comparison, every epoch with its losses."""
    events = [json.loads(line) for line in (learned.directory / "events.jsonl").read_text().splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds[:4] == ["TaskStarted", "Compared", "EpochDone", "EpochDone"]
    assert kinds.count("TaskDone") == 5
    assert all(0 <= event["validation"] <= 100 and event["loss"] > 0 for event in events if "loss" in event)


def test_one_process_at_a_time(learned: Learned) -> None:
    """A second one is told, and changes nothing."""
    with (
        locked(learned.directory),
        pytest.raises(RunError, match="another process is at work"),
        locked(learned.directory),
    ):
        raise AssertionError("two processes hold the lock")


def test_a_run_that_is_saved_meanwhile_is_read_as_it_is_then(
    learned: Learned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the record and the files it names another process may replace both."""
    directory = tmp_path / "run"
    shutil.copytree(learned.directory, directory)
    newer = directories.load_run(directory)
    with torch.no_grad():
        newer.run.network.masked_layers["stem_conv"].weight += 1
    real = directories.Plan.from_json

    def save_and_go_on(values: object) -> Plan:
        directories.save(newer, directory)
        return real(values)

    monkeypatch.setattr(directories.Plan, "from_json", save_and_go_on)
    read = directories.load_run(directory).run.network.masked_layers["stem_conv"].weight
    assert torch.equal(read, newer.run.network.masked_layers["stem_conv"].weight)
    next(directory.glob("backbone-*")).unlink()
    monkeypatch.undo()
    with pytest.raises(RunError, match="No such file"):
        directories.load_run(directory)


def test_a_crash_while_saving_leaves_the_old_run(
    learned: Learned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the two writes fails, the directory still loads as it was before."""
    directory = tmp_path / "run"
    shutil.copytree(learned.directory, directory)
    before = (directory / "run.json").read_bytes()
    stored = directories.load_run(directory)
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
            directories.save(stored, directory)
        monkeypatch.undo()
        assert (directory / "run.json").read_bytes() == before
        assert directories.load_run(directory).run.matrix == learned.run.matrix
        assert not [p for p in directory.iterdir() if p.name.startswith(".") and p.name != ".lock"], (
            "no half-written file stays"
        )


@pytest.mark.parametrize(
    "what", ["missing", "no state", "flipped", "flipped task", "not json", "later format", "lost task", "unsaid"]
)
def test_a_damaged_run_is_refused(learned: Learned, tmp_path: Path, what: str) -> None:
    """With its reason, never with a traceback."""
    directory = tmp_path / "run"
    shutil.copytree(learned.directory, directory)
    record, state = directory / "run.json", next(directory.glob("backbone-*"))
    if what == "flipped task":
        state = next((directory / "tasks").glob("002-*"))
    if what == "missing":
        record.unlink()
    elif what == "no state":
        state.unlink()
    elif what.startswith("flipped"):
        data = bytearray(state.read_bytes())
        data[len(data) // 2] ^= 1
        state.write_bytes(data)
    elif what == "not json":
        record.write_text("{")
    elif what == "lost task":
        values = json.loads(record.read_text())
        record.write_text(json.dumps({**values, "tasks": values["tasks"][:-1]}))
    elif what == "unsaid":
        values = json.loads(record.read_text())
        del values["config"]["learning"]["transfer"]["warm_rate"]
        record.write_text(json.dumps(values))
    else:
        record.write_text(json.dumps({**json.loads(record.read_text()), "format": 99}))
    reasons = {
        "missing": "holds no run",
        "no state": "cannot read",
        "flipped": "digest differs",
        "flipped task": "digest differs",
        "later format": "has format 99",
        "unsaid": "does not say warm_rate: it is of another version",
    }
    with pytest.raises(RunError, match=reasons.get(what, "is damaged")):
        directories.load_run(directory)


def test_a_directory_in_use_is_refused(learned: Learned, tmp_path: Path) -> None:
    """Training never writes over anything."""
    with pytest.raises(RunError, match="already holds a run"):
        directories.check_free(learned.directory)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="is not a directory one can write to"):
        directories.check_free(tmp_path / "notes.txt" / "run")
    with pytest.raises(RunError, match="not an empty directory"):
        directories.check_free(tmp_path)
