"""SVHN's cropped digits, which come as MATLAB files: `X` of 32 x 32 x 3 x items, `y` from 1 to 10, a zero being 10."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from etcl_deploy.data.source import Part, Source
from etcl_deploy.errors import DataError

CLASSES = tuple(str(numeral) for numeral in range(10))
SHAPE = (32, 32, 3)
MAX_BYTES = 4 << 30  # of one file, packed
MAX_ITEMS = 1_000_000  # of one file, checked before it is unpacked


def read_svhn(folder: Path) -> Source:
    """The makers' two files in a folder."""
    train, test = (_part(folder / f"{part}_32x32.mat") for part in ("train", "test"))
    return Source("svhn", CLASSES, train, test)


def _part(path: Path) -> Part:
    from scipy.io import loadmat, whosmat

    try:
        size = path.stat().st_size
        shapes = {name: shape for name, shape, _ in whosmat(path)} if size <= MAX_BYTES else {}
        items = shapes.get("X", ())[-1:]
        if shapes.get("X") != (*SHAPE, *items) or shapes.get("y") != (*items, 1) or items > (MAX_ITEMS,):
            right = f"X of {[*SHAPE, 'items']} and y of ['items', 1], at most {MAX_ITEMS} items and {MAX_BYTES} bytes"
            raise DataError(f"{path} holds {shapes or f'{size} bytes'}; {right} are right")
        arrays = loadmat(path, variable_names=("X", "y"))
        pixels, labels = arrays["X"], arrays["y"].ravel()
        if not np.isin(labels, np.arange(1, 11)).all():
            raise DataError(f"{path} has labels other than the whole numbers from 1 to 10")
        return Part(np.ascontiguousarray(pixels.transpose(3, 0, 1, 2)), labels.astype(np.int64) % 10)
    except DataError as error:
        raise DataError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    except Exception as error:  # scipy raises whatever its parser meets in a damaged file
        raise DataError(f"{path} is damaged or not SVHN's MATLAB file: {error!r}") from None
