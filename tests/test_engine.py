"""Engines: the same answers from each, from every kind of network; what processes share; who is chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Learned
from factories import made_bundle
from test_subnet import bias, conv, norm
from test_subnet import learned as learned_of

from etcl_deploy.bundle.bundle import Bundle, load_bundle
from etcl_deploy.core.plan import INPUT, Step
from etcl_deploy.network.backbones import BACKBONES
from etcl_deploy.runtime import arrangement, onnx_engine
from etcl_deploy.runtime import engine as engines
from etcl_deploy.runtime.arrangement import Arrangement, EngineError, arrange
from etcl_deploy.runtime.engine import TorchEngine, agree, choose_engine
from etcl_deploy.runtime.onnx_engine import OnnxEngine
from etcl_deploy.runtime.predictor import Predictor
from etcl_deploy.runtime.subnet import materialize


def noise(bundle: Bundle, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (count, *bundle.preprocessing.shape), generator=generator, dtype=torch.uint8)


def check_same(bundle: Bundle) -> None:
    """Every task, in both engines, one after another in the same slot."""
    pixels = noise(bundle, 4)
    ours = OnnxEngine(bundle)
    for name in [*bundle.tasks, *bundle.tasks]:
        with torch.inference_mode():
            expected = materialize(bundle, name)(pixels)
        ready = ours.materialize(name)
        assert agree(ours.logits(ready, pixels), expected), name
        ours.release(ready)


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
def test_onnxruntime_answers_like_torch(backbone: str, precision: str) -> None:
    """Every backbone, every precision, widths that fill no block of channels evenly."""
    check_same(made_bundle(3, backbone, 5, 32, precision=precision))


def test_networks_of_users_run_in_onnxruntime(tmp_path: Path) -> None:
    """Biases with masks, norms that fold into nothing, norms of groups and layers."""
    _, bundle = learned_of(
        norm("first", INPUT, 1),
        conv("c", "first", 1),
        bias("b", "c"),
        norm("n", "b"),
        Step("relu", "relu6", ("n",), {}),
        Step("sum", "add", ("relu", "n"), {}),
        bias("b2", "sum"),
        norm("n2", "b2"),
        Step("group", "group_norm", ("n2",), {"features": 4, "groups": 2, "eps": 1e-5}),
        Step("layer", "layer_norm", ("group",), {"features": 1024, "eps": 1e-5}),
        Step("gelu", "gelu", ("layer",), {}),
        Step("flat", "flatten", ("gelu",), {}),
        Step("fc", "linear", ("flat",), {"in": 1024, "out": 5}),
        bias("b3", "fc", 5),
        path=tmp_path / "b.etcl",
    )
    check_same(bundle)


def test_an_item_gets_the_same_bits_alone_and_in_any_batch(learned: Learned) -> None:
    """In onnxruntime: with its own task, with others, in any order, in a cache of one."""
    bundle = learned.bundle
    predictor = Predictor(bundle, 0, OnnxEngine(bundle))
    names = [task.name for task in learned.tasks] * 5
    items = [task.test_x[turn] for turn in range(5) for task in learned.tasks]
    alone = [predictor.predict([item], [name])[0] for item, name in zip(items, names, strict=True)]
    assert predictor.predict(items, names) == alone
    assert predictor.predict(items[::-1], names[::-1]) == alone[::-1]
    roomy = Predictor(bundle, engine=OnnxEngine(bundle))
    assert roomy.predict(items, names) == alone


def test_processes_share_what_the_first_has_made(tmp_path: Path) -> None:
    """A second engine in the same directory maps the same file; another bundle has its own."""
    path = tmp_path / "x.etcl"
    path.write_bytes(made_bundle(3).to_bytes("packed"))
    first = OnnxEngine(load_bundle(path), tmp_path)
    (file,) = tmp_path.glob("ready-*.bin")
    stamp = file.stat().st_mtime_ns, file.stat().st_ino
    second = OnnxEngine(load_bundle(path), tmp_path)
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == stamp
    assert np.array_equal(first._table.masks, second._table.masks)
    with pytest.raises(ValueError, match="read-only"):
        second._table.weights[0] = 1
    path.write_bytes(made_bundle(4).to_bytes("packed"))
    OnnxEngine(load_bundle(path), tmp_path)
    assert len(list(tmp_path.glob("ready-*.bin"))) == 2
    assert not [left for left in tmp_path.iterdir() if "half" in left.name]


def test_slots_are_used_again(learned: Learned) -> None:
    """What one task leaves another takes, whole: no number of the first is left in it."""
    bundle = learned.bundle
    ours = OnnxEngine(bundle)
    clean = ours.materialize("turned").slot.buffer.copy()
    first = ours.materialize("parity")
    first.slot.buffer[:] = np.nan
    ours.release(first)
    second = ours.materialize("turned")
    assert second.slot is first.slot
    assert np.array_equal(second.slot.buffer, clean)


def test_the_fastest_engine_that_answers_right_is_chosen(learned: Learned, monkeypatch: pytest.MonkeyPatch) -> None:
    """By measurement; one that is missing, breaks or answers otherwise is passed over."""
    bundle = learned.bundle
    seconds = {"torch": 1.0, "onnxruntime": 2.0}
    monkeypatch.setattr(engines, "seconds_of", lambda engine, ready, pixels: seconds[engine.name])
    assert choose_engine(bundle).name == "torch"
    seconds["onnxruntime"] = 0.5
    assert choose_engine(bundle).name == "onnxruntime"

    real = OnnxEngine.logits
    monkeypatch.setattr(OnnxEngine, "logits", lambda self, ready, pixels: real(self, ready, pixels) + 0.1)
    assert choose_engine(bundle).name == "torch"
    monkeypatch.setattr(OnnxEngine, "logits", real)

    def broken(self: Any, name: str) -> Any:
        raise RuntimeError("no")

    monkeypatch.setattr(OnnxEngine, "materialize", broken)
    assert choose_engine(bundle).name == "torch"


def test_all_processes_of_a_directory_take_the_engine_of_the_first(
    learned: Learned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that finds another faster, because the machine is busy when it starts."""
    bundle = learned.bundle
    seconds = {"torch": 2.0, "onnxruntime": 1.0}
    monkeypatch.setattr(engines, "seconds_of", lambda engine, ready, pixels: seconds[engine.name])
    assert choose_engine(bundle, tmp_path).name == "onnxruntime"
    seconds["onnxruntime"] = 3.0
    assert choose_engine(bundle, tmp_path).name == "onnxruntime"
    assert choose_engine(bundle).name == "torch"
    monkeypatch.setattr(OnnxEngine, "logits", lambda self, ready, pixels: pixels.new_zeros(len(pixels), 10).float())
    assert choose_engine(bundle, tmp_path).name == "torch", "what does not answer right is no choice"


