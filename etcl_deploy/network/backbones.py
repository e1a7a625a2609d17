"""The networks that ship with the package, as plans: those the paper learns with.

`width` is that of the first layer; the others keep their proportion to it.
"""

from __future__ import annotations

from collections.abc import Callable

from etcl_deploy.core.plan import INPUT, Plan
from etcl_deploy.network.builder import Image, PlanBuilder


def fcn3(image: Image, width: int = 100) -> Plan:
    """in -> width -> width -> head, ReLU."""
    builder = PlanBuilder(image)
    x = builder.add("flatten", "flatten", INPUT)
    for name in ("fc1", "fc2"):
        x = builder.add(f"{name}_relu", "relu", builder.linear(name, x, width))
    return builder.plan(head_bias=True)


def lenet5(image: Image, width: int = 20) -> Plan:
    """Two 5x5 convolutions (20, 50), each with overlapping max pooling, and two linear layers (800, 500)."""
    builder = PlanBuilder(image)
    x = INPUT
    for name, out in (("conv1", width), ("conv2", width * 50 // 20)):
        x = builder.add(f"{name}_relu", "relu", builder.conv(name, x, out, 5, padding=2))
        x = builder.add(f"{name}_pool", "max_pool2d", x, kernel=3, stride=2, padding=1)
    x = builder.add("flatten", "flatten", x)
    for name, out in (("fc1", width * 800 // 20), ("fc2", width * 500 // 20)):
        x = builder.add(f"{name}_relu", "relu", builder.linear(name, x, out))
    return builder.plan(head_bias=True)


def alexnet(image: Image, width: int = 64) -> Plan:
    """Three convolutions (64, 128, 256) and two linear layers (2048), each with normalization and dropout."""
    builder = PlanBuilder(image)
    x = INPUT
    for number, (kernel, percent) in enumerate(((4, 20), (3, 20), (2, 50))):
        name = f"conv{number + 1}"
        x = _normal_relu(builder, name, builder.conv(name, x, width << number, kernel))
        x = builder.add(f"{name}_pool", "max_pool2d", x, kernel=2, stride=2, padding=0)
        x = builder.add(f"{name}_drop", "dropout", x, percent=percent)
    x = builder.add("flatten", "flatten", x)
    for name in ("fc1", "fc2"):
        x = _normal_relu(builder, name, builder.linear(name, x, 32 * width))
        x = builder.add(f"{name}_drop", "dropout", x, percent=50)
    return builder.plan(head_bias=False)


def resnet18(image: Image, width: int = 20) -> Plan:
    """Reduced ResNet-18: 3x3 stem, four stages of two blocks, `width` to `8 * width` channels, 2x2 average."""
    builder = PlanBuilder(image)
    x = builder.add("stem_relu", "relu", _conv_norm(builder, "stem", INPUT, width, 3))
    for stage in range(4):
        for block in range(2):
            x = _basic_block(builder, f"stage{stage + 1}_{block + 1}", x, width << stage, block == 0)
    _, height, wide = builder.shapes[x]
    x = builder.adaptive_pool("pool", "avg_pool2d", x, (min(height, 2), min(wide, 2)))
    builder.add("features", "flatten", x)
    return builder.plan(head_bias=False)


def _normal_relu(builder: PlanBuilder, name: str, x: str) -> str:
    return builder.add(f"{name}_relu", "relu", builder.norm(f"{name}_norm", x))


def _conv_norm(builder: PlanBuilder, name: str, x: str, out: int, kernel: int, stride: int = 1) -> str:
    """A convolution that keeps the size (at stride 1), and its normalization."""
    conv = builder.conv(f"{name}_conv", x, out, kernel, stride=stride, padding=kernel // 2)
    return builder.norm(f"{name}_norm", conv)


def _basic_block(builder: PlanBuilder, name: str, x: str, out: int, first: bool) -> str:
    channels = builder.shapes[x][0]
    stride = 2 if first and channels != out else 1
    y = _conv_norm(builder, f"{name}_a", x, out, 3, stride)
    y = builder.add(f"{name}_a_relu", "relu", y)
    y = _conv_norm(builder, f"{name}_b", y, out, 3)
    shortcut = x if channels == out else _conv_norm(builder, f"{name}_shortcut", x, out, 1, stride)
    y = builder.add(f"{name}_sum", "add", y, shortcut)
    return builder.add(f"{name}_relu", "relu", y)


BACKBONES: dict[str, Callable[..., Plan]] = {"fcn3": fcn3, "lenet5": lenet5, "alexnet": alexnet, "resnet18": resnet18}
