"""A network as data: the steps that take an image to its features.

A `Plan` holds no weights and no code. The trainer runs it with masked weights, the runtime with the baked
weights of one task, the ONNX export writes it down as a graph, and a bundle carries it as JSON. All sizes are
concrete, so a plan can be checked before a single tensor is allocated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from torch import Tensor

from etcl_deploy.core.operations import MAX_ELEMENTS, NORMS, OPERATIONS, Shape, StepSettings, is_size

INPUT = "image"  # the name under which steps refer to the network's input
MAX_STEPS = 4096
MAX_TOTAL = 1 << 28  # of all of one item's activations, and of all weights


class PlanError(ValueError):
    """A plan that does not describe a network; the message names the step."""


@dataclass(frozen=True)
class Step:
    """One step: its name, its operation, the steps whose results it takes, and its settings."""

    name: str
    op: str
    inputs: tuple[str, ...]
    settings: StepSettings

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
            shapes[step.name] = shape_of(step, shapes)
        weights = sum(prod(step.weight_shape or (0,)) for step in self.steps)
        if max(sum(prod(shape) for shape in shapes.values()), weights) > MAX_TOTAL:
            raise PlanError(f"the network is larger than {MAX_TOTAL} elements")
        last = self.steps[-1].name
        if len(shapes[last]) != 1:
            raise PlanError(f"the last step {last!r} must give a flat vector")
        unread = [name for name in shapes if name not in self._last_use and name != last]
        if unread:
            raise PlanError(f"nothing reads step {unread[0]!r}")
        return shapes

    @property
    def features(self) -> int:
        """The number of features the head sees."""
        return self.shapes[self.steps[-1].name][0]

    @property
    def masked(self) -> tuple[Step, ...]:
        """The steps that have a weight, and so a mask."""
        return tuple(step for step in self.steps if step.weight_shape)

    @property
    def norms(self) -> tuple[Step, ...]:
        """The normalization steps."""
        return tuple(step for step in self.steps if step.op in NORMS)

    @property
    def dropouts(self) -> tuple[str, ...]:
        """The names of the steps that only learning needs."""
        return tuple(step.name for step in self.steps if step.op == "dropout")

    @cached_property
    def chains(self) -> dict[str, tuple[Step, ...]]:
        """For every layer the bias and batch norm steps that follow it, with nothing else reading in between."""
        chains: dict[str, list[Step]] = {step.name: [] for step in self.masked if step.op != "bias"}
        readers = Counter(name for step in self.steps for name in step.inputs)
        layer_of: dict[str, str] = {}
        for step in self.steps:
            layer = layer_of.get(step.inputs[0], step.inputs[0])
            if step.op in ("bias", "norm") and layer in chains and readers[step.inputs[0]] == 1:
                layer_of[step.name] = layer
                chains[layer].append(step)
        return {layer: tuple(chain) for layer, chain in chains.items()}

    def head_shapes(self, classes: int) -> dict[str, Shape]:
        """The shapes of a task's head, in the order its random numbers are drawn."""
        shapes: dict[str, Shape] = {"weight": (classes, self.features)}
        return {**shapes, "bias": (classes,)} if self.head_bias else shapes

    @cached_property
    def _last_use(self) -> dict[str, str]:
        return {name: step.name for step in self.steps for name in step.inputs}

    def without(self, names: Collection[str]) -> Plan:
        """The plan without these steps of one input; the steps that read them read that input instead."""
        source: dict[str, str] = {}
        kept = []
        for step in self.steps:
            inputs = tuple(source.get(name, name) for name in step.inputs)
            if step.name in names:
                (source[step.name],) = inputs
            else:
                kept.append(Step(step.name, step.op, inputs, step.settings))
        return Plan(self.input, tuple(kept), self.head_bias)

    def run(self, image: Tensor, apply: Callable[[Step, Tensor], Tensor]) -> Tensor:
        """The features of a batch; `apply` does the steps that have weights or statistics."""
        values = {INPUT: image}
        result = image
        for step in self.steps:
            inputs = [values[name] for name in step.inputs]
            stateless = OPERATIONS[step.op].run
            result = stateless(step.settings, *inputs) if stateless else apply(step, inputs[0])
            values[step.name] = result
            for name in step.inputs:
                if self._last_use[name] == step.name:
                    values.pop(name, None)
        return result

    def as_json(self) -> dict[str, Any]:
        """The plan as plain lists, strings and numbers."""
        return {
            "input": list(self.input),
            "head_bias": self.head_bias,
            "steps": [
                [
                    step.name,
                    step.op,
                    list(step.inputs),
                    {key: list(v) if isinstance(v, tuple) else v for key, v in step.settings.items()},
                ]
                for step in self.steps
            ],
        }

    @classmethod
    def from_json(cls, value: Any) -> Plan:
        """The plan that `as_json` described; refuses whatever is not one."""
        try:
            if set(value) != {"input", "steps", "head_bias"}:
                raise KeyError(*value)
            channels, height, width = value["input"]
            plan = cls(
                (channels, height, width),
                tuple(Step(name, op, tuple(i), _settings(s)) for name, op, i, s in value["steps"]),
                value["head_bias"],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"a plan has input, steps and head_bias ({error!r})") from None
        if type(plan.head_bias) is not bool or not all(is_size(size) for size in plan.input):
            raise PlanError("input must be three sizes and head_bias true or false")
        _ = plan.shapes
        return plan


def shape_of(step: Step, shapes: Mapping[str, Shape]) -> Shape:
    """The shape `step` gives after steps that gave `shapes`. Raises PlanError if it does not fit there."""
    try:
        return _checked(step, shapes)
    except ValueError as error:
        raise PlanError(f"step {step.name!r} ({step.op}): {error}") from None


def _settings(value: Mapping[str, Any]) -> StepSettings:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in value.items()}


def _checked(step: Step, shapes: Mapping[str, Shape]) -> Shape:
    if not isinstance(step.name, str) or not step.name or step.name in shapes:
        raise ValueError("a step needs a name of its own")
    operation = OPERATIONS.get(step.op) if isinstance(step.op, str) else None
    if operation is None:
        raise ValueError(f"unknown operation; known: {', '.join(OPERATIONS)}")
    least, most = operation.inputs
    known = all(isinstance(name, str) and name in shapes for name in step.inputs)
    if not known or not least <= len(step.inputs) <= most:
        count = least if least == most else f"{least} to {most}"
        raise ValueError(f"takes {count} earlier steps, not {list(step.inputs)}")
    if set(step.settings) != set(operation.settings):
        raise ValueError(f"has the settings {list(operation.settings)}, not {list(step.settings)}")
    for key, setting in operation.settings.items():
        if not setting.accepts(step.settings[key]):
            raise ValueError(f"{key} must be {setting.spec}, not {step.settings[key]!r}")
    shape = operation.shape(step.settings, *(shapes[name] for name in step.inputs))
    if max(prod(shape), prod(step.weight_shape or ())) > MAX_ELEMENTS:
        raise ValueError(f"is larger than {MAX_ELEMENTS} elements")
    return shape
