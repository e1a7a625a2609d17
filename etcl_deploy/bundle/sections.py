"""The sections of a file, taken one by one, each checked against what the manifest and the network ask for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor

from etcl_deploy.bundle.format import DTYPES
from etcl_deploy.bundle.precision import PRECISIONS
from etcl_deploy.core.plan import Plan
from etcl_deploy.errors import BundleError

MAX_CLASSES = 100_000
MAX_TASKS = 65_534


class Sections:
    """The sections that are still to be taken. One that is missing is a KeyError, a wrong one a ValueError."""

    def __init__(self, sections: Mapping[str, Tensor], precision: str, *, coded: bool) -> None:
        self._sections = sections
        self._left = set(sections)
        self._precision = precision
        self._coded = coded

    def weights(self, name: str, *shape: int) -> Tensor:
        """Numbers in the precision of the bundle."""
        return self._numbers(name, shape, PRECISIONS[self._precision])

    def weights_up_to(self, name: str, most: int) -> Tensor:
        """At most `most` coded numbers in the precision of the bundle."""
        return _finite(name, _decoded(name, self.bits(name), PRECISIONS[self._precision], range(most + 1)))

    def numbers(self, name: str, *shape: int) -> Tensor:
        """Numbers in single precision."""
        return self._numbers(name, shape, torch.float32)

    def scale(self, name: str, *shape: int) -> Tensor | None:
        """The factors of rows of int8; None in other precisions."""
        if self._precision != "int8":
            return None
        scale = self.numbers(name, *shape)
        if not ((scale > 0) & (scale * 128).isfinite()).all():
            raise ValueError(f"section {name!r} holds a scale that is not above 0, or beyond single precision")
        return scale

    def bits(self, name: str, size: int | None = None) -> Tensor:
        """A section of bytes, of any size unless one is given."""
        data = self._take(name)
        return _fitting(name, data, (data.numel() if size is None else size,), torch.uint8)

    def finish(self) -> None:
        """Refuse a file of which a section is left."""
        if self._left:
            raise ValueError(f"section {min(self._left)!r} belongs to nothing")

    def _take(self, name: str) -> Tensor:
        self._left.discard(name)
        return self._sections[name]

    def _numbers(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._coded:
            count = prod(shape)
            return _finite(name, _decoded(name, self.bits(name), dtype, range(count, count + 1)).view(shape))
        return _finite(name, _fitting(name, self._take(name), shape, dtype))


def as_section(numbers: Tensor, *, coded: bool) -> Tensor:
    """Numbers as a section holds them: coded, or as they are."""
    if not coded:
        return numbers
    from etcl_deploy.bundle import float_coding  # needs numpy, which a server may lack

    return as_tensor(float_coding.encode(numbers))


def as_tensor(data: bytes) -> Tensor:
    """Bytes as a section holds them."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _decoded(name: str, data: Tensor, dtype: torch.dtype, counts: range) -> Tensor:
    from etcl_deploy.bundle import float_coding

    try:
        return float_coding.decode(data.numpy().data, dtype, counts)
    except ValueError as error:
        raise ValueError(f"section {name!r}: {error}") from None


def _fitting(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if tensor.dtype != dtype or tensor.shape != shape:
        expected = next(text for text, known in DTYPES.items() if known == dtype)
        raise ValueError(f"section {name!r} should be {expected} {list(shape)}")
    return tensor


def _finite(name: str, tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() and not tensor.isfinite().all():
        raise ValueError(f"section {name!r} holds numbers that are not finite")
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


def task_entries(listed: Any) -> list[dict[str, Any]]:
    """The manifest's entries for all tasks, checked."""
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_TASKS:
        count = len(listed) if isinstance(listed, list) else "no list of"
        raise ValueError(f"it holds {count} tasks; 1 to {MAX_TASKS} are right")
    entries = [_task_entry(value) for value in listed]
    if len({entry["name"] for entry in entries}) != len(entries):
        raise ValueError("two tasks have the same name")
    return entries


@contextmanager
def refusing(file: str, kind: str) -> Iterator[None]:
    """Turn an error inside the block into a BundleError that names the file."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise BundleError(f"{file} does not describe a {kind}: {reason}") from None


def _task_entry(value: Any) -> dict[str, Any]:
    """The entry of one task, if each value has exactly its type and lies in its range."""
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
        percent = value[key]
        if percent is not None and (type(percent) is not float or not 0 <= percent <= 100):
            raise ValueError(f"task {name!r} has {key} {percent!r}; it lies between 0.0 and 100.0, or is null")
    return {**value, "classes": tuple(classes)}
