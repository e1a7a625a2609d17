from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from factories import make_tasks
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from etcl_deploy.config import Learning
from etcl_deploy.core.operations import NORMS, OPERATIONS, apply_weight, fixed_windows, normalize
from etcl_deploy.core.plan import INPUT, Plan, PlanError, Step
from etcl_deploy.core.preprocessing import Preprocessing
from etcl_deploy.learn.trainer import learn_sequence
from etcl_deploy.network.distributed import Batch
from etcl_deploy.network.layers import MaskedLayer
from etcl_deploy.network.masked_network import MaskedNetwork
from etcl_deploy.network.norms import TaskNorm
from etcl_deploy.runtime.arrangement import open_session
from etcl_deploy.runtime.onnx_graph import _COMPOSED, _NAMED, Graph, as_model, write_network

WINDOW = {"kernel": (3, 2), "stride": (2, 1), "padding": (1, 0)}
CONV: dict[str, Any] = {"in": 4, "out": 6, **WINDOW, "dilation": (1, 3), "groups": 2}
NORM: dict[str, Any] = {"features": 4, "eps": 1e-3}

STATELESS: list[tuple[str, dict[str, Any], Any]] = [
    ("relu", {}, F.relu),
    ("relu6", {}, F.relu6),
    ("leaky_relu", {"slope": 0.2}, lambda x: F.leaky_relu(x, 0.2)),
    ("elu", {"alpha": 0.7}, lambda x: F.elu(x, 0.7)),
    ("gelu", {}, F.gelu),
    ("silu", {}, F.silu),
    ("hardswish", {}, F.hardswish),
    ("tanh", {}, torch.tanh),
    ("sigmoid", {}, torch.sigmoid),
    ("max_pool2d", WINDOW, nn.MaxPool2d((3, 2), (2, 1), (1, 0))),
    ("avg_pool2d", WINDOW, nn.AvgPool2d((3, 2), (2, 1), (1, 0))),
    ("avg_pool2d", {"kernel": 3, "stride": 2, "padding": 1}, nn.AvgPool2d(3, 2, 1)),
    ("flatten", {}, nn.Flatten()),
    ("add", {}, lambda x: x + x),
    ("concat", {}, lambda x: torch.cat([x, x], 1)),
]


def one_step(op: str, settings: dict[str, Any], image: tuple[int, int, int] = (4, 9, 8)) -> Plan:
    """A plan of one step, flattened."""
    inputs = (INPUT,) * OPERATIONS[op].inputs[0] if op in OPERATIONS else (INPUT,)
    return Plan(image, (Step("s", op, inputs, settings), Step("flat", "flatten", ("s",), {})), head_bias=False)


def noise(*shape: int) -> Tensor:
    return 4 * torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def no_state(step: Step, x: Tensor) -> Tensor:
    raise AssertionError(step)


@pytest.mark.parametrize(("op", "settings", "expected"), STATELESS)
def test_a_step_without_state_is_torchs_own(op: str, settings: dict[str, Any], expected: Any) -> None:
    """Same numbers, the promised shape, and the same plan after a trip through JSON."""
    plan, x = one_step(op, settings), noise(3, 4, 9, 8)
    assert torch.equal(plan.run(x, no_state), expected(x).flatten(1))
    assert plan.shapes["s"] == tuple(expected(x).shape[1:])
    assert Plan.from_json(json.loads(json.dumps(plan.as_json()))) == plan


