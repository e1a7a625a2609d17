"""The order in which the weights and norms of all steps of a plan lie in one flat tensor. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from etcl_deploy.core.plan import Plan

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """The flat tensors of a plan: all weights, and all norms, each step by step in the plan's order."""

    plan: Plan

    @cached_property
    def weights(self) -> dict[str, Shape]:
        """The shapes of the steps that have a weight, and so a mask."""
        return {step.name: step.weight_shape or () for step in self.plan.masked}

    @cached_property
    def norms(self) -> dict[str, Shape]:
        """Scale and shift of every normalization step."""
        return {step.name: (2, step.settings["features"]) for step in self.plan.norms}

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The number of weights of each step."""
        return tuple(prod(shape) for shape in self.weights.values())

    @property
    def weight_count(self) -> int:
        """The number of weights of all steps, which a mask covers."""
        return sum(self.layers)

    @property
    def norm_count(self) -> int:
        """The number of values in the norms of a task."""
        return sum(prod(shape) for shape in self.norms.values())

    @cached_property
    def channel_count(self) -> int:
        """The number of output channels of all steps."""
        return sum(shape[0] for shape in self.weights.values())

    def scale_row(self, owner: Tensor, tasks: int) -> Tensor:
        """For each weight the index of its int8 scale: each task has one per output channel, for the weights it owns.

        So no weight of an earlier task is rounded again when a later one comes. Weights nobody owns are 0 at any scale.
        """
        sizes = torch.tensor([prod(shape[1:]) for shape in self.weights.values() for _ in range(shape[0])])
        channel = torch.repeat_interleave(torch.arange(self.channel_count), sizes.long())
        return owner.clamp(max=tasks - 1).long() * self.channel_count + channel


def split(flat: Tensor, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """The parts of a flat tensor, as views."""
    parts = torch.split(flat, [prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def join(tensors: Mapping[str, Tensor], shapes: Mapping[str, Shape]) -> Tensor:
    """The flat tensor that `split` takes apart."""
    return torch.cat([torch.empty(0, dtype=torch.float32), *(tensors[name].flatten() for name in shapes)])
