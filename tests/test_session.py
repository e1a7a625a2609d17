"""Runs that survive: killed, interrupted, resumed, added to."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from conftest import ETCL
from PIL import Image

from etcl_deploy.config import Config
from etcl_deploy.errors import ConfigError, DataError, RunError
from etcl_deploy.learn.events import Event, Resumed, SettingsChanged
from etcl_deploy.runs.session import Session, add, resume, train
from etcl_deploy.runs.store import load_run
from etcl_deploy.settings import load_recipe

SMALL = ["--set", "width=4", "--set", "size=8", "--tasks", "3", "--epochs", "2", "--device", "cpu"]
KILLS = 3  # the benchmark kill_resume.py does fifty


def etcl(*words: object) -> subprocess.Popen[str]:
    return subprocess.Popen([ETCL, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    """What a command printed, once it ended well."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def wait_for(path: Path, pattern: str, but: frozenset[Path] = frozenset()) -> None:
    """Until a file like that is there, other than those in `but`."""
    for _ in range(6000):
        if path.is_dir() and set(path.glob(pattern)) - but:
            return
        time.sleep(0.01)
    raise AssertionError(f"no new {pattern} in {path}")


def test_killed_at_random_moments_it_ends_with_the_same_digest(tmp_path: Path) -> None:
    """kill -9 while it learns, resume, kill -9, ...: every bit is that of a run nobody disturbed."""
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
    log = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in log].count("Resumed") >= 1


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


