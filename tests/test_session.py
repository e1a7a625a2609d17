"""Runs that are killed, interrupted, resumed, added to."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import ETCL
from factories import PHOTO_SETTINGS, same_tensors, stop_at
from PIL import Image

from etcl_deploy.config import Config
from etcl_deploy.errors import ConfigError, DataError, RunError
from etcl_deploy.learn.events import Event, Report, Resumed, SettingsChanged, StepDone, TaskDone, TaskStarted
from etcl_deploy.runs.logs import read_events
from etcl_deploy.runs.session import Session, add, resume, train
from etcl_deploy.runs.store import StoredRun, load_run
from etcl_deploy.settings import load_recipe

SMALL = ["--set", "width=4", "--set", "size=8", "--tasks", "3", "--epochs", "2", "--device", "cpu"]
KILLS = 3
CPU = Session("cpu")


def etcl(*words: object) -> subprocess.Popen[str]:
    return subprocess.Popen([ETCL, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    """The output of a command that must succeed."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def wait_for(path: Path, pattern: str, but: frozenset[Path] = frozenset()) -> None:
    """Wait until a file like that is there, other than those in `but`."""
    for _ in range(6000):
        if path.is_dir() and set(path.glob(pattern)) - but:
            return
        time.sleep(0.01)
    raise AssertionError(f"no new {pattern} in {path}")


