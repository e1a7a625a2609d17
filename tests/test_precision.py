"""Weights and heads in fewer bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Learned
from factories import PHOTO_SETTINGS, made_bundle
from test_cli import answer, etcl, fails
from test_delta import first_tasks

from etcl_deploy.bundle.bundle import Bundle, load_bundle
from etcl_deploy.bundle.precision import expand, reduce
from etcl_deploy.config import Config
from etcl_deploy.errors import BundleError
from etcl_deploy.runs.session import Session, train
from etcl_deploy.runs.to_bundle import bundle_run
from etcl_deploy.runtime.predictor import Predictor


@pytest.mark.parametrize(("precision", "error"), [("fp32", 0), ("fp16", 1e-3), ("int8", 1 / 250)])
def test_what_comes_back_is_close(precision: str, error: float) -> None:
    """Within the step of the precision, by row; rows of zeros stay zero."""
    row = torch.repeat_interleave(torch.arange(4), torch.tensor([10, 300, 1, 20]))
    values = torch.randn(331, generator=torch.Generator().manual_seed(0)) * torch.tensor([0.0, 1.0, 50.0, 0.001])[row]
    stored, scale = reduce(values, precision, row, 4)
    found = expand(stored, None if scale is None else scale[row])
    for number in range(4):
        own, back = values[row == number], found[row == number]
        assert (own - back).abs().max() <= error * own.abs().max()
    assert not found[:10].any()


def test_what_does_not_fit_is_refused() -> None:
    """A weight beyond what half precision holds."""
    with pytest.raises(BundleError, match="does not fit fp16"):
        reduce(torch.tensor([1e6]), "fp16", torch.tensor([0]), 1)


def test_numbers_too_small_for_a_scale_are_nothing() -> None:
    """A scale of 0 would make a file that nobody reads."""
    stored, scale = reduce(torch.tensor([1e-44, -1e-44]), "int8", torch.tensor([0, 0]), 1)
    assert not stored.any() and scale is not None and scale.tolist() == [1]


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("encoding", ["coded", "packed"])
def test_later_tasks_change_no_bit_of_earlier_answers(learned: Learned, encoding: str, precision: str) -> None:
    """In no precision: what an earlier task owns is not rounded anew, though larger weights join its channels."""
    pixels = learned.tasks[0].test.images[:20]
    answers = []
    for count in (2, 5):
        predictor = Predictor(Bundle.from_bytes(first_tasks(learned, count, precision).to_bytes(encoding)))
        answers.append([predictor.logits(name, pixels) for name in list(predictor.bundle.tasks)[:2]])
    assert all(torch.equal(before, after) for before, after in zip(*answers, strict=True))


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_accuracy_is_measured_again(learned: Learned, tmp_path: Path, precision: str) -> None:
    """Both figures are in the file, beside each other; and it is smaller."""
    path = tmp_path / "x.etcl"
    if precision == "int8":
        assert answer("bundle", learned.directory, "--output", path, "--precision", precision)["precision"] == "int8"
    else:
        tests = {task.name: task.test for task in learned.tasks}
        bundle_run(learned.stored, path, precision=precision, tests=tests)
    bundle = load_bundle(path)
    assert bundle.precision == precision
    last = learned.run.matrix[-1]
    for task, before in zip(bundle.tasks.values(), last, strict=True):
        assert task.learned == before
        assert task.accuracy is not None and before is not None and abs(task.accuracy - before) < 3
    assert path.stat().st_size < {"fp16": 0.65, "int8": 0.5}[precision] * learned.path.stat().st_size


def test_a_name_is_told_as_it_is(photos: Path, tmp_path: Path) -> None:
    """Of a task that cannot be measured, too, though it reads like a style."""
    (photos / "a").rename(photos / "[red]")
    train(Config().with_values({**PHOTO_SETTINGS, "tasks": 1}), tmp_path / "run", data=photos, session=Session("cpu"))
    (photos / "[red]").rename(tmp_path / "elsewhere")
    done = etcl("bundle", tmp_path / "run", "-o", tmp_path / "x.etcl", "--precision", "fp16")
    assert done.returncode == 0 and "task '[red]' is no longer there" in done.stderr


def test_a_bundle_keeps_its_precision(learned: Learned, tmp_path: Path) -> None:
    """What was left out cannot be had back; encodings can be changed, without a bit being lost."""
    path = tmp_path / "packed.etcl"
    answer("bundle", learned.path, "--output", path, "--encoding", "packed")
    assert load_bundle(path).encoding == "packed"
    answer("bundle", path, "--output", tmp_path / "again.etcl")
    assert (tmp_path / "again.etcl").read_bytes() == learned.path.read_bytes()
    answer("bundle", path, "--output", tmp_path / "same.etcl", "--precision", "fp32")
    assert "keeps its precision, fp32" in fails("bundle", path, "-o", tmp_path / "h", "--precision", "fp16", code=2)


@pytest.mark.parametrize("value", [0.0, -1.0, 3e38])
@pytest.mark.parametrize("encoding", ["coded", "packed"])
def test_scales_that_make_no_weights_are_refused(encoding: str, value: float) -> None:
    """Of weights and of heads: those that are not above 0, or give what is not finite."""
    bundle = made_bundle(2, precision="int8")
    assert bundle.scale is not None
    task = bundle.tasks["täsk 1"]
    worse = replace(task, head={**task.head, "scale": torch.full_like(task.head["scale"], value)})
    for other in (
        replace(bundle, scale=bundle.scale * value),
        replace(bundle, tasks={**bundle.tasks, task.name: worse}),
    ):
        with pytest.raises(BundleError, match=r"holds a scale that is not above 0|not finite"):
            Bundle.from_bytes(other.to_bytes(encoding))


@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_what_is_not_finite_is_not_bundled(precision: str) -> None:
    """A run that went wrong says so."""
    with pytest.raises(BundleError, match="a weight is not finite"):
        reduce(torch.tensor([1.0, torch.nan]), precision, torch.tensor([0, 0]), 1)