def test_resume_is_careful(tmp_path: Path) -> None:
    """There must be a run, and it has a recipe already."""
    for words, code, message in (
        (["--run", tmp_path / "none", "--resume"], 1, "holds no run"),
        (["digits", "--run", tmp_path / "none", "--resume"], 2, "goes on with the run's own recipe"),
    ):
        process = etcl("train", *words)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, message in " ".join(err.split())) == (code, True), err
    assert not (tmp_path / "none").exists()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three tasks of noisy stripes, the first two of a kind."""
    generator = torch.Generator().manual_seed(0)
    for task, turned in (("a", False), ("b", False), ("c", True)):
        for number in range(20):
            for label in range(2):
                pixels = torch.randint(0, 60, (12, 12), generator=generator)
                pixels[label * 6 : label * 6 + 6] += 150
                drawn = (pixels.T if turned else pixels).contiguous().to(torch.uint8)
                path = tmp_path / "photos" / task / f"class-{label}" / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(drawn.numpy()).save(path)
    return tmp_path / "photos"


def settings() -> dict[str, object]:
    return {"width": 4, "size": 12, "channels": 1, "epochs": 2, "batch_size": 8, "similar": "all"}


def test_a_task_added_later_is_the_task_learned_at_once(photos: Path, tmp_path: Path) -> None:
    """Learning a, b and adding c from another folder gives the bytes of learning a, b, c; old data may be gone."""
    config = Config().with_values(settings())
    train(config, tmp_path / "whole", data=photos, session=Session("cpu"))
    later = tmp_path / "later"
    later.mkdir()
    shutil.move(photos / "c", later / "c")
    train(config, tmp_path / "run", data=photos, session=Session("cpu"))
    add(tmp_path / "run", later, session=Session("cpu"))
    whole, run = load_run(tmp_path / "whole"), load_run(tmp_path / "run")
    assert run.digest == whole.digest
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


def test_what_cannot_be_added_changes_nothing(photos: Path, tmp_path: Path) -> None:
    """A task the run already has; a run that is not there; data that is no folder."""
    train(Config().with_values({**settings(), "tasks": 1}), tmp_path / "run", data=photos, session=Session("cpu"))
    before = load_run(tmp_path / "run").digest
    with pytest.raises(DataError, match="task 'a' is there twice"):
        add(tmp_path / "run", photos, session=Session("cpu"))
    with pytest.raises(DataError, match="is not a directory"):
        add(tmp_path / "run", tmp_path / "nothing", session=Session("cpu"))
    with pytest.raises(RunError, match="holds no run"):
        add(tmp_path / "other", photos, session=Session("cpu"))
    assert load_run(tmp_path / "run").digest == before


def test_data_that_changed_since_is_refused(photos: Path, tmp_path: Path) -> None:
    """A run never goes on with other items than it began with."""

    def stop(event: object) -> None:
        if type(event).__name__ == "TaskDone":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(Config().with_values(settings()), tmp_path / "run", data=photos, session=Session("cpu", report=stop))
    Image.new("L", (12, 12)).save(photos / "b" / "class-0" / "3.png")
    with pytest.raises(DataError, match="task 'b' has other items than the run began with"):
        resume(tmp_path / "run", session=Session("cpu"))


def interrupted(photos: Path, run: Path, learned: int, values: Mapping[str, object] | None = None) -> None:
    """A run that was left in the middle of a task."""
    count = 0

    def stop(event: object) -> None:
        nonlocal count
        count += type(event).__name__ == "TaskDone"
        if count == learned and type(event).__name__ == "StepDone":
            raise KeyboardInterrupt

    config = Config().with_values({**settings(), "checkpoint_seconds": 0, **(values or {})})
    with pytest.raises(KeyboardInterrupt):
        train(config, run, data=photos, session=Session("cpu", report=stop))
    assert list(run.glob("checkpoint-*"))


def test_data_of_finished_tasks_may_be_gone(photos: Path, tmp_path: Path) -> None:
    """Only what is still to be learned is needed; the rest is said, and its accuracy carried over."""
    interrupted(photos, tmp_path / "run", 1, {"backward": "off"})
    shutil.rmtree(photos / "a")
    notes: list[str] = []
    run = resume(tmp_path / "run", session=Session("cpu", note=notes.append)).run
    assert run.tasks == ("a", "b", "c")
    assert [row[0] for row in run.matrix] == [run.matrix[0][0]] * 3
    assert notes == ["task 'a' is no longer there. Its accuracy is carried over where it cannot have changed"]


def test_a_run_goes_on_with_other_settings(photos: Path, tmp_path: Path) -> None:
    """The task under way starts anew with them; finished ones are as they were."""
    run = tmp_path / "run"
    interrupted(photos, run, 1)
    first = load_run(run).run.network.finished["a"].masks
    config = resume(run, {"epochs": 1, "learning_rate": 0.001, "backward": "off"}, session=Session("cpu")).config
    assert (config.learning.epochs, load_run(run).config) == (1, config)
    for name, mask in load_run(run).run.network.finished["a"].masks.items():
        assert torch.equal(mask, first[name])
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["epochs"] for event in events if event["event"] == "EpochDone"] == [2, 2, 1, 1]
    told = [event["values"] for event in events if event["event"] == "SettingsChanged"]
    assert told == [{"epochs": 1, "learning_rate": 0.001, "backward": "off"}]


def test_a_run_does_not_change_its_method(photos: Path, tmp_path: Path) -> None:
    """What one method left is not what another needs; the run goes on as if nothing had been asked."""
    run = tmp_path / "run"
    interrupted(photos, run, 1)
    with pytest.raises(RunError, match="can change, not the method"):
        resume(run, {"method": "one"}, session=Session("cpu"))
    assert resume(run, session=Session("cpu")).config.learning.method == "etcl"


def test_settings_that_do_not_touch_the_task_under_way_do_not_cost_it(photos: Path, tmp_path: Path) -> None:
    """Fewer tasks, or a setting as it was: the task goes on where it was left."""
    run = tmp_path / "run"
    interrupted(photos, run, 1)
    heard: list[Event] = []
    resume(
        run, {"tasks": 2, "epochs": load_run(run).config.learning.epochs}, session=Session("cpu", report=heard.append)
    )
    assert any(isinstance(event, Resumed) and event.task == "b" for event in heard)
    assert SettingsChanged({"tasks": 2}) in heard
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["values"] for event in events if event["event"] == "SettingsChanged"] == [{"tasks": 2}]


def test_a_task_that_cannot_be_learned_does_not_block_the_run(photos: Path, tmp_path: Path) -> None:
    """`--tasks` with what was learned leaves out the rest; then other tasks can be added, even one of the same name."""
    run, other = tmp_path / "run", tmp_path / "other"
    interrupted(photos, run, 1)
    other.mkdir()
    shutil.copytree(photos / "c", other / "b")
    with pytest.raises(
        RunError, match=r"has not learned 'b' yet; first: .* --resume \(with --tasks 1 to leave it out\)"
    ):
        add(run, other, session=Session("cpu"))
    for wanted in (0, 4):
        with pytest.raises((RunError, ConfigError)):
            resume(run, {"tasks": wanted}, session=Session("cpu"))
    resume(run, {"tasks": 1}, session=Session("cpu"))
    added = add(run, other, session=Session("cpu")).run
    assert (added.tasks, load_run(run).waiting) == (("a", "b"), [])


def test_the_number_of_tasks_a_run_began_with_leaves_out_what_was_added(photos: Path, tmp_path: Path) -> None:
    """Whatever --tasks was at first, `--resume --tasks 1` means one task."""

    def stop(event: object) -> None:
        raise KeyboardInterrupt

    run, other = tmp_path / "run", tmp_path / "other"
    train(Config().with_values({**settings(), "tasks": 1}), run, data=photos, session=Session("cpu"))
    other.mkdir()
    shutil.move(photos / "c", other / "c")
    with pytest.raises(KeyboardInterrupt):
        add(run, other, session=Session("cpu", report=stop))
    assert load_run(run).waiting == ["c"]
    resume(run, {"tasks": 1}, session=Session("cpu"))
    assert (load_run(run).run.tasks, load_run(run).waiting) == (("a",), [])


@pytest.mark.parametrize(
    "values", [{"density": 0.3}, {"seed": 5}, {"size": 16}, {"distance": "euclidean"}, {"weights": "x"}]
)
def test_what_a_run_is_built_on_cannot_change(photos: Path, tmp_path: Path, values: dict[str, object]) -> None:
    """Masks, items and what is kept of tasks would no longer fit; and nothing is lost by asking."""
    interrupted(photos, tmp_path / "run", 1)
    with pytest.raises(
        RunError, match="only --tasks, checkpoint_seconds, memory_gb and how a task is learned can change"
    ):
        resume(tmp_path / "run", values, session=Session("cpu"))
    shutil.rmtree(photos / "b")
    with pytest.raises(DataError, match="task 'b' is no longer there"):
        resume(tmp_path / "run", {"epochs": 1}, session=Session("cpu"))
    assert list((tmp_path / "run").glob("checkpoint-*"))


def test_a_folder_that_is_no_run_stays_as_it_is(tmp_path: Path) -> None:
    """Asking for what is not there leaves nothing behind."""
    with pytest.raises(RunError, match="holds no run"):
        resume(tmp_path, session=Session("cpu"))
    assert not list(tmp_path.iterdir())


def test_a_task_that_is_gone_or_moved_is_not_skipped(photos: Path, tmp_path: Path) -> None:
    """Those that are waiting are learned in the order the run began with, or not at all."""

    def stop(event: object) -> None:
        if type(event).__name__ == "TaskDone":
            raise KeyboardInterrupt

    (photos / "tasks.toml").write_text('order = ["c", "a", "b"]')
    with pytest.raises(KeyboardInterrupt):
        train(Config().with_values(settings()), tmp_path / "run", data=photos, session=Session("cpu", report=stop))
    (photos / "a").rename(tmp_path / "elsewhere")
    (photos / "tasks.toml").unlink()
    with pytest.raises(DataError, match="task 'a' is no longer there"):
        resume(tmp_path / "run", session=Session("cpu"))
    (tmp_path / "elsewhere").rename(photos / "a")
    run = resume(tmp_path / "run", session=Session("cpu")).run
    assert run.tasks == ("c", "a", "b")


def test_files_that_only_look_like_ours_are_left_alone(photos: Path, tmp_path: Path) -> None:
    """A directory with somebody's weights in it is not empty."""
    (tmp_path / "run").mkdir()
    mine = tmp_path / "run" / "backbone-imagenet.safetensors"
    mine.write_bytes(b"precious")
    with pytest.raises(RunError, match="not an empty directory"):
        train(Config().with_values(settings()), tmp_path / "run", data=photos, session=Session("cpu"))
    assert mine.read_bytes() == b"precious"