def test_killed_at_random_moments_it_ends_with_the_same_digest(tmp_path: Path) -> None:
    """After kill -9 and --resume, several times, every bit is that of a run nobody disturbed."""
    finish(etcl("train", "digits", "--run", tmp_path / "whole", *SMALL))
    whole = load_run(tmp_path / "whole")
    run, chance = tmp_path / "run", random.Random(0)
    process = etcl("train", "digits", "--run", run, *SMALL, "--set", "checkpoint_seconds=0")
    before: frozenset[Path] = frozenset()
    for _ in range(KILLS):
        wait_for(run, "checkpoint-*", before)  # it learns
        time.sleep(chance.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        before = frozenset(run.glob("checkpoint-*"))
        process = etcl("train", "--run", run, "--resume")
    finish(process)
    again = load_run(run)
    assert again.digest == whole.digest
    assert again.run.matrix == whole.run.matrix
    assert not list(run.glob("checkpoint-*")) and not list(run.rglob(".*.safetensors"))
    assert "Resumed" in [event["event"] for event in read_events(run)]


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    """The first one stops after the step at hand; what it says works."""
    run = tmp_path / "my run"
    process = etcl("train", "digits", "--run", run, *SMALL)
    wait_for(run, "events.jsonl")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert out == ""
    assert f"go on with: etcl train --run '{run}' --resume" in err.replace("\n", "")
    assert "Traceback" not in err
    assert len(list(run.glob("checkpoint-*"))) == 1
    summary = json.loads(finish(etcl("train", "--run", run, "--resume", "--json")))
    assert len(summary["tasks"]) == 3
    assert finish(etcl("eval", run))


@pytest.mark.parametrize(
    ("recipe", "code", "message"), [([], 1, "holds no run"), (["digits"], 2, "goes on with the run's own recipe")]
)
def test_resume_is_careful(tmp_path: Path, recipe: list[str], code: int, message: str) -> None:
    """There must be a run, and it has a recipe already; asking leaves nothing behind."""
    process = etcl("train", *recipe, "--run", tmp_path, "--resume")
    _, err = process.communicate(timeout=60)
    assert (process.returncode, message in " ".join(err.split())) == (code, True), err
    assert not list(tmp_path.iterdir())


def learn(photos: Path, run: Path, report: Report = lambda event: None, **values: object) -> StoredRun:
    """Learn the photos, with some settings of one's own."""
    config = Config().with_values({**PHOTO_SETTINGS, **values})
    return train(config, run, data=photos, session=Session("cpu", report=report))


def interrupt(photos: Path, run: Path, report: Report | None = None, **values: object) -> Path:
    """A run that was left in the middle of its second task, or at another event."""
    with pytest.raises(KeyboardInterrupt):
        learn(photos, run, report or stop_at(StepDone, "b"), checkpoint_seconds=0, **values)
    return run


def changes_told(run: Path) -> list[dict[str, object]]:
    """The changes of settings that the log tells."""
    return [event["values"] for event in read_events(run) if event["event"] == "SettingsChanged"]


def moved(task: Path, folder: Path) -> Path:
    """The folder, with a task in it that was taken from another."""
    folder.mkdir(exist_ok=True)
    shutil.move(task, folder / task.name)
    return folder


def test_a_task_added_later_is_the_task_learned_at_once(photos: Path, tmp_path: Path) -> None:
    """Learning a, b and adding c from another folder gives the bytes of learning a, b, c; old data may be gone."""
    whole = learn(photos, tmp_path / "whole")
    later = moved(photos / "c", tmp_path / "later")
    learn(photos, tmp_path / "run")
    run = add(tmp_path / "run", later, session=CPU)
    assert run.digest == whole.digest == load_run(tmp_path / "run").digest
    assert run.run.matrix == whole.run.matrix

    shutil.rmtree(photos)
    (later / "c").rename(later / "d")
    notes: list[str] = []
    added = add(tmp_path / "run", later, session=Session("cpu", note=notes.append)).run
    assert added.tasks == ("a", "b", "c", "d")
    assert any("carried over" in note for note in notes)
    changed = {change.task for change in added.records["d"].changes if change.kept}
    for name, value, old in zip("abc", added.matrix[-1], added.matrix[-2], strict=False):
        assert value == (None if name in changed else old)
    assert load_run(tmp_path / "run").run.matrix == added.matrix


def test_tasks_can_be_added_with_other_settings(photos: Path, tmp_path: Path) -> None:
    """They hold from then on and are reported; here no head of an earlier task may change."""
    run = tmp_path / "run"
    learn(photos, run)
    heard: list[Event] = []
    more = tmp_path / "more"
    shutil.copytree(photos / "a", more / "again")
    stored = add(run, more, {"backward": "off"}, session=Session("cpu", heard.append))
    assert stored.config.learning.transfer.backward == "off"
    assert [event.values for event in heard if isinstance(event, SettingsChanged)] == [{"backward": "off"}]
    assert stored.run.records["again"].changes == ()


def test_what_cannot_be_added_changes_nothing(photos: Path, tmp_path: Path) -> None:
    """A task the run already has; a run that is not there; data that is no folder."""
    before = learn(photos, tmp_path / "run", tasks=1).digest
    with pytest.raises(DataError, match="task 'a' is there twice"):
        add(tmp_path / "run", photos, session=CPU)
    with pytest.raises(DataError, match="is not a directory"):
        add(tmp_path / "run", tmp_path / "nothing", session=CPU)
    with pytest.raises(RunError, match="holds no run"):
        add(tmp_path / "other", photos, session=CPU)
    assert load_run(tmp_path / "run").digest == before


def test_data_that_changed_since_is_refused(photos: Path, tmp_path: Path) -> None:
    """A run never goes on with other items than it began with."""
    run = interrupt(photos, tmp_path / "run", stop_at(TaskDone))
    Image.new("L", (12, 12)).save(photos / "b" / "class-0" / "3.png")
    with pytest.raises(DataError, match="task 'b' has other items than the run began with"):
        resume(run, session=CPU)


def test_a_task_that_is_gone_or_moved_is_not_skipped(photos: Path, tmp_path: Path) -> None:
    """Those that are waiting are learned in the order the run began with, or not at all."""
    (photos / "tasks.toml").write_text('order = ["c", "a", "b"]')
    run = interrupt(photos, tmp_path / "run", stop_at(TaskDone))
    elsewhere = moved(photos / "a", tmp_path / "elsewhere")
    (photos / "tasks.toml").unlink()
    with pytest.raises(DataError, match="task 'a' is no longer there"):
        resume(run, session=CPU)
    moved(elsewhere / "a", photos)
    assert resume(run, session=CPU).run.tasks == ("c", "a", "b")


def test_data_of_finished_tasks_may_be_gone(photos: Path, tmp_path: Path) -> None:
    """Only what is still to be learned is needed; the rest is said, and its accuracy carried over."""
    interrupt(photos, tmp_path / "run", backward="off")
    shutil.rmtree(photos / "a")
    notes: list[str] = []
    run = resume(tmp_path / "run", session=Session("cpu", note=notes.append)).run
    assert run.tasks == ("a", "b", "c")
    assert [row[0] for row in run.matrix] == [run.matrix[0][0]] * 3
    assert notes == ["task 'a' is no longer there. Its accuracy is carried over where it cannot have changed"]


def test_a_run_goes_on_with_other_settings(photos: Path, tmp_path: Path) -> None:
    """The task under way starts anew with them; finished ones are as they were."""
    run = interrupt(photos, tmp_path / "run")
    masks = load_run(run).run.network.finished["a"].masks
    values = {"epochs": 1, "learning_rate": 0.001, "backward": "off"}
    config = resume(run, values, session=CPU).config
    stored = load_run(run)
    assert (config.learning.epochs, stored.config) == (1, config)
    assert same_tensors(stored.run.network.finished["a"].masks, masks)
    assert [event["epochs"] for event in read_events(run) if event["event"] == "EpochDone"] == [2, 2, 1, 1]
    assert changes_told(run) == [values]


def test_settings_that_do_not_touch_the_task_under_way_do_not_cost_it(photos: Path, tmp_path: Path) -> None:
    """Fewer tasks, or a setting as it was: the task goes on where it was left."""
    run = interrupt(photos, tmp_path / "run")
    heard: list[Event] = []
    values = {"tasks": 2, "epochs": PHOTO_SETTINGS["epochs"]}
    resume(run, values, session=Session("cpu", report=heard.append))
    assert any(isinstance(event, Resumed) and event.task == "b" for event in heard)
    assert SettingsChanged({"tasks": 2}) in heard
    assert changes_told(run) == [{"tasks": 2}]


def test_a_task_that_cannot_be_learned_does_not_block_the_run(photos: Path, tmp_path: Path) -> None:
    """`--tasks` with what was learned leaves out the rest; then other tasks can be added, even one of the same name."""
    run = interrupt(photos, tmp_path / "run")
    other = tmp_path / "other"
    shutil.copytree(photos / "c", other / "b")
    with pytest.raises(RunError, match=r"not learned 'b' yet; first: .* --resume \(with --tasks 1 to leave it out\)"):
        add(run, other, session=CPU)
    for wanted in (0, 4):
        with pytest.raises((RunError, ConfigError)):
            resume(run, {"tasks": wanted}, session=CPU)
    resume(run, {"tasks": 1}, session=CPU)
    added = add(run, other, session=CPU)
    assert (added.run.tasks, added.waiting) == (("a", "b"), [])


def test_the_number_of_tasks_a_run_began_with_leaves_out_what_was_added(photos: Path, tmp_path: Path) -> None:
    """`--resume --tasks 1` means one task, also where the run began with one."""
    run, other = tmp_path / "run", moved(photos / "c", tmp_path / "other")
    learn(photos, run, tasks=1)
    with pytest.raises(KeyboardInterrupt):
        add(run, other, session=Session("cpu", report=stop_at(TaskStarted)))
    assert load_run(run).waiting == ["c"]
    stored = resume(run, {"tasks": 1}, session=CPU)
    assert (stored.run.tasks, stored.waiting) == (("a",), [])


@pytest.mark.parametrize(
    "values",
    [{"method": "one"}, {"density": 0.3}, {"seed": 5}, {"size": 16}, {"distance": "euclidean"}, {"weights": "x"}],
)
def test_what_a_run_is_built_on_cannot_change(photos: Path, tmp_path: Path, values: dict[str, object]) -> None:
    """Masks, items and records of tasks would no longer fit; a refusal costs the run nothing."""
    run = interrupt(photos, tmp_path / "run")
    message = "only --tasks, checkpoint_seconds, memory_gb and how a task is learned can change, not the method"
    with pytest.raises(RunError, match=message):
        resume(run, values, session=CPU)
    shutil.rmtree(photos / "b")
    with pytest.raises(DataError, match="task 'b' is no longer there"):
        resume(run, {"epochs": 1}, session=CPU)
    assert list(run.glob("checkpoint-*"))


def test_a_run_keeps_its_preset(tmp_path: Path) -> None:
    """Going on needs not name it, may name it, and cannot change it; other settings still can."""
    small = {"backbone": "fcn3", "width": 4, "size": 8, "epochs": 1, "tasks": 2}
    config, run = load_recipe("digits", preset="paper").with_values(small), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(config, run, session=Session("cpu", report=stop_at(TaskDone)))
    assert load_run(run).config.preset == "paper"
    for values in ({"preset": "authors"}, {"preset": None}):
        with pytest.raises(RunError, match="not the method or the preset"):
            resume(run, values, session=CPU)
    stored = resume(run, {"preset": "paper", "learning_rate": 0.02}, session=CPU)
    assert stored.config == config.with_values({"learning_rate": 0.02}) and len(stored.run.tasks) == 2


def test_files_that_only_look_like_ours_are_left_alone(photos: Path, tmp_path: Path) -> None:
    """A directory with somebody's weights in it is not empty."""
    (tmp_path / "run").mkdir()
    mine = tmp_path / "run" / "backbone-imagenet.safetensors"
    mine.write_bytes(b"precious")
    with pytest.raises(RunError, match="not an empty directory"):
        learn(photos, tmp_path / "run")
    assert mine.read_bytes() == b"precious"


def test_what_a_killed_start_left_is_no_obstacle(photos: Path, tmp_path: Path) -> None:
    """A lock and half-written files of a process that never got far."""
    (tmp_path / "run").mkdir()
    half = "backbone-0123456789abcdef"
    for name in (".lock", ".run.abc123.json", f".{half}.x1.safetensors", f"{half}.safetensors"):
        (tmp_path / "run" / name).write_bytes(b"")
    learn(photos, tmp_path / "run", tasks=1)
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")) == [".lock"]


@pytest.mark.parametrize(("recipe", "file"), [("femnist1", "femnist1.npz"), ("pmnist", "mnist.npz")])
def test_a_recipe_says_where_its_data_should_be(tmp_path: Path, recipe: str, file: str) -> None:
    """Named by file and folder, before anything is written."""
    session = Session("cpu", data_root=tmp_path)
    with pytest.raises(DataError, match=f"is neither in .*{file}.*--data-root DIR or ETCL_DATA=DIR"):
        train(load_recipe(recipe), tmp_path / "run", session=session)
    (tmp_path / file).write_bytes(b"PK nothing")
    with pytest.raises(DataError, match=rf"{file} is damaged or not a \.npz file"):
        train(load_recipe(recipe), tmp_path / "run", session=session)
    assert not (tmp_path / "run").exists()
