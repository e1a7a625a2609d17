"""Smaller files with the same answers: half precision, files that inflate themselves, 8 bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import Learned
from factories import made_bundle
from onnx import TensorProto, helper, numpy_helper

from etcl_deploy.errors import ExportError
from etcl_deploy.export import quantize, to_onnx
from etcl_deploy.export.compress import compact_weights, halve_weights
from etcl_deploy.export.parity import session
from etcl_deploy.export.to_onnx import OnnxOptions, export_task


@pytest.mark.parametrize(("density", "most"), [(0.4, 0.45), (0.1, 0.15)])
def test_a_compact_file_is_as_small_as_its_mask(tmp_path: Path, density: float, most: float) -> None:
    """Bits and values of resnet18; the answers are those of the dense file, to the bit."""
    bundle = made_bundle(1, "resnet18", 20, 16, density=density)
    plain = export_task(bundle, "täsk 0", tmp_path / "plain.onnx")
    small = export_task(bundle, "täsk 0", tmp_path / "small.onnx", options=OnnxOptions(compact=True))
    assert small.bytes <= most * plain.bytes
    assert plain.opset == small.opset == 17
    pixels = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 1), np.uint8)
    one, other = (session(tmp_path / f"{name}.onnx").run(None, {"image": pixels}) for name in ("plain", "small"))
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("size", [512, 513, 519, 1000])
@pytest.mark.parametrize("kind", [np.float32, np.float16, np.int8])
def test_weights_of_any_size_and_kind_inflate_to_themselves(size: int, kind: type) -> None:
    """Also those whose bits do not fill the last byte, and those that begin or end with zeros."""
    chance = np.random.default_rng(size)
    for begin, end in ((0, 0), (9, 0), (0, 9)):
        values = (chance.integers(-9, 9, size) * (chance.random(size) < 0.3)).astype(kind)
        values[:begin] = 0
        values[size - end :] = 0
        graph = helper.make_graph(
            [helper.make_node("Identity", ["w"], ["out"])],
            "g",
            [],
            [helper.make_tensor_value_info("out", helper.np_dtype_to_tensor_dtype(np.dtype(kind)), [size])],
            [numpy_helper.from_array(values, "w")],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        compact_weights(model)
        assert "CumSum" in {node.op_type for node in model.graph.node}
        onnx.checker.check_model(model, full_check=True)
        import onnxruntime

        run = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        assert np.array_equal(run.run(None, {})[0], values)


def test_what_would_not_get_smaller_stays() -> None:
    """A dense weight, and one of few numbers."""
    model = onnx.ModelProto()
    for name, values in (("dense", np.ones(1000, np.float32)), ("few", np.zeros(100, np.float32))):
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    before = model.SerializeToString(deterministic=True)
    compact_weights(model)
    assert model.SerializeToString(deterministic=True) == before
    halve_weights(model)
    assert [tensor.data_type for tensor in model.graph.initializer] == [TensorProto.FLOAT16, TensorProto.FLOAT]


def test_half_precision_is_half_the_size(learned: Learned, tmp_path: Path) -> None:
    """With nearly the same answers; and with a mask inflated, smaller still."""
    task = learned.tasks[3]
    sizes = {}
    for name, form in (
        ("fp32", OnnxOptions()),
        ("fp16", OnnxOptions(precision="fp16")),
        ("both", OnnxOptions(17, "fp16", True)),
    ):
        report = export_task(learned.bundle, task.name, tmp_path / f"{name}.onnx", task.test_x, form)
        assert report.parity.max_rel_diff < (1e-4 if name == "fp32" else 1e-2)
        sizes[name] = report.bytes
    assert sizes["fp16"] < 0.6 * sizes["fp32"]
    assert sizes["both"] < 0.6 * sizes["fp16"]


@pytest.mark.parametrize("compact", [False, True])
def test_8_bit_cost_hardly_any_accuracy(learned: Learned, tmp_path: Path, compact: bool) -> None:
    """Calibrated on the task's training images, measured on its test images."""
    task = learned.tasks[0]
    plain = export_task(learned.bundle, task.name, tmp_path / "plain.onnx")
    form = OnnxOptions(precision="int8", compact=compact)
    report = export_task(learned.bundle, task.name, tmp_path / "small.onnx", options=form, examples=task, max_loss=3)
    assert report.accuracy is not None
    assert report.accuracy.items == len(task.test_x)
    assert report.accuracy.before == pytest.approx(learned.bundle.task(task.name).accuracy, abs=0.01)
    assert report.accuracy.before - report.accuracy.after <= 3
    assert report.bytes < (0.3 if compact else 0.5) * plain.bytes
    model = onnx.load(tmp_path / "small.onnx")
    assert "QuantizeLinear" in {node.op_type for node in model.graph.node}
    assert {entry.key: entry.value for entry in model.metadata_props}["etcl.precision"] == "int8"


