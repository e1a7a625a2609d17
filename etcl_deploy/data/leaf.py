"""LEAF's JSON: the items of each user of a federated data set, in a train and a test folder of `.json` files.

    {"users": ["a", "b"], "num_samples": [2, 1], "user_data": {"a": {"x": [...], "y": [...]}, "b": ...}}

An `x` is 784 grey values from 0 to 1 (FEMNIST) or the name of an image file (CelebA).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from etcl_deploy.data.source import Part, Source
from etcl_deploy.errors import DataError

SIDE = 28
MAX_BYTES = 2 << 30  # of one file
MAX_CLASSES = 100_000


def read_leaf(folder: Path, name: str, classes: Sequence[str], images: Path | None = None) -> Source:
    """The items of all users, each with its owner; `images` is the folder of the named image files."""
    train, test = (_part(folder / part, images) for part in ("train", "test"))
    return Source(name, tuple(classes), train, test)


def _part(folder: Path, images: Path | None) -> Part:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise DataError(f"{folder} has no .json file; LEAF writes one or more there")
    pictures: list[Any] = []
    labels: list[int] = []
    owners: list[str] = []
    for path in files:
        for owner, x, y in _users(path):
            pictures += [_picture(item, images, path, owner) for item in x]
            labels += y
            owners += [owner] * len(y)
    if images is None:
        pictures = np.stack(pictures) if pictures else np.empty((0, SIDE, SIDE), np.uint8)  # type: ignore[assignment]
    return Part(pictures, np.array(labels, dtype=np.int64), np.array(owners))


def _users(path: Path) -> Iterator[tuple[str, list[Any], list[int]]]:
    """Each user of a file with images and labels."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DataError(f"{path} has more than the {MAX_BYTES} bytes that are read")
        record = json.loads(path.read_bytes())
        if len(set(record["users"])) < len(record["users"]):
            raise DataError(f"{path} names a user twice")
        users = [(owner, record["user_data"][owner]["x"], record["user_data"][owner]["y"]) for owner in record["users"]]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is damaged or not LEAF's JSON: {error!r}") from None
    for owner, x, y in users:
        if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y) or not isinstance(owner, str):
            raise DataError(f"{path}: user {owner!r} needs as many labels (y) as images (x)")
        if not all(type(label) in (int, float) and 0 <= label < MAX_CLASSES and label == int(label) for label in y):
            raise DataError(f"{path}: a label of user {owner!r} is no whole number from 0")
        yield owner, x, [int(label) for label in y]


def _picture(item: Any, images: Path | None, path: Path, owner: str) -> Any:
    """uint8 `[28, 28]` of grey values, or the path of an image file."""
    if images is not None:
        if not isinstance(item, str) or Path(item).name != item:
            raise DataError(f"{path}: user {owner!r} has the image {str(item)[:60]!r}; the name of a file is right")
        return images / item
    try:
        values = np.asarray(item)
    except ValueError:  # rows of different lengths
        values = np.empty(0)
    right = values.shape == (SIDE * SIDE,) and values.dtype.kind in "if"
    if not right or not bool(((values >= 0) & (values <= 1)).all()):
        raise DataError(f"{path}: an image of user {owner!r} is not {SIDE * SIDE} values from 0 to 1")
    return np.rint(values * 255).astype(np.uint8).reshape(SIDE, SIDE)
