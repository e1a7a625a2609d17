"""What a mask leaves unused is left out, and nobody can tell from the answers."""

from __future__ import annotations

import pytest
import torch
from factories import made_bundle
from torch import Tensor

from etcl_deploy.core.plan import Plan, Step
from etcl_deploy.core.preprocessing import Preprocessing
from etcl_deploy.export.parity import seeded_images
from etcl_deploy.export.prune import PrunedLayer, prune
from etcl_deploy.runtime.subnet import Subnet, materialize

CHANCE = torch.Generator().manual_seed(0)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=CHANCE)


def conv(name: str, of: str, inputs: int, outputs: int, padding: int = 1, groups: int = 1) -> Step:
    kernel = 3 if padding else 1
    sizes = {"in": inputs, "out": outputs, "kernel": kernel, "stride": 1, "padding": padding, "dilation": 1}
    return Step(name, "conv2d", (of,), {**sizes, "groups": groups})


def subnet(steps: list[Step], weights: dict[str, Tensor], features: int) -> Subnet:
    plan = Plan((1, 6, 6), tuple(steps), True)
    assert plan.features == features
    return Subnet(Preprocessing(6, 6, 1), plan, weights, {"weight": random(3, features), "bias": random(3)})


def pruned(before: Subnet) -> tuple[Subnet, list[PrunedLayer]]:
    """The smaller network, once it answers as before."""
    after, report = prune(before)
    pixels = torch.randint(0, 256, (20, 6, 6, 1), generator=CHANCE, dtype=torch.uint8)
    torch.testing.assert_close(after(pixels), before(pixels), rtol=1e-4, atol=1e-4)
    return after, report


@pytest.mark.parametrize("backbone", ["resnet18", "alexnet", "lenet5", "fcn3"])
@pytest.mark.parametrize("density", [0.5, 0.1, 0.02, 0.002])
def test_every_backbone_answers_as_before(backbone: str, density: float) -> None:
    """Down to masks that leave hardly anything; sparser ones are never larger."""
    bundle = made_bundle(1, backbone, 5, 32, density=density)
    before = materialize(bundle, "täsk 0")
    after, report = prune(before)
    pixels = seeded_images(bundle.preprocessing)
    with torch.inference_mode():
        torch.testing.assert_close(after(pixels), before(pixels), rtol=1e-4, atol=1e-4)
    assert [row.layer for row in report] == [step.name for step in before.plan.steps if step.op in ("conv2d", "linear")]
    assert all(0 < row.kept_outputs <= row.outputs and 0 < row.kept_inputs <= row.inputs for row in report)
    if density == 0.002:
        assert sum(row.kept_outputs for row in report) < sum(row.outputs for row in report) / 2


def test_a_channel_nobody_reads_goes() -> None:
    """With the weights that make it."""
    weights = {"a.weight": random(4, 1, 3, 3), "a.bias": random(4), "b.weight": random(2, 4, 3, 3)}
    weights["b.weight"][:, 2] = 0
    steps = [conv("a", "image", 1, 4), Step("r", "relu", ("a",), {}), conv("b", "r", 4, 2)]
    after, report = pruned(subnet([*steps, Step("f", "flatten", ("b",), {})], weights, 72))
    assert [(row.kept_inputs, row.kept_outputs) for row in report] == [(1, 3), (3, 2)]
    assert after.weights["a.weight"].shape == (3, 1, 3, 3)


@pytest.mark.parametrize(("dead", "kept"), [(1, 48), (15, 48), (16, 32), (40, 16)])
def test_a_layer_of_whole_blocks_keeps_whole_blocks(dead: int, kept: int) -> None:
    """Of 48 channels 33 to 47 are as slow as 48, or slower."""
    weights = {"a.weight": random(48, 1, 3, 3), "a.bias": random(48), "b.weight": random(2, 48, 3, 3)}
    weights["b.weight"][:, 3 : 3 + dead] = 0
    steps = [conv("a", "image", 1, 48), Step("r", "relu", ("a",), {}), conv("b", "r", 48, 2)]
    _, report = pruned(subnet([*steps, Step("f", "flatten", ("b",), {})], weights, 72))
    assert (report[0].kept_outputs, report[1].kept_inputs) == (kept, kept)


@pytest.mark.parametrize(("value", "padding", "kept"), [(-1.0, 1, 3), (1.0, 1, 4), (1.0, 0, 3)])
def test_a_channel_that_is_always_the_same_goes_where_its_edge_does_not_show(
    value: float, padding: int, kept: int
) -> None:
    """What reads it gets it into its bias; zeros around a padded map differ from it, unless it is 0 itself."""
    weights = {"a.weight": random(4, 1, 3, 3), "a.bias": random(4)}
    weights["a.weight"][1], weights["a.bias"][1] = 0, value
    weights["b.weight"] = random(2, 4, *([3, 3] if padding else [1, 1]))
    steps = [conv("a", "image", 1, 4), Step("r", "relu", ("a",), {}), conv("b", "r", 4, 2, padding)]
    _, report = pruned(subnet([*steps, Step("f", "flatten", ("b",), {})], weights, 72))
    assert report[1].kept_inputs == kept