def test_8_bit_that_cost_too_much_are_not_kept(
    learned: Learned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calibrated on black images it knows nothing; the message says what was lost."""
    task, real = learned.tasks[0], quantize.quantized
    monkeypatch.setattr(quantize, "quantized", lambda model, pixels: real(model, np.zeros_like(pixels)))
    with pytest.raises(
        ExportError, match=r"gets .* % of \d+ test images right where the bundle gets .* may lose 1 points"
    ):
        export_task(
            learned.bundle, task.name, tmp_path / "t.onnx", options=OnnxOptions(precision="int8"), examples=task
        )
    assert not list(tmp_path.iterdir())


def test_8_bit_need_images_of_the_task(learned: Learned, tmp_path: Path) -> None:
    """And of its classes, no others."""
    form = OnnxOptions(precision="int8")
    with pytest.raises(ExportError, match="need images of the task"):
        export_task(learned.bundle, "parity", tmp_path / "t.onnx", options=form)
    with pytest.raises(ExportError, match="have the class '0'; it has: even, odd"):
        export_task(learned.bundle, "parity", tmp_path / "t.onnx", options=form, examples=learned.tasks[0])
    task = learned.tasks[4]
    none = to_onnx.Task("parity", task.classes, task.train_x, task.train_y, task.test_x[:0], task.test_y[:0])
    with pytest.raises(ExportError, match="no test image for task 'parity'"):
        export_task(learned.bundle, "parity", tmp_path / "t.onnx", options=form, examples=none)
    with pytest.raises(ExportError, match="no image to measure"):
        quantize.quantized(onnx.ModelProto(), np.empty((0, 1), np.uint8))


def test_classes_in_another_order_are_matched_by_name(learned: Learned, tmp_path: Path) -> None:
    """Folders are read by name, a bundle keeps the order it learned."""
    task = learned.tasks[4]
    turned = to_onnx.Task(task.name, task.classes[::-1], task.train_x, 1 - task.train_y, task.test_x, 1 - task.test_y)
    report = export_task(learned.bundle, task.name, tmp_path / "t.onnx", examples=turned)
    assert report.accuracy is not None
    assert report.accuracy.before == report.accuracy.after
    assert report.accuracy.before == pytest.approx(learned.bundle.task(task.name).accuracy, abs=0.01)


@pytest.mark.parametrize(("opset", "fine"), [(16, False), (17, True), (18, True), (21, True), (99, False)])
def test_the_opset_is_a_choice(learned: Learned, tmp_path: Path, opset: int, fine: bool) -> None:
    """From 17 to the latest onnx knows."""
    if not fine:
        with pytest.raises(ExportError, match=f"opset {opset} is not written; 17 to"):
            OnnxOptions(opset)
        return
    report = export_task(learned.bundle, "parity", tmp_path / "t.onnx", options=OnnxOptions(opset))
    assert report.opset == opset
    assert [entry.version for entry in onnx.load(tmp_path / "t.onnx").opset_import] == [opset]


def test_a_precision_nobody_knows_is_refused() -> None:
    """By name."""
    with pytest.raises(ExportError, match="precision 'int4' is unknown; known: fp32, fp16, int8"):
        OnnxOptions(precision="int4")


def test_the_file_of_a_shrunk_task_is_smaller(tmp_path: Path) -> None:
    """What was left out is reported and is not in the file."""
    bundle = made_bundle(1, "alexnet", 4, 32, density=0.02)
    report = export_task(bundle, "täsk 0", tmp_path / "t.onnx")
    assert sum(row.kept_outputs for row in report.layers) < sum(row.outputs for row in report.layers)
    held = sum(np.prod(t.dims) for t in onnx.load(tmp_path / "t.onnx").graph.initializer)
    assert held < bundle.layout.weight_count / 2
    assert torch.tensor([report.parity.max_rel_diff]) < 1e-4
