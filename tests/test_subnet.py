from __future__ import annotations

from pathlib import Path

import torch
from factories import make_tasks

from etcl_deploy.bundle.bundle import Bundle, load_bundle, save
from etcl_deploy.config import Learning
from etcl_deploy.core.plan import INPUT, Plan, Step
from etcl_deploy.core.preprocessing import Preprocessing
from etcl_deploy.export.to_onnx import export_task
from etcl_deploy.learn.trainer import learn_sequence, predict
from etcl_deploy.network.masked_network import MaskedNetwork
from etcl_deploy.runs.to_bundle import bundle_of
from etcl_deploy.runtime.subnet import materialize

TASK = make_tasks(1)[0]


def conv(name: str, source: str, channels: int) -> Step:
    sizes = {"in": channels, "out": 4, "kernel": 3, "stride": 1, "padding": 1, "dilation": 1, "groups": 1}
    return Step(name, "conv2d", (source,), sizes)


def bias(name: str, source: str, features: int = 4) -> Step:
    return Step(name, "bias", (source,), {"features": features})


def norm(name: str, source: str, features: int = 4) -> Step:
    return Step(name, "norm", (source,), {"features": features, "eps": 1e-4})


def learned(*steps: Step, path: Path) -> tuple[MaskedNetwork, Bundle]:
    """A network of these steps that learned a task, with biases that are not zero, and its bundle."""
    plan = Plan((1, 16, 16), steps, head_bias=False)
    generator = torch.Generator().manual_seed(0)
    network = MaskedNetwork(plan, Preprocessing(16, 16, 1), 0.7, generator)
    with torch.no_grad():
        for step, layer in network.masked_layers.items():
            if layer.step.op == "bias":
                layer.weight.uniform_(-1, 1, generator=generator)
            assert layer.weight.any(), step
    learn_sequence(network, [TASK], Learning(epochs=1, batch_size=16))
    save(path, bundle_of(network, "mine", {}, {}).to_bytes("coded"))
    return network, load_bundle(path)


def check(network: MaskedNetwork, bundle: Bundle, path: Path) -> dict[str, tuple[str, ...]]:
    """The steps that are left, once network, subnet and ONNX are known to agree."""
    subnet = materialize(bundle, "t0")
    with torch.no_grad():
        torch.testing.assert_close(subnet(TASK.train_x), predict(network, "t0", TASK.train_x), rtol=1e-4, atol=1e-4)
    export_task(bundle, "t0", path, TASK.train_x)
    used = {name.rsplit(".", 1)[0] for name in subnet.weights}
    assert used <= {step.name for step in subnet.plan.steps}, "no tensors of steps that are gone"
    return {step.name: step.inputs for step in subnet.plan.steps}


def test_chains_of_bias_and_norm_fold_into_the_layer_before(tmp_path: Path) -> None:
    """Convolution, bias, norm, bias: one convolution with a bias; the same for linear layers."""
    network, bundle = learned(
        conv("c", INPUT, 1),
        bias("b", "c"),
        norm("n", "b"),
        bias("b2", "n"),
        Step("drop", "dropout", ("b2",), {"percent": 30}),
        Step("flat", "flatten", ("drop",), {}),
        Step("fc", "linear", ("flat",), {"in": 1024, "out": 5}),
        norm("n2", "fc", 5),
        bias("b3", "n2", 5),
        path=tmp_path / "b.etcl",
    )
    assert check(network, bundle, tmp_path / "t.onnx") == {"c": (INPUT,), "flat": ("c",), "fc": ("flat",)}


def test_what_something_else_reads_is_not_folded(tmp_path: Path) -> None:
    """A convolution read before its bias keeps its own answer, and a norm after a sum stays a step."""
    network, bundle = learned(
        conv("c", INPUT, 1),
        bias("b", "c"),
        norm("n", "b"),
        Step("sum", "add", ("n", "c"), {}),
        bias("b2", "sum"),
        norm("n2", "b2"),
        Step("group", "group_norm", ("n2",), {"features": 4, "groups": 2, "eps": 1e-5}),
        Step("layer", "layer_norm", ("group",), {"features": 1024, "eps": 1e-5}),
        Step("join", "concat", ("layer", "n2"), {}),
        Step("flat", "flatten", ("join",), {}),
        norm("n3", "flat", 2048),
        path=tmp_path / "b.etcl",
    )
    assert list(check(network, bundle, tmp_path / "t.onnx")) == [step.name for step in network.plan.steps]


def test_a_norm_of_the_image_itself_is_a_step(tmp_path: Path) -> None:
    """There is no layer before it to fold it into."""
    network, bundle = learned(
        norm("n", INPUT, 1), conv("c", "n", 1), Step("flat", "flatten", ("c",), {}), path=tmp_path / "b.etcl"
    )
    assert list(check(network, bundle, tmp_path / "t.onnx")) == ["n", "c", "flat"]
