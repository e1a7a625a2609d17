"""Sequences from tables, and the data sets behind them."""

from __future__ import annotations

import gzip
import os
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_readers import write_cifar, write_idx, write_leaf

from etcl_deploy.config import Config
from etcl_deploy.data.catalog import DATA_SETS, IDX_NAMES
from etcl_deploy.data.inventory import check_recipe, data_root, list_recipes, place_of, read_data_set
from etcl_deploy.data.sequences import sequence_of
from etcl_deploy.data.source import Part, Source
from etcl_deploy.errors import ConfigError, DataError, EtclError
from etcl_deploy.runs.session import Session, train
from etcl_deploy.runs.store import load_run
from etcl_deploy.runs.task_loading import find_tasks
from etcl_deploy.settings import load_recipe, recipe_names

real_data = pytest.mark.skipif(not os.environ.get("ETCL_DATA"), reason="ETCL_DATA names no folder of data sets")
CHANCE = np.random.default_rng(0)
ROOM = {"mnist": 40, "letters": 60, "people": 30}


def find(name: str) -> Source:
    """Made-up data sets: ten classes in two groups, items that know their owner."""
    count = ROOM[name]
    labels = np.arange(count) % 10
    owners = np.array([f"p{n // 6}" for n in range(count)])
    part = Part(np.random.default_rng(count).integers(0, 256, (count, 6, 6)).astype(np.uint8), labels, owners)
    groups = tuple("even" if n % 2 == 0 else "odd" for n in range(10))
    return Source(name, tuple("abcdefghij"), part, part.take(np.arange(count // 2)), groups)


def make(table: Any, limit: int | None = None) -> list[Source]:
    return list(islice(sequence_of(table).make(find), limit))


def test_permute_moves_the_pixels_and_nothing_else() -> None:
    """Each task has its own order, the same for all its items and every time."""
    first, second = make({"permute": "mnist", "tasks": 2})
    again = make({"permute": "mnist", "tasks": 5}, 1)[0]
    assert [first.name, second.name] == ["permutation-01", "permutation-02"]
    one, other = np.asarray(first.train.images), np.asarray(second.train.images)
    assert np.array_equal(one, np.asarray(again.train.images)) and not np.array_equal(one, other)
    assert np.array_equal(first.train.labels, second.train.labels)
    assert np.array_equal(np.sort(one.reshape(40, -1)), np.sort(other.reshape(40, -1)))
    pixels = np.asarray(find("mnist").train.images).reshape(40, -1)
    columns = {tuple(column): place for place, column in enumerate(pixels.T)}
    order = [columns[tuple(column)] for column in one.reshape(40, -1).T]  # no two pixels are alike in all 40 items
    assert sorted(order) == list(range(36)) and order != sorted(order)
    assert np.array_equal(np.asarray(first.test.images).reshape(20, -1), pixels[:20, order])


def test_split_shares_out_the_classes() -> None:
    """Every class in one task, numbered anew there; by superclass if asked."""
    tasks = make({"split": "letters", "tasks": 3})
    assert sorted(name for task in tasks for name in task.classes) == list("abcdefghij")
    assert [len(task.classes) for task in tasks] == [4, 3, 3]
    for task in tasks:
        for part in (task.train, task.test):
            assert set(part.labels.tolist()) == set(range(len(task.classes)))
        letter = find("letters")
        first = letter.classes.index(task.classes[0])
        expected = np.asarray(letter.train.images)[letter.train.labels == first]
        assert np.array_equal(np.asarray(task.train.images)[task.train.labels == 0], expected)
    assert make({"split": "letters", "tasks": 3, "seed": 1})[0].classes != tasks[0].classes
    even, odd = make({"split": "letters", "by": "superclass"})
    assert (even.name, even.classes, odd.classes) == ("even", tuple("acegi"), tuple("bdfhj"))


def test_owners_have_a_task_each() -> None:
    """As many as are asked for, drawn at random; all classes in each, so that heads mean the same."""
    everyone = make({"owners": "people"})
    assert [task.name for task in everyone] == ["p0", "p1", "p2"]  # the others have no test items
    assert {len(task.train) for task in everyone} == {6} and {len(task.classes) for task in everyone} == {10}
    two = [task.name for task in make({"owners": "people", "tasks": 2})]
    assert len(set(two)) == 2 and set(two) < {"p0", "p1", "p2"}
    assert two == [task.name for task in make({"owners": "people", "tasks": 2})]
    assert len(make({"owners": "people", "tasks": 4})) == 3


def test_each_and_mix() -> None:
    """Whole data sets; several tables shuffled, the same way every time."""
    assert [task.name for task in make({"each": ["people", "mnist"]})] == ["people", "mnist"]
    table = {"mix": [{"split": "letters", "tasks": 4}, {"permute": "mnist", "tasks": 4}, {"each": ["people"]}]}
    names = [task.name for task in make(table)]
    assert len(set(names)) == 9 and names != sorted(names)
    assert {"letters-classes-01", "mnist-permutation-04", "people"} < set(names)
    assert names == [task.name for task in make(table)]
    assert names[:3] == [task.name for task in make(table, 3)]
    assert names != [task.name for task in make({**table, "seed": 1})]
    assert sequence_of(table).data == ("letters", "mnist", "people")
    twice = {"mix": [{"split": "letters", "tasks": 2}, {"split": "letters", "tasks": 2, "seed": 1}]}
    nested = {"mix": [twice, {"each": ["people"]}]}
    names = ["letters-classes-01", "letters-classes-01-2", "letters-classes-02", "letters-classes-02-2", "people"]
    assert sorted(task.name for task in make(nested)) == names


def test_tasks_can_be_made_smaller() -> None:
    """Items are drawn at random, other ones for every task."""
    first, second = make({"permute": "mnist", "tasks": 2, "items": 7, "test_items": 3})
    assert (len(first.train), len(first.test)) == (7, 3)
    assert first.train.labels.tolist() != second.train.labels.tolist()


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("mnist", "unknown sequence 'mnist'; a table such as"),
        (None, "a sequence is a table with one of permute, split, owners, each, mix, not None"),
        ({}, "a sequence is a table with one of"),
        ({"permute": "mnist", "split": "mnist"}, "a sequence is a table with one of"),
        ({"permute": "mnist", "task": 3}, "unknown key 'task' in a sequence that has permute; known: seed, items"),
        ({"permute": "mnist", "tasks": 0}, "tasks must be at least 1, not 0"),
        ({"permute": 3}, "permute must be str, not 3"),
        ({"each": "mnist"}, "each must be a list of names of data sets, not 'mnist'"),
        ({"each": [["mnist"]]}, "each must be a list of names of data sets"),
        ({"each": []}, "each must be a list of names of data sets"),
        ({"mix": [{"permute": "mnist"}, 3]}, "mix must be a list of sequences"),
        ({"mix": [{"permute": "mnist"}, {}]}, "a sequence is a table with one of"),
        ({"split": "letters", "by": "superclass", "tasks": 3}, "letters has 2 superclasses, not 3"),
        ({"split": "letters", "by": "colour"}, "by must be one of class, superclass"),
        ({"split": "letters", "tasks": 6}, "10 classes of letters make at most 5 tasks, not 6"),
    ],
)
def test_a_wrong_table_is_refused(table: Any, words: str) -> None:
    """With what would be right."""
    with pytest.raises(EtclError, match=words):
        make(table)


def test_what_a_data_set_lacks_is_said() -> None:
    """Superclasses, owners."""

    def bare(name: str) -> Source:
        source = find(name)
        part = Part(source.train.images, source.train.labels)
        return Source(name, source.classes, part, part)

    with pytest.raises(ConfigError, match="letters has no superclasses"):
        list(sequence_of({"split": "letters", "by": "superclass"}).make(bare))
    with pytest.raises(ConfigError, match="people does not say whose its items are"):
        list(sequence_of({"owners": "people"}).make(bare))


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """Small files in the form of the makers' own."""
    for name in ("mnist", "fashion_mnist"):
        (tmp_path / name).mkdir()
        for file in IDX_NAMES:
            shape = (20, 28, 28) if "images" in file else (20,)
            values = CHANCE.integers(0, 256, shape) if "images" in file else np.arange(20) % 10
            write_idx(tmp_path / name / file, values)
    (tmp_path / "emnist" / "gzip").mkdir(parents=True)
    for part in ("train", "test"):
        pixels = np.tile(np.arange(28), (47, 28, 1))  # dark on the left, as it is stored
        write_idx(tmp_path / f"emnist/gzip/emnist-balanced-{part}-images-idx3-ubyte.gz", pixels)
        write_idx(tmp_path / f"emnist/gzip/emnist-balanced-{part}-labels-idx1-ubyte.gz", np.arange(47))
    (tmp_path / "cifar100").mkdir()
    write_cifar(tmp_path / "cifar100" / "cifar-100-binary")
    for part in ("train", "test"):
        users = {f"w{n}": ([[0.5] * 784] * 4, [0, 1, 2, 3]) for n in range(12)}
        write_leaf(tmp_path / "femnist1" / part, users)  # type: ignore[arg-type]
    return tmp_path


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "emnist", "cifar100", "femnist1"])
def test_data_sets_are_read_from_their_makers_files(shelf: Path, name: str) -> None:
    """And are said to be a part where they are."""
    source, missing = read_data_set(name, shelf)
    assert source.name == name and len(source.train) > 0
    stated = DATA_SETS[name].items
    assert (missing is None) == (stated is None)
    if missing:
        assert f"{len(source.train)} of {stated[0]:,} training" in missing  # type: ignore[index]
    if name == "emnist":
        assert np.asarray(source.train.images)[0, :, 5].tolist() == list(range(28))  # upright: dark at the top


