"""A task as the trainer sees it, wherever it came from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Items:
    """Prepared images, uint8 `[n, height, width, channels]`, and their int64 labels."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, chosen: Tensor) -> Items:
        return Items(self.images[chosen], self.labels[chosen])

    def to(self, device: torch.device) -> Items:
        """The same items on a device; images stay where they are if they would fill more than half of it."""
        fits = device.type != "cuda" or self.images.nbytes < torch.cuda.mem_get_info(device)[0] // 2
        return Items(self.images.to(device) if fits else self.images, self.labels.to(device if fits else "cpu"))

    def split(self, share: float, generator: torch.Generator) -> tuple[Items, Items]:
        """Most of the items, and a random share that is held back (none of fewer than two); both in random order.

        Items often come class by class, and a batch of one class has the statistics of no other.
        """
        held = self.held_back(share)
        order = torch.randperm(len(self), generator=generator)
        return self[order[held:]], self[order[:held]]

    def held_back(self, share: float) -> int:
        """How many items `split` holds back."""
        return min(round(share * len(self)), len(self) - 1)

    def batches(self, size: int, generator: torch.Generator | None = None) -> list[Tensor]:
        """Indices in batches, shuffled by the generator if there is one; none of a single item if that can be helped.

        Batch normalization cannot learn from one item, so a single one left over joins the batch before it.
        """
        order = torch.arange(len(self)) if generator is None else torch.randperm(len(self), generator=generator)
        parts = list(torch.split(order.to(self.labels.device), size))
        if len(parts) > 1 and len(parts[-1]) == 1:
            parts[-2:] = [torch.cat(parts[-2:])]
        return parts


@dataclass(frozen=True)
class Task:
    """A name, its classes, and prepared images: uint8 `[n, height, width, channels]` with int64 labels."""

    name: str
    classes: tuple[str, ...]
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    @property
    def training(self) -> Items:
        """The items to learn from."""
        return Items(self.train_x, self.train_y)

    @property
    def test(self) -> Items:
        """The items to measure by."""
        return Items(self.test_x, self.test_y)
