"""Images that come as arrays in `.npz` files, and where those files are."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from etcl_deploy.errors import DataError
from etcl_deploy.preprocessing import Preprocessing
from etcl_deploy.runtime.images import prepare

VARIABLE = "ETCL_DATA"


def data_root(chosen: Path | None = None) -> Path:
    """The folder recipes find their data in: `chosen`, else $ETCL_DATA, else ~/.cache/etcl_deploy."""
    return chosen or Path(os.environ.get(VARIABLE) or Path.home() / ".cache" / "etcl_deploy")


def read_arrays(path: Path, names: Sequence[str]) -> Mapping[str, np.ndarray]:
    """The named arrays of a `.npz` file; nothing in it is unpickled."""
    if not path.is_file():
        raise DataError(f"{path.name} is not in {path.parent}; name its folder with --data-root DIR or {VARIABLE}=DIR")
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [name for name in names if name not in archive.files]
            if missing:
                raise DataError(f"{path} has no array {missing[0]!r}; it holds: {', '.join(archive.files[:8])}")
            return {name: archive[name] for name in names}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged or not a .npz file: {error}") from None


def labels_of(values: np.ndarray, path: Path) -> Tensor:
    """Labels as int64."""
    if values.dtype.kind not in "iu" or values.ndim != 1:
        raise DataError(f"{path}: labels must be whole numbers in a row, not {values.dtype} {list(values.shape)}")
    return torch.from_numpy(values.astype(np.int64))


def prepare_all(images: np.ndarray, preprocessing: Preprocessing) -> Tensor:
    """uint8 `[items, height, width, channels]` from uint8 images `[items, h, w]` or `[items, h, w, c]`."""
    if images.dtype != np.uint8 or images.ndim not in (3, 4):
        raise DataError(f"images must be uint8 [items, height, width], not {images.dtype} {list(images.shape)}")
    pixels = torch.from_numpy(images)
    if pixels.ndim == 3:
        pixels = pixels.unsqueeze(3)
    if pixels.shape[1:] == preprocessing.shape:
        return pixels
    return torch.stack([prepare(image, preprocessing) for image in pixels])
