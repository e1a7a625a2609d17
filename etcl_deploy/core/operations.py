"""The operations a plan is made of: the settings of each, the shape it gives, and how it runs.

Pure, and without weights: `run` does a step that needs nothing but its inputs, `apply_weight` one that has a weight and
`normalize` one that has a scale and a shift. A rule that is broken is a ValueError; the plan adds the step's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Shape = tuple[int, ...]
Pair = tuple[int, int]  # height and width
StepSettings = Mapping[str, Any]  # each an int, a float or a Pair, as the operation says

MAX_ELEMENTS = 1 << 26  # of one item's activation, or of one weight
MAX_INPUTS = 1024


@dataclass(frozen=True)
class Setting:
    """The values a setting may have; `spec` ends the sentence "must be"."""

    accepts: Callable[[object], bool]
    spec: str


@dataclass(frozen=True)
class Operation:
    """An operation: its settings, its inputs, and the shape it gives."""

    shape: Callable[..., Shape]
    settings: Mapping[str, Setting] = field(default_factory=dict)
    inputs: tuple[int, int] = (1, 1)  # at least and at most
    weight: Callable[[StepSettings], Shape] | None = None
    run: Callable[..., Tensor] | None = None  # None: it needs weights or statistics, or does nothing after learning


def is_size(value: object) -> bool:
    """Whether it is a whole number from 1 that a tensor can have as its size."""
    return type(value) is int and 0 < value < 1 << 31


def as_pair(value: int | Pair) -> Pair:
    """Height and width of a setting that may be one number for both."""
    return value if isinstance(value, tuple) else (value, value)


def fixed_windows(size: Pair, output: Pair) -> tuple[Pair, Pair]:
    """Kernel and stride that pool a map of `size` to `output` as adaptive pooling does, if any do."""
    kernels, strides = zip(*(_fixed_window(n, out) for n, out in zip(size, output, strict=True)), strict=True)
    return kernels, strides


def apply_weight(op: str, s: StepSettings, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The result of a convolution, linear or bias step for `x` with the given weight."""
    if op == "linear":
        return F.linear(x, weight, bias)
    if op == "bias":
        return x + along_channels(weight, x)
    stride, padding = as_pair(s["stride"]), as_pair(s["padding"])
    if as_pair(s["kernel"]) == (1, 1) and stride != (1, 1):
        # The same result. oneDNN's weight gradient for strided 1x1 convolutions with fewer than 8 channels
        # writes out of bounds (oneDNN issue 6035): garbage, a crash or a hang, so it is never asked for one.
        (high, wide), (rows, columns) = padding, stride
        x = F.pad(x, (wide, wide, high, high))[:, :, ::rows, ::columns]
        stride, padding = (1, 1), (0, 0)
    return F.conv2d(x, weight, bias, stride, padding, as_pair(s["dilation"]), s["groups"])


