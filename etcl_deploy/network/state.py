"""The state of a finished task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from etcl_deploy.network.norms import Norm

Masks = Mapping[str, Tensor]  # by step name, bool, the weight's shape
Head = Mapping[str, Tensor]  # "weight" [classes, features] and, where the plan says so, "bias"


@dataclass(frozen=True)
class TaskState:
    """A finished task: its mask, its normalization and its head, never one without the others."""

    name: str
    classes: tuple[str, ...]
    masks: Masks
    norms: Mapping[str, Norm]
    head: Head
    weights: Mapping[str, Tensor] | None = None  # of a task that shares no backbone with others; by step name
