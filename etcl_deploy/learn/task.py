"""A task as the trainer sees it, wherever it came from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Task:
    """A name, its classes, and prepared images: uint8 `[n, height, width, channels]` with int64 labels."""

    name: str
    classes: tuple[str, ...]
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
