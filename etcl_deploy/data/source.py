"""Images and labels as every reader returns them: a training and a test part, not yet at the network's size."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from etcl_deploy.core.pixels import prepare
from etcl_deploy.core.preprocessing import Preprocessing
from etcl_deploy.core.task import Task
from etcl_deploy.data.lazy_images import ImageFiles, read_file
from etcl_deploy.errors import DataError

Pictures = np.ndarray | Sequence[Path]


@dataclass(frozen=True)
class Part:
    """Items in a row. Raises DataError if images and labels do not fit."""

    images: Pictures  # uint8 [items, height, width] or [items, height, width, channels]; or image files
    labels: np.ndarray  # int64 [items], each the number of a class
    owners: np.ndarray | None = None  # [items], the owner of each: a writer, a person

    def __post_init__(self) -> None:
        pixels = self.images
        if isinstance(pixels, np.ndarray):
            fits = pixels.ndim == 3 or (pixels.ndim == 4 and pixels.shape[3] in (1, 3))
            if pixels.dtype != np.uint8 or not fits or 0 in pixels.shape[1:]:
                right = "uint8 [items, height, width], perhaps with 1 or 3 channels, is right"
                raise DataError(f"images are {pixels.dtype} {list(pixels.shape)}; {right}")
        if self.labels.dtype.kind not in "iu" or self.labels.ndim != 1:
            kind = f"{self.labels.dtype} {list(self.labels.shape)}"
            raise DataError(f"labels must be whole numbers in a row, not {kind}")
        if len(self.images) != len(self.labels):
            raise DataError(f"there are {len(self.images)} images and {len(self.labels)} labels")

    @classmethod
    def of_files(cls, items: Sequence[tuple[Path, str]], classes: Sequence[str]) -> Part:
        """Image files, each with the name of its class."""
        return cls([path for path, _ in items], np.array([classes.index(name) for _, name in items], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, chosen: np.ndarray) -> Part:
        """The items at the places `chosen` holds, in that order."""
        if isinstance(self.images, np.ndarray):
            images: Pictures = self.images[chosen]
        else:
            images = [self.images[place] for place in chosen]
        return Part(images, self.labels[chosen], None if self.owners is None else self.owners[chosen])


@dataclass(frozen=True)
class Source:
    """A data set, or the part of one that is a task."""

    name: str
    classes: tuple[str, ...]
    train: Part
    test: Part
    groups: tuple[str, ...] | None = None  # the superclass of each class

    def __post_init__(self) -> None:
        for what, part in (("training", self.train), ("test", self.test)):
            if len(part) and not 0 <= int(part.labels.min()) <= int(part.labels.max()) < len(self.classes):
                wrong = next(int(label) for label in part.labels if not 0 <= label < len(self.classes))
                raise DataError(
                    f"{self.name} has the {what} label {wrong}, but only {len(self.classes)} classes (from 0)"
                )

    def of_classes(self, chosen: Sequence[int], name: str) -> Source:
        """The items of some classes, which are numbered anew in the order given."""
        number = np.full(len(self.classes), -1)
        number[list(chosen)] = np.arange(len(chosen))

        def kept(part: Part) -> Part:
            taken = part.take(np.flatnonzero(np.isin(part.labels, chosen)))
            return replace(taken, labels=number[taken.labels])

        return Source(name, tuple(self.classes[c] for c in chosen), kept(self.train), kept(self.test))

    def of_owner(self, owner: str) -> Source:
        """The items of one owner."""
        train, test = (part.take(np.flatnonzero(part.owners == owner)) for part in (self.train, self.test))
        return Source(owner, self.classes, train, test)

    def sampled(self, items: int | None, test_items: int | None, generator: torch.Generator) -> Source:
        """At most so many items of each part, drawn at random; None keeps all as they are."""

        def drawn(part: Part, count: int | None) -> Part:
            if count is None or count >= len(part):
                return part
            return part.take(torch.randperm(len(part), generator=generator)[:count].numpy())

        return replace(self, train=drawn(self.train, items), test=drawn(self.test, test_items))

    def file_bytes(self, preprocessing: Preprocessing) -> int:
        """Bytes its image files take in memory at the network's size; 0 if it has none."""
        files = (part for part in (self.train, self.test) if not isinstance(part.images, np.ndarray))
        return sum(len(part) for part in files) * prod(preprocessing.shape)

    def prepared(self, preprocessing: Preprocessing, *, stored: bool = False) -> Task:
        """The source as a task, its images at the network's size; with `stored`, image files are read when needed."""
        x, test_x = (
            ImageFiles(part.images, preprocessing)
            if stored and not isinstance(part.images, np.ndarray)
            else _pixels(part.images, preprocessing)
            for part in (self.train, self.test)
        )
        y, test_y = (torch.from_numpy(part.labels.astype(np.int64)) for part in (self.train, self.test))
        return Task(self.name, self.classes, x, y, test_x, test_y)


def hold_back(source: Source, share: float, generator: torch.Generator) -> Source:
    """The source with a share of each class's training items as its test part. A class of two or more is in both."""
    held = np.zeros(len(source.train), dtype=bool)
    for label in range(len(source.classes)):
        places = np.flatnonzero(source.train.labels == label)
        count = min(max(1, round(share * len(places))), len(places) - 1)
        held[places[torch.randperm(len(places), generator=generator)[: max(count, 0)].numpy()]] = True
    train, test = source.train.take(np.flatnonzero(~held)), source.train.take(np.flatnonzero(held))
    return replace(source, train=train, test=test)


def _pixels(images: Pictures, preprocessing: Preprocessing) -> Tensor:
    """uint8 `[items, height, width, channels]`."""
    if isinstance(images, np.ndarray):
        pixels = torch.from_numpy(np.ascontiguousarray(images))
        pixels = pixels.unsqueeze(3) if pixels.ndim == 3 else pixels
        if pixels.shape[1:] == preprocessing.shape:
            return pixels
        prepared = [prepare(image, preprocessing) for image in pixels]
    else:
        with ThreadPoolExecutor() as pool:
            prepared = list(pool.map(lambda path: read_file(path, preprocessing), images))
    return torch.stack(prepared) if prepared else torch.empty((0, *preprocessing.shape), dtype=torch.uint8)
