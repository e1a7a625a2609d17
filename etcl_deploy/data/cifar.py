"""CIFAR-10 and CIFAR-100 in their binary version: records of one or two label bytes and 3 x 32 x 32 pixels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from etcl_deploy.data.source import Part, Source
from etcl_deploy.errors import DataError

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
MAX_RECORDS = 1_000_000  # of one file


def read_cifar10(folder: Path) -> Source:
    """CIFAR-10 from the folder its makers' binary archive holds."""
    train = [_records(folder / f"data_batch_{number}.bin", 1) for number in range(1, 6)]
    test = _records(folder / "test_batch.bin", 1)
    classes = _names(folder / "batches.meta.txt")
    return Source("cifar10", classes, _part(train), _part([test]))


def read_cifar100(folder: Path) -> Source:
    """CIFAR-100 from the folder its makers' binary archive holds, with its 20 superclasses."""
    train, test = _records(folder / "train.bin", 2), _records(folder / "test.bin", 2)
    classes, coarse = _names(folder / "fine_label_names.txt"), _names(folder / "coarse_label_names.txt")
    superclass = dict(zip(train[:, 1].tolist(), train[:, 0].tolist(), strict=True))
    if any(number >= len(coarse) for number in superclass.values()) or set(superclass) != set(range(len(classes))):
        raise DataError(f"{folder / 'train.bin'} does not have the {len(classes)} classes that are named beside it")
    groups = tuple(coarse[superclass[number]] for number in range(len(classes)))
    return Source("cifar100", classes, _part([train]), _part([test]), groups)


def _part(files: Sequence[np.ndarray]) -> Part:
    records = np.concatenate(files)
    pixels = records[:, -PIXELS:].reshape(-1, *SHAPE).transpose(0, 2, 3, 1)
    return Part(np.ascontiguousarray(pixels), records[:, -PIXELS - 1].astype(np.int64))


def _records(path: Path, label_bytes: int) -> np.ndarray:
    """uint8 `[items, label_bytes + 3072]`."""
    length = label_bytes + PIXELS
    try:
        size = path.stat().st_size
        if not size or size % length or size > MAX_RECORDS * length:
            raise DataError(f"{path} is damaged or cut off: {size} bytes are no number of records of {length}")
        return np.fromfile(path, dtype=np.uint8).reshape(-1, length)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def _names(path: Path) -> tuple[str, ...]:
    try:
        return tuple(line.strip() for line in path.read_text("utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
