"""A network as data: the steps that take an image to its features.

A `Plan` holds no weights and no code. The trainer runs it with masked weights, the runtime with the baked
weights of one task, the ONNX export writes it down as a graph, and a bundle carries it as JSON. All sizes are
concrete, so a plan can be checked before a single tensor is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from torch import Tensor
from torch.nn import functional as F

Shape = tuple[int, ...]
Settings = Mapping[str, int]

INPUT = "image"  # the name under which steps refer to the network's input
MAX_STEPS = 4096
MAX_ELEMENTS = 1 << 26  # of one item's activation, or of one weight
MAX_TOTAL = 1 << 28  # of all of one item's activations, and of all weights


class PlanError(ValueError):
    """A plan that does not describe a network; the message names the step."""


@dataclass(frozen=True)
class Operation:
    """What a kind of step takes, and the shape it gives."""

    inputs: int
    settings: tuple[str, ...]
    shape: Callable[..., Shape]
    weight: Callable[[Settings], Shape] | None = None


def _conv2d(s: Settings, x: Shape) -> Shape:
    channels, height, width = x
    _expect(channels == s["in"], f"{s['in']} channels, not {channels}")
    return (s["out"], *(_slide(size, s, s["padding"]) for size in (height, width)))


def _pool2d(s: Settings, x: Shape) -> Shape:
    channels, height, width = x
    return (channels, _slide(height, s, 0), _slide(width, s, 0))


def _linear(s: Settings, x: Shape) -> Shape:
    _expect(x == (s["in"],), f"{s['in']} features, not {list(x)}")
    return (s["out"],)


def _norm(s: Settings, x: Shape) -> Shape:
    _expect(x[0] == s["features"], f"{s['features']} channels, not {x[0]}")
    return x


def _add(_: Settings, x: Shape, y: Shape) -> Shape:
    _expect(x == y, f"two equal shapes, not {list(x)} and {list(y)}")
    return x


def _slide(size: int, s: Settings, padding: int) -> int:
    _expect(size + 2 * padding >= s["kernel"], f"at least {s['kernel']} pixels, not {size}")
    return (size + 2 * padding - s["kernel"]) // s["stride"] + 1


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise PlanError(f"expects {what}")


OPERATIONS: dict[str, Operation] = {
    "conv2d": Operation(
        1,
        ("in", "out", "kernel", "stride", "padding"),
        _conv2d,
        weight=lambda s: (s["out"], s["in"], s["kernel"], s["kernel"]),
    ),
    "linear": Operation(1, ("in", "out"), _linear, weight=lambda s: (s["out"], s["in"])),
    "norm": Operation(1, ("features",), _norm),
    "relu": Operation(1, (), lambda s, x: x),
    "avg_pool2d": Operation(1, ("kernel", "stride"), _pool2d),
    "flatten": Operation(1, (), lambda s, x: (prod(x),)),
    "add": Operation(2, (), _add),
}

# Steps without state of their own. The rest (convolution, linear, norm) asks whoever runs the plan.
_STATELESS: dict[str, Callable[..., Tensor]] = {
    "relu": lambda s, x: F.relu(x),
    "avg_pool2d": lambda s, x: F.avg_pool2d(x, s["kernel"], s["stride"]),
    "flatten": lambda s, x: x.flatten(1),
    "add": lambda s, x, y: x + y,
}


def weigh(step: Step, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What a convolution or linear step makes of `x` with the given weight."""
    if step.op == "linear":
        return F.linear(x, weight, bias)
    stride, padding = step.settings["stride"], step.settings["padding"]
    if step.settings["kernel"] == 1 and stride > 1 and padding == 0:
        # The same result. oneDNN's weight gradient for strided 1x1 convolutions with fewer than 8 channels
        # writes out of bounds (oneDNN issue 6035): garbage, a crash or a hang, so it is never asked for one.
        x, stride = x[:, :, ::stride, ::stride], 1
    return F.conv2d(x, weight, bias, stride, padding)


@dataclass(frozen=True)
class Step:
    """One operation: its name, what it does, whose results it takes, and its sizes."""

    name: str
    op: str
    inputs: tuple[str, ...]
    settings: Settings

    @property
    def weight_shape(self) -> Shape | None:
        """The shape of the step's weight, or None for a step that has none."""
        weight = OPERATIONS[self.op].weight
        return weight(self.settings) if weight else None


