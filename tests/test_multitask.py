"""All tasks in one file, chosen by number."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import Learned
from factories import made_bundle

from etcl_deploy.errors import ParityError
from etcl_deploy.export import to_multitask
from etcl_deploy.export.parity import session
from etcl_deploy.export.to_multitask import export_multitask
from etcl_deploy.export.to_onnx import OnnxOptions, export_task
from etcl_deploy.learn.trainer import predict


def test_every_task_answers_like_the_learned_network(learned: Learned, tmp_path: Path) -> None:
    """Over its test set, each with as many logits as it has classes."""
    report = export_multitask(learned.bundle, tmp_path / "all.onnx")
    assert report.tasks == list(learned.bundle.tasks)
    assert report.parity.same_class == report.parity.items == 8 * len(report.tasks)
    loaded = session(tmp_path / "all.onnx")
    for number, task in enumerate(learned.tasks):
        expected = predict(learned.run.network, task.name, task.test_x).numpy()
        inputs = {"image": task.test_x.numpy(), "task_id": np.array(number)}
        probabilities, logits = loaded.run(None, inputs)
        assert logits.shape == (len(task.test_x), len(task.classes))
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-5)


def test_one_file_takes_less_than_one_for_each(learned: Learned, tmp_path: Path) -> None:
    """The backbone is in it once; half precision makes it smaller."""
    whole = export_multitask(learned.bundle, tmp_path / "all.onnx")
    half = export_multitask(learned.bundle, tmp_path / "half.onnx", OnnxOptions(precision="fp16"))
    single = sum(export_task(learned.bundle, name, tmp_path / "one.onnx").bytes for name in learned.bundle.tasks)
    assert whole.bytes < 0.5 * single
    assert half.bytes < 0.7 * whole.bytes


def test_the_file_lists_its_tasks(learned: Learned, tmp_path: Path) -> None:
    """In the order of their numbers, with classes and accuracy."""
    export_multitask(learned.bundle, tmp_path / "all.onnx")
    model = onnx.load(tmp_path / "all.onnx")
    found = {entry.key: entry.value for entry in model.metadata_props}
    tasks = learned.bundle.tasks
    assert json.loads(found["etcl.tasks"]) == list(tasks)
    assert json.loads(found["etcl.classes"]) == [list(task.classes) for task in tasks.values()]
    assert json.loads(found["etcl.accuracy"]) == [task.accuracy for task in tasks.values()]
    assert [(value.name, value.type.tensor_type.elem_type) for value in model.graph.input] == [
        ("image", onnx.TensorProto.UINT8),
        ("task_id", onnx.TensorProto.INT64),
    ]


@pytest.mark.parametrize("backbone", ["alexnet", "lenet5", "fcn3"])
def test_every_backbone(backbone: str, tmp_path: Path) -> None:
    """With masks that do not fill their last byte, and names of any letters."""
    report = export_multitask(made_bundle(4, backbone, 5, 32), tmp_path / "all.onnx")
    assert report.parity.same_class == 32


def test_a_task_that_differs_is_named(learned: Learned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is written."""
    real = to_multitask.pack
    monkeypatch.setattr(to_multitask, "pack", lambda mask: real(torch.roll(mask, 1)))
    with pytest.raises(ParityError, match=r"task 'upright-a' in all.onnx differs"):
        export_multitask(learned.bundle, tmp_path / "all.onnx")
    assert not list(tmp_path.iterdir())