def test_both_sides_of_a_sum_keep_the_same_channels() -> None:
    """One side alone could do without."""
    weights = {"a.weight": random(3, 1, 3, 3), "b.weight": random(3, 1, 3, 3), "c.weight": random(2, 3, 3, 3)}
    weights["b.weight"][0] = 0  # always 0, but the sum is not
    weights["a.weight"][2] = weights["b.weight"][2] = 0  # here it is
    steps = [conv("a", "image", 1, 3), conv("b", "image", 1, 3), Step("s", "add", ("a", "b"), {})]
    _, report = pruned(subnet([*steps, conv("c", "s", 3, 2), Step("f", "flatten", ("c",), {})], weights, 72))
    assert [row.kept_outputs for row in report] == [2, 2, 2]
    assert report[2].kept_inputs == 2


@pytest.mark.parametrize(
    ("op", "settings"),
    [("group_norm", {"features": 4, "groups": 2, "eps": 1e-5}), ("layer_norm", {"features": 144, "eps": 1e-5})],
)
def test_channels_that_are_looked_at_together_all_stay(op: str, settings: dict[str, float]) -> None:
    """A mean over channels changes with one of them."""
    size = 4 if op == "group_norm" else 144
    weights = {"a.weight": random(4, 1, 3, 3), "n.weight": random(size), "n.bias": random(size)}
    weights["a.weight"][3] = 0
    steps = [conv("a", "image", 1, 4), Step("n", op, ("a",), settings), Step("f", "flatten", ("n",), {})]
    _, report = pruned(subnet(steps, weights, 144))
    assert report[0].kept_outputs == 4


def test_pools_concatenations_and_groups() -> None:
    """A padded mean sees the edge of a constant; parts of a concatenation shrink each by itself."""
    weights = {
        "a.weight": random(4, 1, 3, 3),
        "a.bias": torch.tensor([1.0, 0.0, 2.0, 3.0]),
        "g.weight": random(4, 1, 3, 3),
        "c.weight": random(2, 8, 1, 1),
    }
    weights["a.weight"][:2] = 0
    weights["c.weight"][:, 5:] = 0
    pool = {"kernel": 3, "stride": 1, "padding": 1}
    steps = [
        conv("a", "image", 1, 4),
        Step("m", "avg_pool2d", ("a",), pool),
        conv("g", "image", 1, 4),
        Step("x", "max_pool2d", ("g",), pool),
        Step("k", "concat", ("m", "x"), {}),
        conv("c", "k", 8, 2, padding=0),
        Step("f", "flatten", ("c",), {}),
    ]
    _, report = pruned(subnet(steps, weights, 72))
    assert {row.layer: row.kept_outputs for row in report} == {"a": 3, "g": 1, "c": 2}
    deep = [conv("a", "image", 1, 4), conv("d", "a", 4, 4, groups=4), Step("f", "flatten", ("d",), {})]
    _, report = pruned(subnet(deep, {"a.weight": weights["a.weight"], "d.weight": weights["g.weight"]}, 144))
    assert [row.kept_outputs for row in report] == [4, 4], "channels of a grouped convolution stay"


def test_a_tensor_that_is_read_twice_and_steps_that_add_or_scale() -> None:
    """Summed with itself, beside itself, through a bias and a norm of its own; no head bias before, one after."""
    weights = {
        "a.weight": random(4, 1, 3, 3),
        "b.weight": torch.tensor([0.0, 1.0, 2.0, 0.5]),
        "n.weight": random(4),
        "n.bias": random(4),
        "c.weight": random(3, 8, 1, 1),
    }
    weights["a.weight"][1] = 0
    weights["c.weight"][:, 2] = weights["c.weight"][:, 6] = 0
    steps = [
        conv("a", "image", 1, 4),
        Step("b", "bias", ("a",), {"features": 4}),
        Step("n", "norm", ("b",), {"features": 4, "eps": 1e-5}),
        Step("s", "add", ("n", "n"), {}),
        Step("k", "concat", ("s", "s"), {}),
        conv("c", "k", 8, 3, padding=0),
        Step("f", "flatten", ("c",), {}),
    ]
    plan = Plan((1, 6, 6), tuple(steps), False)
    after, report = pruned(Subnet(Preprocessing(6, 6, 1), plan, weights, {"weight": random(3, 108)}))
    assert [(row.kept_inputs, row.kept_outputs) for row in report] == [(1, 2), (4, 3)]
    weights["c.weight"][1], weights["a.weight"][:] = 0, 0
    after, _ = pruned(Subnet(Preprocessing(6, 6, 1), plan, weights, {"weight": random(3, 108)}))
    assert "bias" in after.head, "features that never change went into it"


def test_a_network_of_which_nothing_is_left_still_answers() -> None:
    """Every weight masked: the same answer for every image, from one channel a layer."""
    weights = {"a.weight": torch.zeros(4, 1, 3, 3), "a.bias": random(4), "b.weight": torch.zeros(5, 144)}
    steps = [conv("a", "image", 1, 4), Step("f", "flatten", ("a",), {})]
    _, report = pruned(subnet([*steps, Step("b", "linear", ("f",), {"in": 144, "out": 5})], weights, 5))
    assert [row.kept_outputs for row in report] == [1, 1]
