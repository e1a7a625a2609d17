"""A task as the trainer sees it, wherever it came from, in memory or still on disk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


class StoredImages(ABC):
    """Prepared images, uint8 `[n, height, width, channels]`, that stay on disk until a batch of them is needed."""

    dtype: ClassVar[torch.dtype] = torch.uint8
    shape: torch.Size

    def __len__(self) -> int:
        return self.shape[0]

    @abstractmethod
    def take(self, chosen: Tensor) -> StoredImages:
        """Some of them, still on disk."""

    @abstractmethod
    def read(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """The images of every batch of indices; the next are read while one is in use."""


Images = Tensor | StoredImages


def load(images: Images, chosen: Tensor | None = None) -> Tensor:
    """Images, or those at the places `chosen` holds, in memory."""
    if isinstance(images, StoredImages):
        return next(images.read([torch.arange(len(images)) if chosen is None else chosen]))
    return images if chosen is None else images[chosen]


def parts(images: Images, size: int) -> Iterator[Tensor]:
    """All images, `size` at a time."""
    if isinstance(images, StoredImages):
        return images.read(torch.split(torch.arange(len(images)), size))
    return iter(torch.split(images, size))


@dataclass(frozen=True)
class Items:
    """Prepared images, uint8 `[n, height, width, channels]`, and their int64 labels."""

    images: Images
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, chosen: Tensor) -> Items:
        images = self.images.take(chosen) if isinstance(self.images, StoredImages) else self.images[chosen]
        return Items(images, self.labels[chosen])

    def to(self, device: torch.device) -> Items:
        """The same items on a device; images stay where they are if they would fill more than half of it."""
        if isinstance(self.images, StoredImages):
            return self
        fits = device.type != "cuda" or self.images.nbytes < torch.cuda.mem_get_info(device)[0] // 2
        return Items(self.images.to(device) if fits else self.images, self.labels.to(device if fits else "cpu"))

    def split(self, share: float, generator: torch.Generator) -> tuple[Items, Items]:
        """Most of the items, and a random share that is held back (none of fewer than two); both in random order.

        Items often come class by class, and a batch of one class has the statistics of no other.
        """
        order = torch.randperm(len(self), generator=generator)
        return self[order[self.held_back(share) :]], self[order[: self.held_back(share)]]

    def validation(self, share: float, generator: torch.Generator) -> Items:
        """What `split` holds back, without the rest."""
        return self[torch.randperm(len(self), generator=generator)[: self.held_back(share)]]

    def held_back(self, share: float) -> int:
        """The number of items `split` holds back."""
        return min(round(share * len(self)), len(self) - 1)

    def at_most(self, count: int) -> Items:
        """The first `count` items; after `split` they are in random order."""
        return self if len(self) <= count else self[torch.arange(count)]

    def batches(self, size: int, generator: torch.Generator | None = None) -> list[Tensor]:
        """Indices in batches, shuffled by the generator if there is one; none of a single item if that can be helped.

        Batch normalization cannot learn from one item, so a single one left over joins the batch before it.
        """
        order = torch.arange(len(self)) if generator is None else torch.randperm(len(self), generator=generator)
        batches = list(torch.split(order.to(self.labels.device), size))
        if len(batches) > 1 and len(batches[-1]) == 1:
            batches[-2:] = [torch.cat(batches[-2:])]
        return batches

    def read(self, batches: Sequence[Tensor], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels of every batch of indices, on a device."""
        if isinstance(self.images, StoredImages):
            read = self.images.read(batches)
        else:
            read = (self.images[batch] for batch in batches)
        for images, batch in zip(read, batches, strict=True):
            yield images.to(device), self.labels[batch].to(device)


@dataclass(frozen=True)
class Task:
    """A name, its classes, and prepared images: uint8 `[n, height, width, channels]` with int64 labels."""

    name: str
    classes: tuple[str, ...]
    train_x: Images
    train_y: Tensor
    test_x: Images
    test_y: Tensor

    @property
    def training(self) -> Items:
        """The items to learn from."""
        return Items(self.train_x, self.train_y)

    @property
    def test(self) -> Items:
        """The items to measure by."""
        return Items(self.test_x, self.test_y)


def percent_right(answers: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Accuracy in percent, from batches of logits and labels: the share of items whose largest logit is their class."""
    count = 0
    right: int | Tensor = 0
    for logits, labels in answers:
        count += len(labels)
        right = right + (logits.argmax(1) == labels).sum()
    return 100 * int(right) / count