@pytest.mark.parametrize(("op", "settings", "expected"), STATELESS)
def test_a_step_without_state_is_the_same_in_onnx(op: str, settings: dict[str, Any], expected: Any) -> None:
    """onnxruntime gives torch's numbers for each of them, at any batch size."""
    preprocessing = Preprocessing(9, 8, 3, 0.5, 0.1)  # from -5 to 5
    plan, graph = one_step(op, settings, (3, 9, 8)), Graph()
    graph.add("Identity", [write_network(graph, plan, preprocessing, {})], "features")
    session = open_session(as_model(graph, preprocessing, {"features": plan.features}).SerializeToString(), 1)
    pixels = torch.randint(0, 256, (5, 9, 8, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    for part in (pixels, pixels[:1]):
        (features,) = session.run(None, {"image": part.numpy()})
        wanted = expected(preprocessing.normalize(part)).flatten(1)
        torch.testing.assert_close(torch.from_numpy(features), wanted, rtol=1e-4, atol=1e-5)


def test_every_operation_is_covered_here_and_in_onnx() -> None:
    """A new operation without a test or an ONNX operator fails this one."""
    stateful = {"conv2d", "linear", "bias", "dropout", *NORMS}
    assert {op for op, _, _ in STATELESS} | stateful == set(OPERATIONS)
    assert {*_NAMED, *_COMPOSED} | stateful == set(OPERATIONS)


@pytest.mark.parametrize(
    ("settings", "layer"),
    [
        (CONV, nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 0), (1, 3), groups=2)),
        ({**CONV, "kernel": 1, "stride": (3, 2), "dilation": 1}, nn.Conv2d(4, 6, 1, (3, 2), (1, 0), groups=2)),
        ({**CONV, "out": 4, "kernel": 3, "padding": 1, "dilation": 1, "groups": 4}, None),
    ],
)
def test_a_convolution_is_torchs_own(settings: dict[str, Any], layer: nn.Conv2d | None) -> None:
    """Pairs, dilation, groups, and strided 1x1 with padding, which takes the way around a broken gradient."""
    layer = layer or nn.Conv2d(4, 4, 3, (2, 1), 1, groups=4)
    plan, x = one_step("conv2d", settings), noise(2, 4, 9, 8)
    expected = layer(x)
    assert plan.steps[0].weight_shape == tuple(layer.weight.shape)
    assert plan.shapes["s"] == tuple(expected.shape[1:])
    result = apply_weight("conv2d", settings, x, layer.weight, layer.bias)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert Plan.from_json(json.loads(json.dumps(plan.as_json()))) == plan


def test_bias_and_norms_are_torchs_own() -> None:
    """A vector over channels; batch, group and layer normalization with another epsilon, on maps and on vectors."""
    gamma, beta = noise(4), noise(4) + 1
    for x in (noise(5, 4, 3, 2), noise(5, 4)):
        shape = (1, 4, 1, 1)[: x.ndim]
        assert torch.equal(apply_weight("bias", {"features": 4}, x, beta), x + beta.view(shape))
        assert torch.equal(normalize("norm", NORM, x, gamma, beta), x * gamma.view(shape) + beta.view(shape))
        result = normalize("group_norm", {**NORM, "groups": 2}, x, gamma, beta)
        torch.testing.assert_close(result, F.group_norm(x, 2, gamma, beta, 1e-3))
    x, gamma = noise(5, 4, 3, 2), noise(24)
    expected = F.layer_norm(x, (4, 3, 2), gamma.view(4, 3, 2), None, 1e-3)
    torch.testing.assert_close(
        normalize("layer_norm", {"features": 24, "eps": 1e-3}, x, gamma, torch.zeros(24)), expected
    )


@pytest.mark.parametrize("op", ["group_norm", "layer_norm"])
def test_norms_without_statistics_keep_only_gamma_and_beta(op: str) -> None:
    """They answer alike in training and in use, and a bundle gets gamma and beta as they are."""
    settings = {**NORM, "groups": 2} if op == "group_norm" else {"features": 24, "eps": 1e-3}
    norm, x = TaskNorm(Step("n", op, (INPUT,), settings)), noise(5, 4, 3, 2)
    assert torch.equal(norm.train()(x), norm.eval()(x))
    state = norm.state()
    assert len(state.mean) == len(state.var) == 0
    assert torch.equal(state.as_affine(1e-3), torch.stack([norm.gamma, norm.beta]))


def test_a_bias_starts_at_zero_and_is_masked_like_a_weight() -> None:
    """Its scores are drawn for its own size."""
    layer = MaskedLayer(Step("b", "bias", (INPUT,), {"features": 100}), torch.Generator().manual_seed(0))
    assert not layer.weight.any()
    assert 0.09 < float(layer.scores.detach().abs().max()) <= 0.1
    layer.begin(0.3)
    assert int(layer.freeze().sum()) == 30


def dropping(percent: int = 40) -> MaskedNetwork:
    steps = (
        Step("flat", "flatten", (INPUT,), {}),
        Step("drop", "dropout", ("flat",), {"percent": percent}),
        Step("fc", "linear", ("drop",), {"in": 1024, "out": 8}),
        Step("norm", "norm", ("fc",), {"features": 8, "eps": 1e-5}),
        Step("last", "dropout", ("norm",), {"percent": percent}),
    )
    plan = Plan((1, 32, 32), steps, head_bias=True)
    return MaskedNetwork(plan, Preprocessing(32, 32, 1), 0.5, torch.Generator().manual_seed(0))


