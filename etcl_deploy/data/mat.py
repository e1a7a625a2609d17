"""SVHN's cropped digits, which come as MATLAB files: `X` of 32 x 32 x 3 x items, `y` from 1 to 10, a zero being 10."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from etcl_deploy.data.source import Part, Source
from etcl_deploy.errors import DataError

CLASSES = tuple(str(numeral) for numeral in range(10))


def read_svhn(folder: Path) -> Source:
    """The makers' two files in a folder."""
    train, test = (_part(folder / f"{part}_32x32.mat") for part in ("train", "test"))
    return Source("svhn", CLASSES, train, test)


def _part(path: Path) -> Part:
    from scipy.io import loadmat

    try:
        arrays = loadmat(path, variable_names=("X", "y"))
        pixels, labels = arrays["X"], arrays["y"].ravel().astype(np.int64)
        return Part(np.ascontiguousarray(pixels.transpose(3, 0, 1, 2)), labels % 10)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
    except Exception as error:  # scipy raises whatever its parser meets in a damaged file
        raise DataError(f"{path} is damaged or not SVHN's MATLAB file: {error!r}") from None
