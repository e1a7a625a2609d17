"""Arrays in `.npz` files: `train_x, train_y` and perhaps `test_x, test_y`, `classes` (names), `train_owners,
test_owners` (the owner of each item). Nothing in them is unpickled.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from etcl_deploy.data.source import Part, Source
from etcl_deploy.errors import DataError

MAX_BYTES = 4 << 30  # of one array, checked before it is read
MAX_CLASSES = 100_000

Arrays = Mapping[str, np.ndarray]


def read_npz(path: Path, name: str, classes: Sequence[str] | None = None) -> Source:
    """The source in a file. Without `classes`, there or here, numbers are their names; the test part may be missing."""
    pairs = (("test_x", "test_y"), ("train_owners", "test_owners"))
    arrays = read_arrays(path, ("train_x", "train_y"), (*(name for pair in pairs for name in pair), "classes"))
    for one, other in pairs:
        if (one in arrays) != (other in arrays):
            there, lacking = (one, other) if one in arrays else (other, one)
            raise DataError(f"{path} has {there}, but no {lacking}; both or neither is right")
    try:
        train, test = _part(arrays, "train"), _part(arrays, "test") if "test_x" in arrays else None
        numbers = [part.labels for part in (train, test) if part]
        known = _names(arrays["classes"]) if "classes" in arrays else classes or _numbered(numbers)
        return Source(name, tuple(known), train, test or train.take(np.arange(0)))
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def read_arrays(path: Path, names: Sequence[str], optional: Sequence[str] = ()) -> Arrays:
    """The named arrays of a file, and those of the optional ones that are there."""
    shapes = shapes_in(path)
    missing = [name for name in names if name not in shapes]
    if missing:
        raise DataError(f"{path} has no array {missing[0]!r}; it holds: {', '.join(list(shapes)[:8])}")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in (*names, *optional) if name in shapes}
    except Exception as error:  # zipfile and numpy raise whatever they meet in a damaged file
        raise DataError(f"{path} is damaged or not a .npz file: {error}") from None


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each array of a file, as its header states it; a header that is not true is refused."""
    shapes = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                with archive.open(entry) as file:
                    versions = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
                    shape, _, dtype = versions[npy.read_magic(file)](file)
                    size, start = prod(shape) * dtype.itemsize, file.tell()
                if dtype.hasobject:
                    raise DataError(f"{path}: {entry.filename} holds Python objects, which are never unpickled")
                if size > MAX_BYTES:
                    raise DataError(f"{path}: {entry.filename} has more than the {MAX_BYTES} bytes that are read")
                if size != entry.file_size - start:
                    raise DataError(f"{path}: {entry.filename} states {size} bytes and has {entry.file_size - start}")
                shapes[entry.filename.removesuffix(".npy")] = shape
    except DataError:
        raise
    except Exception as error:  # zipfile and numpy raise whatever they meet in a damaged file
        raise DataError(f"{path} is damaged or not a .npz file: {error!r}") from None
    return shapes


def _part(arrays: Arrays, part: str) -> Part:
    owners = arrays.get(f"{part}_owners")
    if owners is not None and (owners.ndim != 1 or owners.dtype.kind not in "Uiu"):
        raise DataError(f"{part}_owners must be names in a row, not {owners.dtype} {list(owners.shape)}")
    images = _channels_last(arrays[f"{part}_x"])
    return Part(images, arrays[f"{part}_y"], None if owners is None else owners.astype(str))


def _names(classes: np.ndarray) -> list[str]:
    if classes.ndim != 1 or classes.dtype.kind != "U":
        raise DataError(f"classes must be names in a row, not {classes.dtype} {list(classes.shape)}")
    return [str(name) for name in classes]


def _numbered(labels: Sequence[np.ndarray]) -> list[str]:
    count = int(max(numbers.max(initial=0) for numbers in labels)) + 1
    if count > MAX_CLASSES:
        raise DataError(f"there is a label {count - 1}; at most {MAX_CLASSES} classes are read")
    return [str(number) for number in range(count)]


def _channels_last(images: np.ndarray) -> np.ndarray:
    """`[items, height, width, channels]`, also of images with their channels first."""
    if images.ndim == 4 and images.shape[1] in (1, 3) and images.shape[3] not in (1, 3):
        return np.ascontiguousarray(images.transpose(0, 2, 3, 1))
    return images
