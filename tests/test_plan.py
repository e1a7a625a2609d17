from __future__ import annotations

import copy
from math import prod
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from etcl_deploy.core.operations import apply_weight
from etcl_deploy.core.plan import Plan, PlanError, Step
from etcl_deploy.network.backbones import BACKBONES, resnet18


@pytest.mark.parametrize("name", sorted(BACKBONES))
def test_json_round_trip(name: str) -> None:
    """A plan survives being written as JSON."""
    plan = BACKBONES[name]((3, 32, 32))
    assert Plan.from_json(plan.as_json()) == plan


def test_resnet18_has_the_stated_size() -> None:
    """Width 20 on 32x32 colour images: 1.09 M weights and 640 features."""
    plan = resnet18((3, 32, 32))
    stages = (4 * 20 * 20 * 9, *((w * 2 * w + 3 * (2 * w) ** 2) * 9 + w * 2 * w for w in (20, 40, 80)))
    assert sum(prod(step.weight_shape or ()) for step in plan.masked) == 3 * 20 * 9 + sum(stages) == 1_090_140
    assert plan.features == 640


def test_lenet5_has_the_stated_size() -> None:
    """Convolutions of 20 and 50 channels, linear layers of 800 and 500, nothing normalized."""
    plan = BACKBONES["lenet5"]((3, 32, 32))
    shapes = {step.name: step.weight_shape for step in plan.masked}
    assert shapes == {"conv1": (20, 3, 5, 5), "conv2": (50, 20, 5, 5), "fc1": (800, 50 * 8 * 8), "fc2": (500, 800)}
    assert (plan.features, plan.head_bias, plan.norms, plan.dropouts) == (500, True, (), ())


def test_alexnet_has_the_stated_size() -> None:
    """Convolutions of 64, 128 and 256 channels, two linear layers of 2048, each normalized and dropped from."""
    plan = BACKBONES["alexnet"]((3, 32, 32))
    shapes = [step.weight_shape for step in plan.masked]
    assert shapes == [(64, 3, 4, 4), (128, 64, 3, 3), (256, 128, 2, 2), (2048, 256 * 2 * 2), (2048, 2048)]
    assert [step.settings["percent"] for step in plan.steps if step.op == "dropout"] == [20, 20, 50, 50, 50]
    assert (plan.features, plan.head_bias, len(plan.norms)) == (2048, False, 5)


def test_images_too_small_for_a_network_name_the_step() -> None:
    """AlexNet's third convolution has nothing left of 12 pixels to look at; LeNet-5 takes any size."""
    with pytest.raises(PlanError, match=r"step 'conv3' \(conv2d\): expects at least 2 pixels, not 1"):
        BACKBONES["alexnet"]((3, 12, 12))
    assert BACKBONES["lenet5"]((1, 1, 1), width=1).features == 25


@pytest.mark.parametrize("image", [(1, 16, 24), (1, 8, 40), (3, 1, 1)])
def test_resnet18_takes_images_that_are_not_square(image: tuple[int, int, int]) -> None:
    """Each side is pooled to two pixels, or stays at one."""
    plan = resnet18(image, width=2)
    *_, height, width = plan.shapes[plan.steps[-1].inputs[0]]
    assert (height, width) == (min(2, -(-image[1] // 8)), min(2, -(-image[2] // 8)))


@pytest.mark.parametrize("stride", [2, (1, 2), (2, 1)])
@pytest.mark.parametrize("channels", [1, 3, 6, 8])
def test_strided_1x1_convolutions_have_the_right_gradient(channels: int, stride: int | tuple[int, int]) -> None:
    """Few channels, channels last: the case in which the library underneath computes garbage."""
    sizes = {"in": channels, "out": 12, "kernel": 1, "stride": stride, "padding": 0, "dilation": 1, "groups": 1}
    x = torch.randn(8, channels, 16, 16).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(12, channels, 1, 1, requires_grad=True)
    exact = weight.detach().double().requires_grad_()
    apply_weight("conv2d", sizes, x, weight).square().sum().backward()
    F.conv2d(x.double(), exact, None, stride).square().sum().backward()
    assert weight.grad is not None and exact.grad is not None
    torch.testing.assert_close(weight.grad.double(), exact.grad, rtol=1e-4, atol=1e-4)


def test_a_network_too_large_as_a_whole_is_refused() -> None:
    """No step is too large by itself, all together are."""
    sizes = {"in": 1, "out": 8, "kernel": 1, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    steps = [Step(f"c{number}", "conv2d", ("image",), sizes) for number in range(9)]
    plan = Plan((1, 2048, 2048), (*steps, Step("f", "flatten", ("c0",), {})), head_bias=False)
    with pytest.raises(PlanError, match="the network is larger than"):
        _ = plan.shapes


def damage(path: list[Any], value: Any) -> Any:
    plan = copy.deepcopy(resnet18((1, 16, 16), width=2).as_json())
    target = plan
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    return plan


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (["input"], [1, 16], "plan has input"),
        (["input", 0], 3, "channels"),
        (["input", 1], -4, "three sizes"),
        (["head_bias"], 1, "true or false"),
        (["steps"], [], "1 to 4096 steps"),
        (["steps", 0, 0], "stem_norm", "name of its own"),
        (["steps", 0, 2], ["stem_norm"], "earlier steps"),
        (["steps", 0, 2], [], "earlier steps"),
        (["steps", -1, 1], "relu", "flat vector"),
    ],
)
def test_what_is_not_a_network_is_refused(path: list[Any], value: Any, reason: str) -> None:
    """Every way a plan can be wrong is found before anything is allocated."""
    with pytest.raises(PlanError, match=reason):
        Plan.from_json(damage(path, value))