def test_files_may_be_unzipped(shelf: Path) -> None:
    """MNIST's four, as some have them."""
    for file in IDX_NAMES:
        packed = shelf / "mnist" / file
        packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
        packed.unlink()
    assert len(read_data_set("mnist", shelf)[0].train) == 20


def test_what_is_not_all_there_is_not_taken_for_it(shelf: Path) -> None:
    """An empty folder; a part in a .npz file; a version that is pickled."""
    for name in ("cifar10", "notmnist", "mini_imagenet", "celeba"):
        (shelf / name).mkdir()
        assert place_of(name, shelf) is None
    (shelf / "cifar10" / "cifar-10-batches-bin").mkdir()
    (shelf / "cifar10" / "cifar-10-batches-py").mkdir()
    assert place_of("cifar10", shelf) is None
    with pytest.raises(DataError, match=r"is pickled, and pickles can run code.*binary version"):
        read_data_set("cifar10", shelf)
    cifar10 = next(row for row in check_recipe("five_datasets", shelf) if row["name"] == "cifar10")
    assert "binary version" in cifar10["pickled"] and cifar10["download"]
    pixels, labels = np.zeros((20, 28, 28), np.uint8), np.arange(20) % 10
    np.savez(shelf / "notmnist.npz", train_x=pixels, train_y=labels, test_x=pixels, test_y=labels)
    source, missing = read_data_set("notmnist", shelf)
    assert source.classes == tuple("ABCDEFGHIJ") and missing is not None
    letters = next(row for row in check_recipe("five_datasets", shelf) if row["name"] == "notmnist")
    assert letters["partial"] == missing and letters["place"]