def test_dropout_drops_its_share_while_learning_and_only_then() -> None:
    """From the batch's generator: same seed, same elements; what is kept is scaled up."""
    steps = (Step("flat", "flatten", (INPUT,), {}), Step("drop", "dropout", ("flat",), {"percent": 40}))
    network = MaskedNetwork(
        Plan((1, 50, 50), steps, head_bias=True), Preprocessing(50, 50, 1), 0.5, torch.Generator().manual_seed(0)
    )
    images = torch.full((20, 50, 50, 1), 255, dtype=torch.uint8)
    labels, generator = torch.zeros(20, dtype=torch.int64), torch.Generator().manual_seed(7)
    batch, state = Batch(images, labels, 20, generator), torch.get_rng_state()
    one, other = network.train().features(images, batch), network.features(images, batch)
    generator.manual_seed(7)
    assert torch.equal(network.features(images, batch), one) and not torch.equal(other, one)
    assert torch.equal(torch.get_rng_state(), state), "torch's own randomness is left alone"
    whole = network.eval().features(images, batch)
    assert bool((whole != 0).all())
    assert float((one == 0).float().mean()) == pytest.approx(0.4, abs=0.01)
    torch.testing.assert_close(one[one != 0], (whole / 0.6)[one != 0])


def test_statistics_are_estimated_with_nothing_dropped() -> None:
    """What normalization sees in use, where nothing is dropped, decides."""
    images = torch.randint(0, 256, (40, 32, 32, 1), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    network = dropping()
    plan = network.plan.without({"drop", "last"})
    plain = MaskedNetwork(plan, network.preprocessing, 0.5, torch.Generator().manual_seed(0))
    norms = []
    for each in (network, plain):
        each.begin("t", ("a", "b"), torch.Generator().manual_seed(0))
        norms.append(each.train().finish([images]).norms["norm"])
        assert not each.training
    assert torch.equal(norms[0].mean, norms[1].mean) and torch.equal(norms[0].var, norms[1].var)


def test_leaving_steps_out_repoints_their_readers() -> None:
    """Also several in a row, and the last one."""
    plan = dropping().plan.without({"drop", "norm", "last"})
    assert [(step.name, step.inputs) for step in plan.steps] == [("flat", (INPUT,)), ("fc", ("flat",))]
    assert plan.features == 8


@pytest.mark.parametrize(("size", "output"), [(7, 1), (7, 2), (8, 4), (16, 5), (5, 5), (9, 4), (1, 1)])
def test_fixed_windows_are_those_of_adaptive_pooling(size: int, output: int) -> None:
    """For every division into windows of one size."""
    kernel, stride = fixed_windows((size, size), (output, output))
    x = noise(2, 3, size, size)
    torch.testing.assert_close(F.avg_pool2d(x, kernel, stride), F.adaptive_avg_pool2d(x, output))


@pytest.mark.parametrize(("size", "output"), [(16, 7), (10, 4), (1, 2), (3, 5)])
def test_uneven_windows_are_refused(size: int, output: int) -> None:
    """Windows of different sizes, or more of them than pixels."""
    with pytest.raises(ValueError, match="do not divide"):
        fixed_windows((size, size), (output, output))


HOSTILE: list[tuple[str, dict[str, Any], str]] = [
    ("conv2d", {**CONV, "groups": 3}, "groups that divide"),
    ("conv2d", {**CONV, "groups": 0}, "groups must be a whole number"),
    ("conv2d", {**CONV, "in": 3}, "3 channels, not 4"),
    ("conv2d", {**CONV, "kernel": [3, 3, 3]}, "kernel must be a whole number"),
    ("conv2d", {**CONV, "kernel": [[3], 3]}, "kernel must be"),
    ("conv2d", {**CONV, "kernel": "33"}, "kernel must be"),
    ("conv2d", {**CONV, "kernel": None}, "kernel must be"),
    ("conv2d", {**CONV, "stride": [1, 0]}, "stride must be"),
    ("conv2d", {**CONV, "stride": [True, 1]}, "stride must be"),
    ("conv2d", {**CONV, "padding": [-1, 1]}, "padding must be"),
    ("conv2d", {**CONV, "padding": 1 << 30, "stride": 1 << 30}, "less padding"),
    ("conv2d", {**CONV, "dilation": 1 << 30}, "at least"),
    ("conv2d", {**CONV, "kernel": 1 << 40}, "kernel must be"),
    ("conv2d", {**CONV, "out": 1 << 30}, "larger than"),
    ("bias", {"features": 5}, "5 channels, not 4"),
    ("bias", {"features": 4.0}, "features must be"),
    ("norm", {"features": 4, "eps": 0.0}, "eps must be"),
    ("norm", {"features": 4, "eps": float("nan")}, "eps must be"),
    ("norm", {"features": 4}, "has the settings"),
    ("group_norm", {**NORM, "groups": 3}, "groups that divide"),
    ("group_norm", {**NORM, "groups": [1, 1]}, "groups must be"),
    ("layer_norm", NORM, "4 elements, not 288"),
    ("max_pool2d", {"kernel": 2, "stride": 1, "padding": 2}, "at most half the kernel"),
    ("avg_pool2d", {"kernel": 99, "stride": 1, "padding": 0}, "at least 99 pixels"),
    ("leaky_relu", {"slope": float("inf")}, "slope must be"),
    ("elu", {"alpha": 1e9}, "alpha must be"),
    ("dropout", {"percent": 0}, "percent must be"),
    ("dropout", {"percent": 100}, "percent must be"),
    ("dropout", {"percent": 0.5}, "percent must be"),
    ("linear", {"in": 288, "out": 2}, "288 features, not"),
    ("relu", {"x": 1}, "has the settings"),
    ("save", {}, "unknown operation"),
]


@pytest.mark.parametrize(("op", "settings", "reason"), HOSTILE)
def test_settings_that_make_no_sense_are_refused(op: str, settings: dict[str, Any], reason: str) -> None:
    """As a PlanError that names the step, whatever a file holds."""
    described = {"input": [4, 9, 8], "head_bias": True, "steps": [["s", op, ["image"], settings]]}
    described["steps"].append(["flat", "flatten", ["s"], {}])
    with pytest.raises(PlanError, match=f"step 's' .*{reason}"):
        Plan.from_json(described)


SINGLE = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from([0, 1, 2, 3, 4, 8])
)
ANYTHING = SINGLE | st.lists(SINGLE, max_size=3) | st.dictionaries(st.text(max_size=3), SINGLE, max_size=2)


