"""All tasks of a bundle in the order an engine wants them, in one file that processes share by mapping it.

The file: the numbers of the backbone, then a row for every task, its mask in packed bits and its few numbers. It is
made from a bundle once, by the first process that needs it; it is a cache, not an artifact.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from etcl_deploy.core import atomic

ALIGNMENT = 64  # bytes

Row = tuple[np.ndarray, np.ndarray]  # packed bits, uint8; numbers, float32


@dataclass(frozen=True)
class Rows:
    """What is mapped: `base` float32 [weights], and for every task `bits` and `numbers`."""

    base: np.ndarray
    bits: np.ndarray  # uint8 [tasks, bytes]
    numbers: np.ndarray  # float32 [tasks, numbers]


def open_rows(
    path: Path | None, weights: int, numbers: int, tasks: int, base: Callable[[], np.ndarray], row: Callable[[int], Row]
) -> Rows:
    """The rows in `path`, made by `base` and `row` where there are none yet; without a path, in a file of no name."""
    first = _aligned(4 * weights)
    width = _aligned((weights + 7) // 8)
    stride = width + _aligned(4 * numbers)
    size = first + tasks * stride

    def fill(file: BinaryIO) -> None:
        file.truncate(size)
        file.write(base().tobytes())
        for number in range(tasks):
            bits, values = row(number)
            file.seek(first + number * stride)
            file.write(bits.tobytes())
            file.seek(first + number * stride + width)
            file.write(values.tobytes())
        file.flush()

    mapped = np.frombuffer(_mapped(path, size, fill), np.uint8)
    table = mapped[first:].reshape(tasks, stride)
    return Rows(
        mapped[: 4 * weights].view(np.float32),
        table[:, : (weights + 7) // 8],
        table[:, width : width + 4 * numbers].view(np.float32),
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