@dataclass(frozen=True)
class Plan:
    """Steps in the order they run; the last one gives the features, to which each task adds its head."""

    input: tuple[int, int, int]  # channels, height, width
    steps: tuple[Step, ...]
    head_bias: bool

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """The shape of every step's result for one item. Raises PlanError where the steps do not fit."""
        if not 0 < len(self.steps) <= MAX_STEPS:
            raise PlanError(f"a plan has 1 to {MAX_STEPS} steps, not {len(self.steps)}")
        shapes: dict[str, Shape] = {INPUT: self.input}
        for step in self.steps:
            try:
                shapes[step.name] = _check(step, shapes)
            except (PlanError, ValueError) as error:
                raise PlanError(f"step {step.name!r} ({step.op}): {error}") from None
        weights = sum(prod(step.weight_shape or (0,)) for step in self.steps)
        if max(sum(prod(shape) for shape in shapes.values()), weights) > MAX_TOTAL:
            raise PlanError(f"the network is larger than {MAX_TOTAL} elements")
        if len(shapes[self.steps[-1].name]) != 1:
            raise PlanError(f"the last step {self.steps[-1].name!r} must give a flat vector")
        return shapes

    @property
    def features(self) -> int:
        """How many features the head sees."""
        return self.shapes[self.steps[-1].name][0]

    @property
    def masked(self) -> tuple[Step, ...]:
        """The steps that have a weight, and so a mask."""
        return tuple(step for step in self.steps if step.weight_shape)

    @property
    def norms(self) -> tuple[Step, ...]:
        """The normalization steps."""
        return tuple(step for step in self.steps if step.op == "norm")

    @cached_property
    def _last_use(self) -> dict[str, str]:
        return {name: step.name for step in self.steps for name in step.inputs}

    def run(self, image: Tensor, apply: Callable[[Step, Tensor], Tensor]) -> Tensor:
        """The features of a batch; `apply` does the steps that have weights or statistics."""
        values = {INPUT: image}
        result = image
        for step in self.steps:
            inputs = [values[name] for name in step.inputs]
            stateless = _STATELESS.get(step.op)
            result = stateless(step.settings, *inputs) if stateless else apply(step, inputs[0])
            values[step.name] = result
            for name in step.inputs:
                if self._last_use[name] == step.name:
                    values.pop(name, None)
        return result

    def as_json(self) -> dict[str, Any]:
        """The plan as plain lists, strings and whole numbers."""
        return {
            "input": list(self.input),
            "head_bias": self.head_bias,
            "steps": [[step.name, step.op, list(step.inputs), dict(step.settings)] for step in self.steps],
        }

    @classmethod
    def from_json(cls, value: Any) -> Plan:
        """The plan that `as_json` described; refuses whatever is not one."""
        try:
            channels, height, width = value["input"]
            plan = cls(
                (channels, height, width),
                tuple(Step(n, op, tuple(i), dict(s)) for n, op, i, s in value["steps"]),
                value["head_bias"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"a plan has input, steps and head_bias ({error!r})") from None
        if type(plan.head_bias) is not bool or not all(_is_size(size) for size in plan.input):
            raise PlanError("input must be three sizes and head_bias true or false")
        _ = plan.shapes
        return plan


def _check(step: Step, shapes: Mapping[str, Shape]) -> Shape:
    """The shape `step` gives, once its name, inputs and settings are known to make sense."""
    if not isinstance(step.name, str) or not step.name or step.name in shapes:
        raise PlanError("a step needs a name of its own")
    operation = OPERATIONS.get(step.op) if isinstance(step.op, str) else None
    if operation is None:
        raise PlanError(f"unknown operation; known: {', '.join(OPERATIONS)}")
    if len(step.inputs) != operation.inputs or any(name not in shapes for name in step.inputs):
        raise PlanError(f"takes {operation.inputs} earlier steps, not {list(step.inputs)}")
    if set(step.settings) != set(operation.settings):
        raise PlanError(f"has the settings {list(operation.settings)}, not {list(step.settings)}")
    for key, value in step.settings.items():
        if not (_is_size(value) or (key == "padding" and value == 0 and type(value) is int)):
            raise PlanError(f"{key} must be a whole number from 1, not {value!r}")
    shape = operation.shape(step.settings, *(shapes[name] for name in step.inputs))
    if max(prod(shape), prod(step.weight_shape or ())) > MAX_ELEMENTS:
        raise PlanError(f"is larger than {MAX_ELEMENTS} elements")
    return shape


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value < 1 << 31
