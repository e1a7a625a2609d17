"""The inputs of a finished task's head, in short: a distribution to draw from, as hard as the data. No item is kept.

A head keeps what it knows only if it is asked about it while it learns, and an update of it can be judged only by
inputs that are as near to the boundaries between classes as the data's are. Gaussian draws are not: they lie around
the means. So the draws have heavy tails and the spread each class has, and all of them are stretched until the head
gets as many of them right as it got of validation items.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from etcl_deploy.core.task import Items
from etcl_deploy.learn.projection import principal
from etcl_deploy.network.masked_network import MaskedNetwork
from etcl_deploy.network.state import Head

FEATURE_BYTES = 1 << 26  # what the features of a task's items may take
DIRECTIONS = 64  # of the spread within classes that are kept
FREEDOM = 5  # degrees of freedom of the draws, Student's t: far more far ones than of a Gaussian
NARROWEST, WIDEST = 1.0, 8.0  # between which the stretch is looked for: training items are never further out
TINY = 1e-30  # a variance that is none
HALVINGS = 12  # of the distance between them, until it is found


@dataclass(frozen=True)
class Seen:
    """Inputs of a head, `[items, features]`, and their labels."""

    features: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, chosen: Tensor) -> Seen:
        return Seen(self.features[chosen], self.labels[chosen])


@dataclass(frozen=True)
class HeadInputs:
    """The distribution of a head's inputs over its own task's data, class by class."""

    means: Tensor  # [classes, features]
    counts: Tensor  # [classes], how many items each had, as floats
    sizes: Tensor  # [classes], how far its items lie from their mean, 1 on average
    spread: Tensor  # [k, features]: the directions in which items vary around their mean, as long as they vary,
    rest: Tensor  # [1]: and how much they vary in every other
    stretch: Tensor  # [1]: what makes draws as hard as the data
    space: (
        Tensor  # [k, features], orthonormal: the directions that hold nearly all of the inputs; empty if nobody asked
    )

    def draw(self, classes: Tensor, generator: torch.Generator) -> Seen:
        """An input of each of these classes."""
        device, count = self.means.device, len(classes)
        along, around, tails = (
            torch.randn(count, width, generator=generator).to(device)
            for width in (len(self.spread), self.means.shape[1], FREEDOM)
        )
        # Student's t, scaled to the variance of the Gaussian it is made of.
        far = ((FREEDOM - 2) / tails.square().sum(1, keepdim=True).clamp_min(1e-6)).sqrt()
        size = self.stretch * far * self.sizes[classes].unsqueeze(1)
        return Seen(self.means[classes] + size * (along @ self.spread + around * self.rest), classes)

    def of_each(self, count: int, generator: torch.Generator) -> Seen:
        """`count` inputs of every class that had items."""
        return self.draw(self.counts.nonzero()[:, 0].repeat_interleave(count), generator)

    def as_met(self, count: int, generator: torch.Generator) -> Seen:
        """`count` inputs, the classes as frequent as they were."""
        drawn = self.counts.cpu().double().multinomial(count, replacement=True, generator=generator)
        return self.draw(drawn.to(self.counts.device), generator)

    def distances(self, seen: Seen) -> Tensor:
        """How far inputs lie from the mean of their class, in units of its size; those of unknown classes left out."""
        seen = seen[self.counts[seen.labels] > 0]
        apart = (seen.features - self.means[seen.labels]).square().sum(1).sqrt()
        return apart / self.sizes[seen.labels]

    def as_hard_as(self, head: Head, accuracy: float) -> HeadInputs:
        """The same, stretched until `head` gets the share `accuracy` of the draws right."""
        low, high = NARROWEST, WIDEST
        stretched = self
        for _ in range(HALVINGS):
            middle = (low * high) ** 0.5
            stretched = replace(self, stretch=torch.full_like(self.stretch, middle))
            drawn = stretched.as_met(2000, torch.Generator().manual_seed(0))
            right = float((logits(head, drawn.features).argmax(1) == drawn.labels).double().mean())
            low, high = (middle, high) if right > accuracy else (low, middle)
        return stretched

    def joined(self, other: HeadInputs) -> HeadInputs:
        """Both together, as if the items of both had been one task's; the stretch is this one's; no space is kept."""
        counts = self.counts + other.counts
        all_items, each = counts.sum().clamp_min(1), counts.clamp_min(1).unsqueeze(1)
        means = (self.means * self.counts.unsqueeze(1) + other.means * other.counts.unsqueeze(1)) / each
        apart = (self.counts * other.counts / counts.clamp_min(1)).sqrt().unsqueeze(1) * (self.means - other.means)
        squares = self._squares() + other._squares() + apart.square().sum(1)
        shares = (part.counts.sum() / all_items for part in (self, other))
        parts = zip((self, other), shares, strict=True)
        rows = torch.cat([*(part.spread * share.sqrt() for part, share in parts), apart / all_items.sqrt()])
        variance = squares.sum() / all_items
        spread, rest = _spread(rows, rows.square().sum(), variance)
        sizes = (squares / counts.clamp_min(1) / variance.clamp_min(TINY)).sqrt()
        return HeadInputs(means, counts, sizes, spread, rest, self.stretch, self.space[:0])

    def _squares(self) -> Tensor:
        """The summed squared distance of each class's items from their mean."""
        variance = self.spread.square().sum() + self.rest.square() * self.means.shape[1]
        return self.counts * self.sizes.square() * variance

    @classmethod
    def of(cls, memory: Mapping[str, Tensor], key: str) -> HeadInputs:
        """The inverse of `tensors`."""
        return cls(*(memory[f"{key}/{piece.name}"] for piece in fields(cls)))

    def tensors(self, key: str) -> dict[str, Tensor]:
        """All of it as named tensors."""
        return {f"{key}/{piece.name}": getattr(self, piece.name) for piece in fields(self)}


