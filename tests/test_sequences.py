from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from etcl_deploy.data.arrays import data_root
from etcl_deploy.data.femnist import femnist1
from etcl_deploy.data.mnist import pmnist
from etcl_deploy.data.sequences import load_sequence
from etcl_deploy.errors import ConfigError, DataError
from etcl_deploy.learn.directory import load
from etcl_deploy.preprocessing import Preprocessing
from etcl_deploy.settings import load_recipe, recipe_names
from etcl_deploy.train import train

GREY = Preprocessing(28, 28, 1, 0.5, 0.5)
real_data = pytest.mark.skipif(not os.environ.get("ETCL_DATA"), reason="ETCL_DATA names no folder of data sets")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Small files of the real ones' form."""
    chance = np.random.default_rng(0)

    def part(items: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
        return chance.integers(0, 256, (items, 28, 28)).astype(np.uint8), chance.integers(0, classes, items)

    parts: dict[str, np.ndarray] = {}
    for number in range(10):
        for kind, items in (("train", 30), ("test", 6)):
            parts[f"task{number:02d}_{kind}_x"], parts[f"task{number:02d}_{kind}_y"] = part(items, 62)
    np.savez_compressed(tmp_path / "femnist1.npz", **parts)
    train_x, train_y = part(40, 10)
    test_x, test_y = part(10, 10)
    np.savez_compressed(tmp_path / "mnist.npz", train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y)
    return tmp_path


def test_femnist1_has_ten_tasks_of_the_same_classes(made: Path) -> None:
    """Prepared as the preprocessing says, also at another size."""
    tasks = femnist1(GREY, made)
    assert len(tasks) == 10 and len({task.name for task in tasks}) == 10
    assert tasks[3].train_x.shape == (30, 28, 28, 1) and tasks[3].train_x.dtype == torch.uint8
    assert tasks[3].classes[10] == "A" and tasks[3].classes[61] == "z"
    assert femnist1(Preprocessing(32, 32, 3), made)[0].test_x.shape == (6, 32, 32, 3)


def test_pmnist_moves_the_pixels_and_nothing_else(made: Path) -> None:
    """Each task has its own order, the same for all its items and every time."""
    first, second = pmnist(GREY, made)[:2]
    assert torch.equal(first.train_x, pmnist(GREY, made)[0].train_x)
    assert not torch.equal(first.train_x, second.train_x)
    assert torch.equal(first.train_y, second.train_y)
    for one, other in zip(first.train_x, second.train_x, strict=True):
        assert torch.equal(one.flatten().sort().values, other.flatten().sort().values)


def test_a_file_without_its_arrays_is_refused(made: Path) -> None:
    """By the name of what is missing; what is pickled is not read."""
    np.savez(made / "mnist.npz", train_x=np.zeros(3))
    with pytest.raises(DataError, match="has no array 'train_y'; it holds: train_x"):
        pmnist(GREY, made)
    objects = dict.fromkeys(("train_x", "train_y", "test_x", "test_y"), np.array([{}], dtype=object))
    np.savez(made / "mnist.npz", **objects)
    with pytest.raises(DataError, match=r"is damaged or not a \.npz file"):
        pmnist(GREY, made)


def test_where_data_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is named, else $ETCL_DATA, else the cache."""
    monkeypatch.setenv("ETCL_DATA", "/data")
    assert data_root(Path("/named")) == Path("/named")
    assert data_root() == Path("/data")
    monkeypatch.delenv("ETCL_DATA")
    assert data_root() == Path.home() / ".cache" / "etcl_deploy"


def test_an_unknown_sequence_names_the_known_ones() -> None:
    """As every registry does."""
    with pytest.raises(ConfigError, match="unknown sequence 'mnist'; known: digits, femnist1, pmnist"):
        load_sequence("mnist", GREY, Path())


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_can_be_read(name: str) -> None:
    """And names its sequence."""
    assert load_recipe(name).sequence == name


@real_data
def test_the_real_femnist1_is_what_its_readme_says() -> None:
    """755 to 785 training and 84 to 88 test items a task, dark ink on white."""
    tasks = femnist1(GREY, data_root())
    assert {len(task.train_y) for task in tasks} <= set(range(755, 786))
    assert {len(task.test_y) for task in tasks} <= set(range(84, 89))
    assert all(float(task.train_x.float().mean()) > 128 for task in tasks)


@real_data
def test_real_tasks_that_are_similar_are_found_and_permuted_ones_are_not(tmp_path: Path) -> None:
    """Three samples of F-EMNIST-1, learned for a few epochs, and three permutations of MNIST."""
    quick = {"width": 10, "epochs": 4, "tasks": 3}
    run = train(load_recipe("femnist1").with_values(quick), None, tmp_path / "similar", "cpu", lambda event: None)
    assert run.knowledge["sample-02"].similar == ("sample-01",)
    assert set(run.knowledge["sample-03"].similar) == {"sample-01", "sample-02"}
    assert load(tmp_path / "similar").run.summary(load_recipe("femnist1"))["similar"]
    slow = {"tasks": 3, "epochs": 1, "batch_size": 100}
    run = train(load_recipe("pmnist").with_values(slow), None, tmp_path / "other", "cpu", lambda event: None)
    assert [known.similar for known in run.knowledge.values()] == [(), (), ()]
    assert run.matrix[-1][0] == run.matrix[0][0]
