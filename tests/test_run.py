from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import Learned

from etcl_deploy.errors import RunError
from etcl_deploy.learn import run as runs
from etcl_deploy.learn.trainer import predict


def test_a_loaded_run_answers_with_the_same_bytes(learned: Learned) -> None:
    """Everything the network needs is in the directory."""
    loaded, config = runs.load(learned.directory)
    assert config == learned.config
    assert loaded.matrix == learned.run.matrix
    assert loaded.versions == learned.run.versions
    for task in learned.tasks:
        ours = predict(loaded.network, task.name, task.test_x)
        assert torch.equal(ours, predict(learned.run.network, task.name, task.test_x))


def test_only_the_newest_state_is_kept(learned: Learned) -> None:
    """A run directory holds its record and one state file."""
    record, state = sorted(p.name for p in learned.directory.iterdir())
    assert record == "run.json"
    assert state.startswith("state-")


def test_a_crash_while_saving_leaves_the_old_run(
    learned: Learned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the two writes fails, the directory still loads as it was before."""
    directory = tmp_path / "run"
    shutil.copytree(learned.directory, directory)
    before = (directory / "run.json").read_bytes()
    changed, config = runs.load(directory)
    with torch.no_grad():
        changed.network.masked_layers["stem_conv"].weight += 1
    real = Path.replace
    for fatal in ("state-", "run.json"):

        def replace(self: Path, target: Path, fatal: str = fatal) -> Path:
            if Path(target).name.startswith(fatal):
                raise OSError(28, "No space left on device")
            return real(self, target)

        monkeypatch.setattr(Path, "replace", replace)
        with pytest.raises(OSError, match="No space left"):
            runs.save(changed, config, directory)
        monkeypatch.undo()
        assert (directory / "run.json").read_bytes() == before
        assert runs.load(directory)[0].matrix == learned.run.matrix
        assert not [p for p in directory.iterdir() if p.name.startswith(".")], "no half-written file stays"


@pytest.mark.parametrize("what", ["missing", "no state", "flipped", "not json", "later format", "lost task"])
def test_a_damaged_run_is_refused(learned: Learned, tmp_path: Path, what: str) -> None:
    """With its reason, never with a traceback."""
    directory = tmp_path / "run"
    shutil.copytree(learned.directory, directory)
    record, state = directory / "run.json", next(directory.glob("state-*"))
    if what == "missing":
        record.unlink()
    elif what == "no state":
        state.unlink()
    elif what == "flipped":
        data = bytearray(state.read_bytes())
        data[len(data) // 2] ^= 1
        state.write_bytes(data)
    elif what == "not json":
        record.write_text("{")
    elif what == "lost task":
        values = json.loads(record.read_text())
        record.write_text(json.dumps({**values, "tasks": values["tasks"][:-1]}))
    else:
        record.write_text(json.dumps({**json.loads(record.read_text()), "format": 2}))
    reason = {"missing": "holds no run", "no state": "is missing", "flipped": "digest differs"}
    with pytest.raises(RunError, match=reason.get(what, "format 1" if what == "later format" else "is damaged")):
        runs.load(directory)


def test_a_directory_in_use_is_refused(learned: Learned, tmp_path: Path) -> None:
    """Training never writes over anything."""
    with pytest.raises(RunError, match="already holds a run"):
        runs.check_free(learned.directory)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="is not a directory one can write to"):
        runs.check_free(tmp_path / "notes.txt" / "run")
    with pytest.raises(RunError, match="not an empty directory"):
        runs.check_free(tmp_path)
