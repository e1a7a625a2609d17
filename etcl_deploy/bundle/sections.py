"""What a file was found to hold, handed out piece by piece, each checked for what it should be."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from etcl_deploy.bundle.format import DTYPES
from etcl_deploy.bundle.precision import PRECISIONS
from etcl_deploy.plan import Plan

MAX_CLASSES = 100_000


class Sections:
    """The sections nobody has taken yet. Whatever is not as it should be is a ValueError or a KeyError."""

    def __init__(self, sections: Mapping[str, Tensor], precision: str, *, coded: bool) -> None:
        self._left = dict(sections)
        self._precision = precision
        self._coded = coded

    def weights(self, name: str, *shape: int | None) -> Tensor:
        """Numbers in the precision of the bundle; None: however many there are."""
        return self._numbers(name, shape, PRECISIONS[self._precision])

    def numbers(self, name: str, *shape: int) -> Tensor:
        """Numbers in single precision."""
        return self._numbers(name, shape, torch.float32)

    def scale(self, name: str, *shape: int) -> Tensor | None:
        """What rows of int8 are multiplied by; None in other precisions."""
        if self._precision != "int8":
            return None
        found = self.numbers(name, *shape)
        if not (found > 0).all():
            raise ValueError(f"section {name!r} holds a scale that is not above 0")
        return found

    def bits(self, name: str, size: int | None = None) -> Tensor:
        """Bytes that stand for bits."""
        return _fitting(name, self._left.pop(name), (size,), torch.uint8)

    def finish(self) -> None:
        """Make sure that nothing is left."""
        if self._left:
            raise ValueError(f"section {min(self._left)!r} belongs to nothing")

    def _numbers(self, name: str, shape: tuple[int | None, ...], dtype: torch.dtype) -> Tensor:
        if self._coded:
            tensor = _decoded(name, self.bits(name), shape, dtype)
        else:
            tensor = _fitting(name, self._left.pop(name), shape, dtype)
        if dtype.is_floating_point and not tensor.isfinite().all():
            raise ValueError(f"section {name!r} holds numbers that are not finite")
        return tensor


def as_section(numbers: Tensor, *, coded: bool) -> Tensor:
    """How numbers are kept: coded, or as they are."""
    if not coded:
        return numbers
    from etcl_deploy.bundle import values  # needs numpy, which a server may lack

    return as_tensor(values.encode(numbers))


def as_tensor(data: bytes) -> Tensor:
    """Bytes as a section holds them."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _decoded(name: str, data: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype) -> Tensor:
    from etcl_deploy.bundle import values

    try:
        flat = values.decode(data.numpy().tobytes(), dtype)
    except ValueError as error:
        raise ValueError(f"section {name!r}: {error}") from None
    right = [-1 if size is None else size for size in shape]
    return _fitting(name, flat.view(right) if -1 in right or flat.numel() == prod(right) else flat, shape, dtype)


def _fitting(name: str, tensor: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype) -> Tensor:
    fits = len(shape) == tensor.ndim and all(n in (None, m) for n, m in zip(shape, tensor.shape, strict=True))
    if not fits or tensor.dtype != dtype:
        right = [size if size is not None else "any" for size in shape]
        raise ValueError(f"section {name!r} should be {DTYPES[dtype]} {right}")
    return tensor


def read_head(left: Sections, prefix: str, classes: int, plan: Plan) -> dict[str, Tensor]:
    """The head of a task: its weight; a bias, if the plan has one; with int8 the scale of every row."""
    head = {"weight": left.weights(f"{prefix}/head/weight", classes, plan.features)}
    if plan.head_bias:
        head["bias"] = left.numbers(f"{prefix}/head/bias", classes)
    rows = left.scale(f"{prefix}/head/scale", classes)
    return head if rows is None else {**head, "scale": rows}


def expect_keys(value: Any, *keys: str) -> None:
    """Refuse what is not an object with exactly these keys."""
    if not isinstance(value, dict) or set(value) != set(keys):
        raise ValueError(f"expected an object with exactly the keys {', '.join(keys)}")


def task_entry(value: Any) -> dict[str, Any]:
    """What the manifest says of a task, each of exactly its type and in its range."""
    expect_keys(value, "name", "classes", "density", "accuracy", "learned")
    name, classes, density = value["name"], value["classes"], value["density"]
    texts = [name, *classes] if isinstance(classes, list) else [None]
    if not all(isinstance(text, str) and text and text.encode() for text in texts):
        raise ValueError("a task needs a name and a list of class names")
    if not 1 <= len(classes) <= MAX_CLASSES or len(set(classes)) != len(classes):
        raise ValueError(f"task {name!r} needs 1 to {MAX_CLASSES} different classes")
    if type(density) is not float or not 0 <= density <= 1:
        raise ValueError(f"task {name!r} has density {density!r}; it lies between 0.0 and 1.0")
    for key in ("accuracy", "learned"):
        known = value[key]
        if known is not None and (type(known) is not float or not 0 <= known <= 100):
            raise ValueError(f"task {name!r} has {key} {known!r}; it lies between 0.0 and 100.0, or is null")
    return {**value, "classes": tuple(classes)}