def test_a_sequence_of_too_few_owners_says_so(shelf: Path) -> None:
    """And has as many tasks as there are."""
    config = Config().with_values({"sequence": {"owners": "femnist1", "tasks": 20}, "channels": 1})
    made = find_tasks(config, None, shelf)
    assert len(made.tasks) == 12 and made.partial == ["12 of 20 tasks can be made from what is there"]


def test_what_is_missing_is_said_with_where_to_get_it(tmp_path: Path) -> None:
    """By the file; a data set nobody may hand on is to be got by hand."""
    (row,) = check_recipe("pmnist", tmp_path)
    assert row["missing"] == list(IDX_NAMES) and row["place"] is None and row["download"] > 10_000_000
    _, celeba = check_recipe("cifar100_celeba1", tmp_path)
    assert "LEAF" in celeba["by_hand"] and celeba["folder"] == str(tmp_path / "celeba")
    rows = {row["name"]: row for row in list_recipes(tmp_path)}
    assert rows["digits"]["ready"] and not rows["pmnist"]["ready"]
    assert {name: row["tasks"] for name, row in rows.items()} == {
        **{"pmnist": 10, "cifar100": 10, "cifar100_sup": 20, "mini_imagenet": 20, "five_datasets": 5},
        **{"femnist1": 10, "femnist2": 35, "celeba1": 10, "celeba2": 20},
        **{"emnist_femnist1": 20, "cifar100_celeba1": 20, "npmnist": 200, "digits": 5, "mixed": 9},
    }
    with pytest.raises(ConfigError, match="unknown data set 'nonsense'; known: mnist"):
        read_data_set("nonsense", tmp_path)