def mixed(values: np.ndarray) -> np.ndarray:
    return values + np.float32(0.5)


def missing(values: np.ndarray) -> np.ndarray:
    return np.where(np.arange(len(values)) < 7, np.float32(0), values)


@pytest.mark.parametrize(("change", "reason"), [(mixed, "mixed numbers"), (missing, "changed numbers")])
def test_a_graph_that_onnxruntime_changed_is_not_used(
    monkeypatch: pytest.MonkeyPatch, change: Any, reason: str
) -> None:
    """Numbers that went missing or were mixed with others are noticed."""
    bundle = made_bundle(1, "resnet18", 8, 16)
    folded = materialize(bundle, "täsk 0")
    shapes = {name: tuple(tensor.shape) for name, tensor in folded.weights.items()}
    assert arrange(folded.plan, bundle.preprocessing, shapes).places
    real = arrangement._optimized

    def changed(model: Any) -> Any:
        optimized = real(model)
        tensor = next(t for t in optimized.graph.initializer if len(t.raw_data) > 4000)
        tensor.raw_data = change(np.frombuffer(tensor.raw_data, np.float32)).tobytes()
        return optimized

    monkeypatch.setattr(arrangement, "_optimized", changed)
    with pytest.raises(EngineError, match=reason):
        arrange(folded.plan, bundle.preprocessing, shapes)


def test_a_network_of_too_many_numbers_is_not_arranged(monkeypatch: pytest.MonkeyPatch) -> None:
    """They could not be told apart."""
    bundle = made_bundle(1)
    monkeypatch.setattr(arrangement, "MAX_NUMBERS", 10)
    with pytest.raises(EngineError, match="more than the 10"):
        OnnxEngine(bundle)


@pytest.mark.parametrize("reason", ["weights and other numbers", "the weights of two layers", "without blocks"])
def test_a_layout_that_is_not_understood_is_not_used(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another onnxruntime may join tensors, or order weights as none does today: torch answers then."""
    bundle = made_bundle(2, "resnet18", 2, 8)
    real = arrange

    def other(*about: Any) -> Arrangement:
        found = real(*about)
        large = [place for place in found.places if place.source.max() < bundle.layout.weight_count]
        small = [place for place in found.places if place not in large]
        first, second = {
            "weights and other numbers": (large[0], small[0]),
            "the weights of two layers": (large[0], large[1]),
            "without blocks": (large[0], None),
        }[reason]
        if second is None:
            changed = replace(first, source=first.source[::-1])
        else:
            joined = np.concatenate([first.source, second.source])
            changed = replace(first, shape=joined.shape, source=joined)
        rest = [place for place in found.places if place is not first and place is not second]
        return replace(found, places=(changed, *rest))

    OnnxEngine(bundle)
    monkeypatch.setattr(onnx_engine, "arrange", other)
    with pytest.raises(EngineError, match=reason):
        OnnxEngine(bundle)
    assert choose_engine(bundle).name == "torch"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and it works")
def test_a_gpu_that_does_not_work_is_passed_over(
    learned: Learned, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried where torch says there is one; why it is not used is in the log."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_engine(learned.bundle).name in ("torch", "onnxruntime")
    (warning,) = [record.getMessage() for record in caplog.records if record.name == engines.__name__]
    assert warning.startswith("an engine is not used: ")


def test_engines_agree_only_within_rounding() -> None:
    """A relative difference of 1e-4 of the largest logit."""
    expected = torch.tensor([[1.0, -10.0]])
    assert agree(expected + 5e-4, expected)
    assert not agree(expected + 5e-3, expected)
    assert not agree(torch.full((1, 2), float("nan")), expected)


def test_the_torch_engine_takes_any_number_of_items(learned: Learned) -> None:
    """More than go through a network at once come back in order."""
    engine = TorchEngine(learned.bundle)
    ready = engine.materialize("parity")
    pixels = learned.tasks[4].test_x[:150]
    found = engine.logits(ready, pixels)
    assert len(found) == 150
    torch.testing.assert_close(found[140:], engine.logits(ready, pixels[140:]), rtol=1e-4, atol=1e-4)