def logits(head: Head, features: Tensor) -> Tensor:
    """What a head says of its inputs."""
    return F.linear(features, head["weight"], head.get("bias"))


def seen_by_head(network: MaskedNetwork, items: Items, name: str) -> Seen:
    """The inputs of a finished task's head for items; of very many, the first ones (a split has shuffled them)."""
    if not len(items):
        return Seen(torch.empty(0, network.plan.features, device=network.device), items.labels.to(network.device))
    items = items.at_most(FEATURE_BYTES // (4 * network.plan.features))
    return Seen(network.embed(items.images, name), items.labels.to(network.device))


def describe_inputs(seen: Seen, classes: int, energy: float | None) -> HeadInputs:
    """The distribution of a task's head inputs, from its training items; without an energy, no space is taken."""
    features, labels = seen.features, seen.labels
    members = F.one_hot(labels, classes).to(features.dtype).T  # a product of matrices adds in the same order everywhere
    counts = members.sum(1)
    means = members @ features / counts.clamp_min(1).unsqueeze(1)
    within = features - means[labels]
    freedom = max(1, len(features) - int((counts > 0).sum()))
    variance = within.square().sum() / freedom
    spread, rest = _spread(within, variance, variance)
    return HeadInputs(
        means,
        counts,
        _sizes(members @ within.square().sum(1), counts, variance),
        spread,
        rest,
        torch.ones(1, device=features.device),
        principal(features, energy)[0] if energy else features.new_zeros(0, features.shape[1]),
    )


def _spread(rows: Tensor, energy: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """The directions that `rows` vary in, with `energy` of the whole variance, and what is left for every direction."""
    directions, shares = principal(rows, 0.99)
    directions, held = directions[:DIRECTIONS], shares[:DIRECTIONS] * energy
    rest = ((variance - held.sum()).clamp_min(0) / rows.shape[1]).sqrt().view(1)
    return directions * held.sqrt().unsqueeze(1), rest


def _sizes(squares: Tensor, counts: Tensor, variance: Tensor) -> Tensor:
    """How far the items of each class lie from its mean, as a multiple of what they do on average.

    Of few items that is a bad guess, so it is drawn towards 1 as if by five average ones.
    """
    guess = (squares + 5 * variance) / ((counts - 1).clamp_min(0) + 5)
    return (guess / variance.clamp_min(TINY)).sqrt()