def normalize(op: str, s: StepSettings, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """The result of a normalization step for `x`; batch statistics are already part of scale and shift."""
    if op == "group_norm":
        return F.group_norm(x, s["groups"], scale, shift, s["eps"])
    if op == "layer_norm":
        return F.layer_norm(x.flatten(1), (s["features"],), scale, shift, s["eps"]).view(x.shape)
    return x * along_channels(scale, x) + along_channels(shift, x)


def along_channels(values: Tensor, x: Tensor) -> Tensor:
    """A value for every channel, in the shape that goes with `x`."""
    return values.view((1, -1) + (1,) * (x.ndim - 2))


def _fixed_window(size: int, output: int) -> Pair:
    # Window i of adaptive pooling is [floor(i * size / output), ceil((i + 1) * size / output)).
    windows = [(i * size // output, -(-(i + 1) * size // output)) for i in range(output)]
    kernel, stride = windows[0][1], windows[1][0] if output > 1 else size
    uniform = all(window == (i * stride, i * stride + kernel) for i, window in enumerate(windows))
    _expect(stride > 0 and uniform, f"windows of one size; {size} pixels do not divide into {output} such")
    return kernel, stride


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"expects {what}")


def _same(_: StepSettings, x: Shape) -> Shape:
    return x


def _conv2d(s: StepSettings, x: Shape) -> Shape:
    channels, height, width = _image(x)
    _expect(channels == s["in"], f"{s['in']} channels, not {channels}")
    _expect(s["in"] % s["groups"] == s["out"] % s["groups"] == 0, f"groups that divide {s['in']} and {s['out']}")
    (high, wide) = as_pair(s["padding"])
    _expect(channels * (height + 2 * high) * (width + 2 * wide) <= MAX_ELEMENTS, "less padding")
    return (s["out"], *_slide((height, width), s, as_pair(s["dilation"])))


def _pool2d(s: StepSettings, x: Shape) -> Shape:
    channels, height, width = _image(x)
    pairs = zip(as_pair(s["padding"]), as_pair(s["kernel"]), strict=True)
    _expect(all(2 * padding <= kernel for padding, kernel in pairs), "padding of at most half the kernel")
    return (channels, *_slide((height, width), s, (1, 1)))


def _slide(size: Pair, s: StepSettings, dilation: Pair) -> Pair:
    """The number of places a window has in a map of `size`."""
    counts = []
    windows = zip(size, as_pair(s["kernel"]), as_pair(s["stride"]), as_pair(s["padding"]), dilation, strict=True)
    for pixels, kernel, stride, padding, spread in windows:
        reach = spread * (kernel - 1) + 1
        _expect(pixels + 2 * padding >= reach, f"at least {reach - 2 * padding} pixels, not {pixels}")
        counts.append((pixels + 2 * padding - reach) // stride + 1)
    return counts[0], counts[1]


def _image(x: Shape) -> Shape:
    _expect(len(x) == 3, f"channels, height and width, not {list(x)}")
    return x


def _linear(s: StepSettings, x: Shape) -> Shape:
    _expect(x == (s["in"],), f"{s['in']} features, not {list(x)}")
    return (s["out"],)


def _channels(s: StepSettings, x: Shape) -> Shape:
    _expect(x[0] == s["features"], f"{s['features']} channels, not {x[0]}")
    return x


def _group_norm(s: StepSettings, x: Shape) -> Shape:
    _expect(s["features"] % s["groups"] == 0, f"groups that divide {s['features']} channels")
    _expect(prod(x) > s["groups"], "more than one value in a group")
    return _channels(s, x)


def _layer_norm(s: StepSettings, x: Shape) -> Shape:
    _expect(prod(x) == s["features"], f"{s['features']} elements, not {prod(x)}")
    return x


def _add(_: StepSettings, x: Shape, y: Shape) -> Shape:
    _expect(x == y, f"two equal shapes, not {list(x)} and {list(y)}")
    return x


def _concat(_: StepSettings, *inputs: Shape) -> Shape:
    _expect(len({x[1:] for x in inputs}) == 1, f"equal shapes but for channels, not {[list(x) for x in inputs]}")
    return (sum(x[0] for x in inputs), *inputs[0][1:])


def _pairwise(accepts: Callable[[object], bool]) -> Callable[[object], bool]:
    """Accepts one value, or a tuple of two."""
    return lambda v: all(map(accepts, v)) and len(v) == 2 if isinstance(v, tuple) else accepts(v)


def _between(low: float, high: float) -> Setting:
    return Setting(lambda v: type(v) is float and low <= v <= high, f"a number from {low} to {high} with a point")


_SIZE = Setting(is_size, "a whole number from 1")
_SIZES = Setting(_pairwise(is_size), "a whole number from 1, or two of them")
_PADDING = Setting(_pairwise(lambda v: is_size(v) or (type(v) is int and v == 0)), "a whole number from 0, or two")
_PERCENT = Setting(lambda v: type(v) is int and 1 <= v <= 99, "a whole number from 1 to 99")
_EPS = _between(1e-12, 1.0)
_WINDOW = {"kernel": _SIZES, "stride": _SIZES, "padding": _PADDING}

OPERATIONS: dict[str, Operation] = {
    "conv2d": Operation(
        _conv2d,
        {"in": _SIZE, "out": _SIZE, **_WINDOW, "dilation": _SIZES, "groups": _SIZE},
        weight=lambda s: (s["out"], s["in"] // s["groups"], *as_pair(s["kernel"])),
    ),
    "linear": Operation(_linear, {"in": _SIZE, "out": _SIZE}, weight=lambda s: (s["out"], s["in"])),
    "bias": Operation(_channels, {"features": _SIZE}, weight=lambda s: (s["features"],)),
    "norm": Operation(_channels, {"features": _SIZE, "eps": _EPS}),
    "group_norm": Operation(_group_norm, {"features": _SIZE, "groups": _SIZE, "eps": _EPS}),
    "layer_norm": Operation(_layer_norm, {"features": _SIZE, "eps": _EPS}),
    "dropout": Operation(_same, {"percent": _PERCENT}),
    "relu": Operation(_same, run=lambda s, x: F.relu(x)),
    "relu6": Operation(_same, run=lambda s, x: F.relu6(x)),
    "leaky_relu": Operation(_same, {"slope": _between(-10.0, 10.0)}, run=lambda s, x: F.leaky_relu(x, s["slope"])),
    "elu": Operation(_same, {"alpha": _between(0.0, 100.0)}, run=lambda s, x: F.elu(x, s["alpha"])),
    "gelu": Operation(_same, run=lambda s, x: F.gelu(x)),
    "silu": Operation(_same, run=lambda s, x: F.silu(x)),
    "hardswish": Operation(_same, run=lambda s, x: F.hardswish(x)),
    "tanh": Operation(_same, run=lambda s, x: x.tanh()),
    "sigmoid": Operation(_same, run=lambda s, x: x.sigmoid()),
    "max_pool2d": Operation(_pool2d, _WINDOW, run=lambda s, x: F.max_pool2d(x, s["kernel"], s["stride"], s["padding"])),
    "avg_pool2d": Operation(_pool2d, _WINDOW, run=lambda s, x: F.avg_pool2d(x, s["kernel"], s["stride"], s["padding"])),
    "flatten": Operation(lambda s, x: (prod(x),), run=lambda s, x: x.flatten(1)),
    "add": Operation(_add, inputs=(2, 2), run=lambda s, x, y: x + y),
    "concat": Operation(_concat, inputs=(2, MAX_INPUTS), run=lambda s, *inputs: torch.cat(inputs, 1)),
}
NORMS = ("norm", "group_norm", "layer_norm")  # of these only the first keeps statistics