def test_what_a_killed_start_left_is_no_obstacle(photos: Path, tmp_path: Path) -> None:
    """A lock and half-written files of a process that never got far."""
    (tmp_path / "run").mkdir()
    half = "backbone-0123456789abcdef"
    for name in (".lock", ".run.abc123.json", f".{half}.x1.safetensors", f"{half}.safetensors"):
        (tmp_path / "run" / name).write_bytes(b"")
    train(Config().with_values({**settings(), "tasks": 1}), tmp_path / "run", data=photos, session=Session("cpu"))
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".")) == [".lock"]


def test_a_recipe_says_where_its_data_should_be(tmp_path: Path) -> None:
    """Named by file and folder, before anything is written."""
    for recipe, file in (("femnist1", "femnist1.npz"), ("pmnist", "mnist.npz")):
        with pytest.raises(DataError, match=f"is neither in .*{file}.*--data-root DIR or ETCL_DATA=DIR"):
            train(load_recipe(recipe), tmp_path / "run", session=Session("cpu", data_root=tmp_path))
        (tmp_path / file).write_bytes(b"PK nothing")
        with pytest.raises(DataError, match=rf"{file} is damaged or not a \.npz file"):
            train(load_recipe(recipe), tmp_path / "run", session=Session("cpu", data_root=tmp_path))
    assert not (tmp_path / "run").exists()
