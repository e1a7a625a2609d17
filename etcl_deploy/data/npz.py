"""Arrays in `.npz` files: `train_x, train_y` and perhaps `test_x, test_y, classes`; nothing in them is unpickled."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from etcl_deploy.data.source import Part, Source
from etcl_deploy.errors import DataError

MAX_BYTES = 16 << 30  # of one array, checked before it is read


def read_npz(path: Path, name: str, classes: Sequence[str] | None = None) -> Source:
    """The source in a file. Without `classes` there or here they are called by their numbers; a test part may lack."""
    arrays = read_arrays(path, ("train_x", "train_y"), optional=("test_x", "test_y", "classes"))
    try:
        train = Part(_channels_last(arrays["train_x"]), arrays["train_y"])
        if "test_x" in arrays and "test_y" in arrays:
            test = Part(_channels_last(arrays["test_x"]), arrays["test_y"])
        else:
            test = train.take(np.arange(0))
        known = tuple(map(str, arrays["classes"].tolist())) if "classes" in arrays else classes
        numbers = np.concatenate([train.labels, test.labels])
        return Source(name, tuple(known or map(str, range(int(numbers.max(initial=0)) + 1))), train, test)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def read_arrays(path: Path, names: Sequence[str], optional: Sequence[str] = ()) -> Mapping[str, np.ndarray]:
    """The named arrays of a file, and those of the optional ones that are there."""
    try:
        with zipfile.ZipFile(path) as archive:
            large = [entry.filename for entry in archive.infolist() if entry.file_size > MAX_BYTES]
        if large:
            raise DataError(f"{path}: {large[0]} has more than the {MAX_BYTES} bytes that are read")
        with np.load(path, allow_pickle=False) as arrays:
            missing = [name for name in names if name not in arrays.files]
            if missing:
                raise DataError(f"{path} has no array {missing[0]!r}; it holds: {', '.join(arrays.files[:8])}")
            return {name: arrays[name] for name in (*names, *optional) if name in arrays.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged or not a .npz file: {error}") from None


def _channels_last(images: np.ndarray) -> np.ndarray:
    """`[items, height, width, channels]`, also of images with their channels first."""
    if images.ndim == 4 and images.shape[1] in (1, 3) and images.shape[3] not in (1, 3):
        return np.ascontiguousarray(images.transpose(0, 2, 3, 1))
    return images
