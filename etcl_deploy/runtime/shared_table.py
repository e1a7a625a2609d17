"""A table of all tasks of a bundle, in the order an engine wants, in one file that processes share by mapping it.

The file holds the weights of the backbone, then a row for every task: its mask in packed bits, then its own numbers.
The first process that needs it makes it from the bundle. It is a cache, not an artifact.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from etcl_deploy.core import atomic

ALIGNMENT = 64  # bytes


class TaskRow(NamedTuple):
    """The mask and the numbers of one task."""

    mask: np.ndarray  # packed bits, uint8
    numbers: np.ndarray  # float32


@dataclass(frozen=True)
class SharedTable:
    """The mapped file: the weights of the backbone, and the mask and numbers of every task."""

    weights: np.ndarray  # float32 [weights]
    masks: np.ndarray  # uint8 [tasks, bytes]
    numbers: np.ndarray  # float32 [tasks, numbers]


def open_table(
    path: Path | None,
    counts: tuple[int, int, int],
    make_weights: Callable[[], np.ndarray],
    make_row: Callable[[int], TaskRow],
) -> SharedTable:
    """The table in `path`, which is made if it is not there; without a path, in a file of no name.

    `counts` are those of weights, of numbers in a row, and of tasks.
    """
    weights, numbers, tasks = counts
    first = _aligned(4 * weights)
    width = _aligned((weights + 7) // 8)
    stride = width + _aligned(4 * numbers)
    size = first + tasks * stride

    def fill(file: BinaryIO) -> None:
        file.truncate(size)
        file.write(make_weights().tobytes())
        for number in range(tasks):
            row = make_row(number)
            file.seek(first + number * stride)
            file.write(row.mask.tobytes())
            file.seek(first + number * stride + width)
            file.write(row.numbers.tobytes())
        file.flush()

    mapped = np.frombuffer(_mapped(path, size, fill), np.uint8)
    rows = mapped[first:].reshape(tasks, stride)
    return SharedTable(
        mapped[: 4 * weights].view(np.float32),
        rows[:, : (weights + 7) // 8],
        rows[:, width : width + 4 * numbers].view(np.float32),
    )


def _mapped(path: Path | None, size: int, fill: Callable[[BinaryIO], None]) -> mmap.mmap:
    if path is None:
        with tempfile.TemporaryFile() as file:
            fill(file)
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    with atomic.locked(path.parent, wait=True):  # the others wait, and then share what the first has made
        if not path.exists():
            with atomic.replacing(path) as temporary, temporary.open("r+b") as file:
                fill(file)
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
