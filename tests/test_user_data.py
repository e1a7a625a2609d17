from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from etcl_deploy.core.preprocessing import Preprocessing
from etcl_deploy.core.task import Task
from etcl_deploy.data.user_data import read_own
from etcl_deploy.errors import DataError


def draw(path: Path, shade: int, mode: str = "L", size: tuple[int, int] = (12, 9)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, shade if mode == "L" else (shade, 0, 0)).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two tasks: `a` without a split, `b` with one; formats, modes and sizes mixed."""
    for number in range(10):
        suffix = (".png", ".jpg", ".webp", ".bmp", ".JPEG")[number % 5]
        mode, size = ("RGB", (40, 20)) if number % 2 else ("L", (5, 7))
        draw(tmp_path / "a" / "dark" / f"{number}{suffix}", 10, mode, size)
        draw(tmp_path / "a" / "light" / f"{number}.png", 240)
    for part, count in (("train", 4), ("test", 2)):
        for name in ("x", "y", "z"):
            for number in range(count):
                draw(tmp_path / "b" / part / name / f"{number}.png", 100)
    return tmp_path


@dataclass(frozen=True)
class Loaded:
    tasks: list[Task]
    ignored: tuple[Path, ...]


def load(root: Path, seed: int = 0, limit: int | None = None) -> Loaded:
    own = read_own(root, 0.2, seed, limit)
    return Loaded([source.prepared(Preprocessing(8, 8, 3)) for source in own.tasks], own.ignored)


def test_folders_become_tasks_in_name_order(root: Path) -> None:
    """Classes by folder name; a fifth held back where there is no test part; the user's split where there is."""
    first, second = load(root).tasks
    assert (first.name, first.classes) == ("a", ("dark", "light"))
    assert (len(first.train_y), len(first.test_y)) == (16, 4)
    assert first.test_y.bincount().tolist() == [2, 2]
    assert (second.name, second.classes) == ("b", ("x", "y", "z"))
    assert (len(second.train_y), len(second.test_y)) == (12, 6)
    assert first.train_x.shape[1:] == (8, 8, 3)
    assert first.train_x.dtype == torch.uint8
    assert first.train_x[first.train_y == 1].min() > 200 > first.train_x[first.train_y == 0].max()