def test_where_data_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is named, else $ETCL_DATA, else the cache."""
    monkeypatch.setenv("ETCL_DATA", "/data")
    assert data_root(Path("/named")) == Path("/named")
    assert data_root() == Path("/data")
    monkeypatch.delenv("ETCL_DATA")
    assert data_root() == Path.home() / ".cache" / "etcl_deploy"


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_can_be_read(name: str) -> None:
    """Its sequence is one, and all its data sets are known."""
    assert set(sequence_of(load_recipe(name).sequence).data) <= DATA_SETS.keys()


@real_data
@pytest.mark.parametrize("name", recipe_names())
def test_recipes_make_their_tasks_or_say_what_is_missing(name: str) -> None:
    """On the data at hand; where only a part of it is, that is said."""
    config = load_recipe(name).with_values({"tasks": 2})
    missing = [row["name"] for row in check_recipe(name, None) if not row["place"]]
    if missing:
        with pytest.raises(DataError, match="is neither in"):
            find_tasks(config, None)
        return
    made = find_tasks(config, None)
    assert len(made.tasks) == 2 and all(len(task.train_y) > 100 and len(task.test_y) > 50 for task in made.tasks)
    if name.startswith("cifar100"):
        assert "CIFAR-100: 12,000 of 50,000 training and 3,000 of 10,000 test items" in made.partial[0]
    if name in ("femnist1", "pmnist"):
        assert made.partial == []


@real_data
@pytest.mark.parametrize("name", ["five_datasets", "mixed"])
def test_classes_of_different_things_have_different_names(name: str) -> None:
    """Heads of tasks with equal classes teach each other: a 3 is no dress."""
    tasks = find_tasks(load_recipe(name), None).tasks
    for number, task in enumerate(tasks):
        for other in tasks[:number]:
            kin = {task.name, other.name} == {"mnist", "svhn"} or ("sample" in task.name and "sample" in other.name)
            assert (task.classes == other.classes) == kin, (task.name, other.name)


@real_data
def test_the_real_femnist1_is_what_its_readme_says() -> None:
    """755 to 785 training and 84 to 88 test items a task, dark ink on white."""
    tasks = find_tasks(load_recipe("femnist1"), None).tasks
    assert [task.name for task in tasks][:2] == ["sample-01", "sample-02"] and len(tasks) == 10
    assert {len(task.train_y) for task in tasks} <= set(range(755, 786))
    assert {len(task.test_y) for task in tasks} <= set(range(84, 89))
    assert all(float(task.train_x.float().mean()) > 128 for task in tasks)
    assert tasks[3].classes[10] == "A" and tasks[3].classes[61] == "z"
    assert tasks[3].train_x.shape[1:] == (28, 28, 1) and tasks[3].train_x.dtype == torch.uint8


@real_data
def test_the_preset_paper_has_the_papers_items() -> None:
    """6,000, 300 and 700 of PMNIST, and F-EMNIST-1 at 32x32 pixels with three channels."""
    config = load_recipe("pmnist", preset="paper").with_values({"tasks": 1})
    (task,) = find_tasks(config, None).tasks
    training, held = task.training.split(config.learning.validation_share, torch.Generator())
    assert (len(training), len(held), len(task.test_y)) == (6000, 300, 700)
    (task,) = find_tasks(load_recipe("femnist1", preset="paper").with_values({"tasks": 1}), None).tasks
    assert task.train_x.shape[1:] == (32, 32, 3)


@real_data
def test_real_tasks_that_are_similar_are_found_and_permuted_ones_are_not(tmp_path: Path) -> None:
    """Three samples of F-EMNIST-1, learned for a few epochs, and three permutations of MNIST."""
    quick = {"width": 10, "epochs": 4, "tasks": 3}
    run = train(load_recipe("femnist1").with_values(quick), tmp_path / "similar", session=Session("cpu")).run
    assert run.records["sample-02"].similar == ("sample-01",)
    assert set(run.records["sample-03"].similar) == {"sample-01", "sample-02"}
    assert load_run(tmp_path / "similar").run.summary(load_recipe("femnist1")).similar
    slow = {"tasks": 3, "epochs": 1, "batch_size": 100}
    run = train(load_recipe("pmnist").with_values(slow), tmp_path / "other", session=Session("cpu")).run
    assert [known.similar for known in run.records.values()] == [(), (), ()]
    assert run.matrix[-1][0] == run.matrix[0][0]
