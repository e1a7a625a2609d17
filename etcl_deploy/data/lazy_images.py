"""Images that do not fit in memory: each batch is read from its files when it is needed.

Processes of their own read ahead of the one that learns. Each holds at most `AHEAD` batches, so memory does not depend
on how many images there are: `(AHEAD * workers + 1)` batches, and the paths.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from etcl_deploy.core.pixels import prepare
from etcl_deploy.core.preprocessing import Preprocessing
from etcl_deploy.core.task import StoredImages
from etcl_deploy.errors import DataError, InputError

AHEAD = 2
MOST_WORKERS = 8


class ImageFiles(StoredImages):
    """Image files, brought to the network's size as they are read."""

    def __init__(self, paths: Sequence[Path] | np.ndarray, preprocessing: Preprocessing) -> None:
        # One block of bytes: counting references, a reading process would copy a list of paths page by page.
        self.paths = paths if isinstance(paths, np.ndarray) else np.array([os.fsencode(path) for path in paths])
        self.preprocessing = preprocessing
        self.shape = torch.Size([len(self.paths), *preprocessing.shape])

    def take(self, chosen: Tensor) -> ImageFiles:
        """Some of them, still on disk."""
        return ImageFiles(self.paths[chosen.cpu().numpy()], self.preprocessing)

    def read(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """The images of every batch of indices; a damaged one is a DataError."""
        workers = min(_workers(), len(batches))
        loader = DataLoader(
            _Batches(self),
            batch_size=None,
            sampler=batches,
            num_workers=workers,
            prefetch_factor=AHEAD if workers else None,
            generator=torch.Generator(),  # nothing is drawn from it; without one torch's own would be
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that a process with threads forks
            batches_read = iter(loader)
        for images in batches_read:
            if isinstance(images, str):
                raise DataError(images)
            yield images


class _Batches(Dataset[Tensor | str]):
    """What a reading process gives: the images of a batch, or a message on the first one that is damaged."""

    def __init__(self, files: ImageFiles) -> None:
        self.files = files

    def __getitem__(self, batch: Tensor) -> Tensor | str:
        paths = self.files.paths[batch.cpu().numpy()]
        images = torch.empty((len(paths), *self.files.preprocessing.shape), dtype=torch.uint8)
        try:
            for image, path in zip(images, paths, strict=True):
                image.copy_(read_file(Path(os.fsdecode(path)), self.files.preprocessing))
        except DataError as error:
            return str(error)
        return images


def read_file(path: Path, preprocessing: Preprocessing) -> Tensor:
    """One image file; a damaged one is a DataError."""
    try:
        return prepare(path, preprocessing)
    except InputError as error:
        raise DataError(f"{error}; mend or remove it") from None


def _workers() -> int:
    """Processes that read: as many as there are cores for this one."""
    from joblib import cpu_count  # takes a quarter of a second, and knows the limits of a container

    beside = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # processes that learn on this machine
    return int(max(1, min(MOST_WORKERS, cpu_count() // beside)))
