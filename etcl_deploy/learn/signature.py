"""Signatures of tasks: what ETCL keeps of each so that later ones can be related to it. No item is kept.

A finished task's sub-network never changes again, so what was once measured through it stays true for ever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from etcl_deploy.config import Similarity
from etcl_deploy.core.task import Images, Items, load
from etcl_deploy.learn.projection import principal
from etcl_deploy.learn.similarity import DISTANCES, Comparison, SampleSignature, decide
from etcl_deploy.network.masked_network import MaskedNetwork

MAX_SAMPLE = 2000  # items of a sample: more would tell nothing new
FEATURE_BYTES = 1 << 28  # what the features of a task's items may take


@dataclass(frozen=True)
class HeadInputs:
    """The distribution of a head's inputs over its own task's data: one Gaussian a class, all of one shape."""

    means: Tensor  # [classes, features]
    counts: Tensor  # [classes], how many items each had
    spread: Tensor  # [k, features]: a draw is its class's mean plus standard normal numbers times these rows,
    rest: Tensor  # [1]: and times this in every direction
    space: Tensor  # [k, features], orthonormal: the directions that hold nearly all of it

    def draw(self, each: int, generator: torch.Generator) -> Tensor:
        """`each` inputs of every class that had items."""
        classes = self.counts.nonzero()[:, 0].repeat_interleave(each)
        along = torch.randn(len(classes), len(self.spread), generator=generator).to(self.spread.device)
        around = torch.randn(len(classes), self.means.shape[1], generator=generator).to(self.spread.device)
        return self.means[classes] + along @ self.spread + around * self.rest


@dataclass(frozen=True)
class TaskSignature:
    """One task's part in later comparisons: two signatures of its sample, and its head's inputs."""

    original: SampleSignature  # of a sample of it, in a network that never learned
    learned: SampleSignature  # of the same sample, in its own sub-network
    inputs: HeadInputs

    def tensors(self) -> dict[str, Tensor]:
        """All of it as named tensors."""
        return {
            f"{part.name}/{piece.name}": getattr(getattr(self, part.name), piece.name)
            for part in fields(self)
            for piece in fields(getattr(self, part.name))
        }

    @classmethod
    def of(cls, memory: Mapping[str, Tensor]) -> TaskSignature:
        """The inverse of `tensors`."""
        # Signatures are compared on the CPU, wherever the network is.
        original, learned = (
            SampleSignature(*(memory[f"{part}/{piece.name}"].cpu() for piece in fields(SampleSignature)))
            for part in ("original", "learned")
        )
        return cls(original, learned, HeadInputs(*(memory[f"inputs/{piece.name}"] for piece in fields(HeadInputs))))


def sample(images: Images, settings: Similarity, generator: torch.Generator) -> Tensor:
    """A random sample of a task's items, by which it is compared with others."""
    wanted = max(settings.sample_items, math.ceil(settings.sample_share * len(images)))
    return load(images, torch.randperm(len(images), generator=generator)[: min(wanted, MAX_SAMPLE)])


class Comparer:
    """Relates new tasks to finished ones, through their sub-networks and through one that never learns."""

    def __init__(self, network: MaskedNetwork, settings: Similarity) -> None:
        self.network = network
        self.settings = settings
        self.distance = DISTANCES[settings.distance]
        generator = torch.Generator().manual_seed(0)  # always the same: what is kept of tasks is measured through it
        untrained = MaskedNetwork(network.plan, network.preprocessing, network.density, generator)
        self.untrained = untrained.to(network.device)
        self.untrained.begin("", (), generator)

    @torch.no_grad()
    def original(self, items: Tensor) -> SampleSignature:
        """The signature of a sample before anything is learned."""
        self.untrained.eval()
        self.untrained.norms.train()  # the sample's own statistics: this network has no others
        features = self.untrained.features(items.to(self.network.device))
        return self.distance.describe(features.cpu(), self.settings.energy)

    def learned(self, items: Tensor, name: str) -> SampleSignature:
        """The signature of a sample in the sub-network of a finished task."""
        return self.distance.describe(self.network.embed(items, name).cpu(), self.settings.energy)

    def compare(self, items: Tensor, signatures: Mapping[str, TaskSignature]) -> tuple[Comparison, ...]:
        """A new task's sample held against finished tasks, at most `candidates` of them (Eq. eq-dis, SDM)."""
        if self.settings.similar == "none" or not signatures:
            return ()
        original = self.original(items)
        between = self.distance.between
        signatures = self._nearest(original, signatures)
        originals = [between(signature.original, original) for signature in signatures.values()]
        distances = [between(signature.learned, self.learned(items, name)) for name, signature in signatures.items()]
        verdicts = decide(list(signatures), distances, originals, self.settings.rule, self.settings.margin)
        if self.settings.similar == "all":
            return tuple(
                replace(verdict, similar=True, reason="all tasks are taken for similar") for verdict in verdicts
            )
        return verdicts

    def _nearest(
        self, original: SampleSignature, signatures: Mapping[str, TaskSignature]
    ) -> Mapping[str, TaskSignature]:
        """The tasks nearest in the untrained network, in the order they were learned.

        Each compared task costs a pass through its sub-network now, and its head some epochs later. With a fixed number
        of them a task takes no longer to learn than the one before it.
        """
        if len(signatures) <= self.settings.candidates:
            return signatures
        nearest = sorted(signatures, key=lambda name: self.distance.roughly(signatures[name].original, original))
        chosen = set(nearest[: self.settings.candidates])
        return {name: signature for name, signature in signatures.items() if name in chosen}


@dataclass(frozen=True)
class Seen:
    """Inputs of a head, `[items, features]`, and their labels."""

    features: Tensor
    labels: Tensor


def seen_by_head(network: MaskedNetwork, items: Items, name: str) -> Seen:
    """The inputs of a finished task's head for items; of very many, the first ones (a split has shuffled them)."""
    items = items.at_most(FEATURE_BYTES // (4 * network.plan.features))
    return Seen(network.embed(items.images, name), items.labels.to(network.device))


def describe_inputs(seen: Seen, classes: int, energy: float) -> HeadInputs:
    """The distribution of a task's head inputs, from its training items."""
    features, labels = seen.features, seen.labels
    counts = torch.bincount(labels, minlength=classes)
    sums = torch.zeros(classes, features.shape[1], device=features.device).index_add_(0, labels, features)
    means = sums / counts.clamp_min(1).unsqueeze(1)
    within = features - means[labels]
    freedom = max(1, len(features) - int((counts > 0).sum()))
    directions, shares = principal(within, 0.99)
    variance = within.square().sum() / freedom
    spread = directions * (shares * variance).sqrt().unsqueeze(1)
    rest = ((1 - shares.sum()).clamp_min(0) * variance / features.shape[1]).sqrt().view(1)
    return HeadInputs(means, counts, spread, rest, principal(features, energy)[0])