@given(data=st.data(), op=st.sampled_from(sorted(OPERATIONS)))
def test_any_settings_give_a_plan_or_a_plan_error(data: st.DataObject, op: str) -> None:
    """Nothing a file can hold leads anywhere else."""
    settings = {key: data.draw(ANYTHING, label=key) for key in OPERATIONS[op].settings}
    inputs = data.draw(ANYTHING | st.lists(st.just("image"), max_size=3))
    steps = [[data.draw(st.just("s") | ANYTHING), op, inputs, settings], ["flat", "flatten", ["s"], {}]]
    try:
        Plan.from_json({"input": [4, 9, 8], "head_bias": True, "steps": steps})
    except PlanError:
        return


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([["c", "concat", ["image"], {}]], "2 to 1024 earlier steps"),
        ([["c", "concat", ["image"] * 2000, {}]], "2 to 1024 earlier steps"),
        ([["f", "flatten", ["image"], {}], ["c", "concat", ["image", "f"], {}]], "equal shapes but for channels"),
        ([["f", "flatten", [["image"]], {}]], "earlier steps"),
        ([["f", "flatten", "image", {}]], "earlier steps"),
        ([["f", "flatten", ["image"], []]], "a plan has"),
        ([["f", "flatten", ["image"], {}], ["g", "flatten", ["image"], {}]], "nothing reads step 'f'"),
    ],
)
def test_steps_that_do_not_fit_together_are_refused(steps: list[Any], reason: str) -> None:
    """Too few or too many inputs, shapes that differ, steps that lead nowhere."""
    with pytest.raises(PlanError, match=reason):
        Plan.from_json({"input": [4, 9, 8], "head_bias": True, "steps": steps})


def test_a_network_of_masked_biases_learns() -> None:
    """A bias that starts at zero does not stay there."""
    steps = (
        Step("flat", "flatten", (INPUT,), {}),
        Step("fc", "linear", ("flat",), {"in": 256, "out": 8}),
        Step("fc_bias", "bias", ("fc",), {"features": 8}),
        Step("relu", "relu", ("fc_bias",), {}),
    )
    plan = Plan((1, 16, 16), steps, head_bias=True)
    network = MaskedNetwork(plan, Preprocessing(16, 16, 1), 0.5, torch.Generator().manual_seed(0))
    learn_sequence(network, make_tasks(1), Learning(epochs=2, batch_size=16))
    assert network.masked_layers["fc_bias"].weight.any()