def test_the_split_is_seeded(root: Path) -> None:
    """The same seed holds back the same images."""
    for number in range(10):
        draw(root / "a" / "dark" / f"{number}.png", 20 * number)
    one, same, other = (load(root, seed).tasks[0].test_x for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_order_and_limit(root: Path) -> None:
    """tasks.toml decides the order; a limit takes the first."""
    (root / "tasks.toml").write_text('order = ["b", "a"]')
    assert [task.name for task in load(root).tasks] == ["b", "a"]
    assert [task.name for task in load(root, limit=1).tasks] == ["b"]


def test_other_files_are_left_out_and_counted(root: Path) -> None:
    """Notes, loose images, folders inside a class and dead links are told; hidden files are not even mentioned."""
    (root / "a" / "dark" / "notes.txt").write_text("x")
    (root / "a" / "dark" / ".DS_Store").write_text("x")
    (root / "a" / "dark" / "gone.png").symlink_to("nowhere.png")
    draw(root / "a" / "dark" / "more" / "1.png", 3)
    draw(root / "a" / "loose.png", 3)
    (root / "readme.md").write_text("x")
    loaded = load(root)
    assert sorted(path.name for path in loaded.ignored) == ["gone.png", "loose.png", "more", "notes.txt", "readme.md"]
    assert len(loaded.tasks) == 2


def test_a_class_may_be_called_train(root: Path) -> None:
    """Only a `train` that holds folders is part of a split."""
    for name in ("train", "plane"):
        draw(root / "c" / name / "0.png", 3)
        draw(root / "c" / name / "1.png", 3)
    assert load(root).tasks[2].classes == ("plane", "train")


ORDER = "tasks.toml"


@pytest.mark.parametrize(
    ("changes", "reason", "where"),
    [
        ({"a/light": None}, "one class", "a"),
        ({"a/light": None, "a/light/notes.txt": "x"}, "no readable image", "a/light"),
        ({"b/train/y/3.png": "no image"}, "mend or remove it", "b/train/y/3.png"),
        ({"A/dark/0.png": 3, "A/light/0.png": 3}, "have the same name: 'A' and 'a'", ""),
        ({ORDER: 'order = ["a", "b", "a"]'}, "two tasks have the same name", ORDER),
        ({ORDER: 'order = ["a", "c"]'}, "no such task; there are: a, b", ORDER),
        ({ORDER: 'order = ["a"]'}, "does not name the task 'b'", ORDER),
        ({ORDER: "order = "}, "should hold one line", ORDER),
        ({"c/0.png": 3}, "no class folder", "c"),
        ({"b/test/w/0.png": 3}, "class without training images", "b/test/w"),
        ({"b/val/x/0.png": 3}, "holds test, train, val; a task that is split holds test and train", "b"),
        ({"c/p/0.png": 3, "c/q/0.png": 3}, "task 'c' has no image to test with", ""),
    ],
)
def test_what_cannot_be_learned_is_refused_by_name(
    root: Path, changes: dict[str, int | str | None], reason: str, where: str
) -> None:
    """The message names the file or folder at fault. A change is a folder removed, a text written or an image drawn."""
    for name, content in changes.items():
        if content is None:
            shutil.rmtree(root / name)
        elif isinstance(content, str):
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text(content)
        else:
            draw(root / name, content)
    with pytest.raises(DataError, match=reason) as error:
        load(root)
    assert not where or str(root / where) in str(error.value)


def test_no_folder_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    """Both say what was expected."""
    with pytest.raises(DataError, match="no task folder; expected"):
        load(tmp_path)
    with pytest.raises(DataError, match="is not a directory"):
        load(tmp_path / "none")


def test_a_task_may_be_an_npz_file_or_come_from_a_csv(root: Path) -> None:
    """Folders, files and lines can stand side by side; each has a test part in the end."""
    pixels = np.random.default_rng(0).integers(0, 256, (20, 9, 9)).astype(np.uint8)
    np.savez(root / "c.npz", train_x=pixels, train_y=np.arange(20) % 2, classes=["no", "yes"])
    assert [(task.name, task.classes, len(task.test_y)) for task in load(root).tasks][2] == ("c", ("no", "yes"), 4)
    (root / "tasks.toml").write_text('order = ["c", "b", "a"]')
    assert [task.name for task in load(root).tasks] == ["c", "b", "a"]
    lines = [f"a/{kind}/{n}.png,{kind},mine" for kind in ("dark", "light") for n in (0, 5)]
    (root / "all.csv").write_text("\n".join(["path,label,task", *lines]))
    (task,) = load(root / "all.csv").tasks
    assert (task.name, task.classes, len(task.train_y), len(task.test_y)) == ("mine", ("dark", "light"), 2, 2)


def test_one_task_is_not_taken_for_two(root: Path) -> None:
    """A folder that holds train and test is a task, not its parts."""
    shutil.rmtree(root / "b")
    (root / "a").rename(root / "train")
    shutil.copytree(root / "train", root / "test")
    with pytest.raises(DataError, match="is one task, split; --data takes the folder it is in"):
        load(root)


def test_names_that_look_alike_are_one(root: Path) -> None:
    """However a file system stores an accent: the order finds it, two of a name are refused, and so is a broken one."""
    composed, apart = "caf\u00e9", "cafe\u0301"
    (root / "a").rename(root / apart)
    (root / "tasks.toml").write_text(f'order = ["{composed}", "b"]', "utf-8")
    assert load(root).tasks[0].name == composed
    shutil.copytree(root / apart, root / composed)
    with pytest.raises(DataError, match=r"two tasks in .* have the same name"):
        load(root)
    shutil.rmtree(root / composed)
    dark = root / apart / "dark"
    shutil.copytree(dark, root / apart / composed)
    shutil.copytree(dark, root / apart / apart)
    with pytest.raises(DataError, match="two class folders of the same name, 'caf\u00e9'"):
        load(root)
    shutil.rmtree(root / apart / apart)
    dark.rename(os.fsdecode(bytes(dark) + b"\xff"))
    with pytest.raises(DataError, match="a name that cannot be shown; rename it"):
        load(root)


def test_an_npz_beside_a_folder_of_its_name_is_refused(root: Path) -> None:
    """With an order or without."""
    np.savez(root / "a.npz", train_x=np.zeros((4, 8, 8), np.uint8), train_y=[0, 1, 0, 1])
    for order in ("", 'order = ["a", "b"]'):
        if order:
            (root / "tasks.toml").write_text(order)
        with pytest.raises(DataError, match=r"two tasks in .* have the same name: 'a' and 'a'"):
            load(root)
