from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import Learned

from etcl_deploy.core.preprocessing import Preprocessing
from etcl_deploy.errors import EtclError, ParityError, UnknownTaskError
from etcl_deploy.export.parity import seeded_images, session
from etcl_deploy.export.to_onnx import export_task
from etcl_deploy.learn.trainer import predict
from etcl_deploy.runtime import onnx_graph as operators
from etcl_deploy.runtime.onnx_graph import Graph


def test_an_exported_task_answers_like_the_learned_network(learned: Learned, tmp_path: Path) -> None:
    """Over the whole test set, at any batch size: same class, probabilities that sum to one."""
    task = learned.tasks[3]
    report = export_task(learned.bundle, task.name, tmp_path / "t.onnx", task.test_x)
    assert (report.parity.items, report.parity.same_class) == (len(task.test_x), len(task.test_x))
    assert report.bytes == (tmp_path / "t.onnx").stat().st_size
    expected = predict(learned.run.network, task.name, task.test_x).numpy()
    loaded = session(tmp_path / "t.onnx")
    for size in (1, 7, len(expected)):
        probabilities, logits = loaded.run(None, {"image": task.test_x[:size].numpy()})
        np.testing.assert_allclose(logits, expected[:size], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(probabilities.sum(1), 1, rtol=1e-5)


def test_the_file_says_what_it_is(learned: Learned, tmp_path: Path) -> None:
    """One file, opset 17, inputs and outputs as promised, metadata for a device."""
    export_task(learned.bundle, "parity", tmp_path / "t.onnx")
    model = onnx.load(tmp_path / "t.onnx", load_external_data=False)
    assert [entry.version for entry in model.opset_import] == [17]
    assert [value.name for value in model.graph.input] == ["image"]
    assert [value.name for value in model.graph.output] == ["probabilities", "logits"]
    dims = [d.dim_param or d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    assert dims == ["batch", 16, 16, 1]
    assert not any(tensor.external_data for tensor in model.graph.initializer)
    found = {entry.key: entry.value for entry in model.metadata_props}
    assert found["etcl.task"] == "parity"
    assert json.loads(found["etcl.classes"]) == ["even", "odd"]
    assert json.loads(found["etcl.preprocessing"])["height"] == 16
    assert found["etcl.bundle"] == learned.bundle.digest
    assert json.loads(found["etcl.accuracy"]) == learned.run.matrix[-1][4]


def test_an_export_that_differs_is_deleted(learned: Learned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parity or nothing: a wrong graph leaves no file, and an earlier file stays as it was."""
    path = tmp_path / "t.onnx"
    path.write_bytes(b"earlier")

    def broken(graph: Graph, preprocessing: Preprocessing) -> str:
        return graph.add("Transpose", [graph.add("Cast", ["image"], "f", to=1)], "x", perm=[0, 3, 1, 2])

    monkeypatch.setattr(operators, "_normalize", broken)
    with pytest.raises(ParityError, match="differs from the bundle"):
        export_task(learned.bundle, "parity", path)
    assert [p.name for p in tmp_path.iterdir()] == ["t.onnx"]
    assert path.read_bytes() == b"earlier"


def test_unknown_tasks_and_directories_are_refused(learned: Learned, tmp_path: Path) -> None:
    """Before anything is written."""
    with pytest.raises(UnknownTaskError):
        export_task(learned.bundle, "nobody", tmp_path / "t.onnx")
    with pytest.raises(EtclError, match="is a directory"):
        export_task(learned.bundle, "parity", tmp_path)
    assert not list(tmp_path.iterdir())


def test_seeded_images_are_the_same_every_time(learned: Learned) -> None:
    """Parity is checked on the same images on every machine."""
    one, two = seeded_images(learned.bundle.preprocessing), seeded_images(learned.bundle.preprocessing)
    assert torch.equal(one, two)
    assert one.shape == (16, 16, 16, 1)
