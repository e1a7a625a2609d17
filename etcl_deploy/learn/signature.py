"""Signatures of tasks: what ETCL keeps of each so that later ones can be related to it. No item is kept.

A finished task's sub-network never changes again, so what was once measured through it stays true for ever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from etcl_deploy.config import Similarity
from etcl_deploy.core.task import Items, load
from etcl_deploy.learn.evidence import evidence
from etcl_deploy.learn.head_inputs import HeadInputs, logits
from etcl_deploy.learn.similarity import DISTANCES, Comparison, SampleSignature, by_distance, relative_gaps
from etcl_deploy.network.masked_network import MaskedNetwork

MAX_SAMPLE = 2000  # items of a sample: more would tell nothing new
RESAMPLES = 10  # of a sample, to find how uncertain a gap is
KNOWS = 0.5  # agreement of a task with its own labels from which on its answers can contradict others
LEAST = 0.1  # agreement below which nothing is agreed, however little a task knows of its own items


@dataclass(frozen=True)
class TaskSignature:
    """One task's part in later comparisons: two signatures of a sample, its head's inputs, and how well it answers."""

    original: SampleSignature  # of a sample of it, in a network that never learned
    learned: SampleSignature  # of the same sample, in its own sub-network
    inputs: HeadInputs
    agreement: Tensor  # [1], of its answers with the labels of its own validation items (kappa); nan without any

    def tensors(self) -> dict[str, Tensor]:
        """All of it as named tensors."""
        parts = {"original": self.original, "learned": self.learned}
        pieces = {f"{name}/{p.name}": getattr(part, p.name) for name, part in parts.items() for p in fields(part)}
        return {**pieces, **self.inputs.tensors("inputs"), "agreement": self.agreement}

    @classmethod
    def of(cls, memory: Mapping[str, Tensor]) -> TaskSignature:
        """The inverse of `tensors`."""
        # Signatures are compared on the CPU, wherever the network is.
        original, learned = (
            SampleSignature(*(memory[f"{part}/{piece.name}"].cpu() for piece in fields(SampleSignature)))
            for part in ("original", "learned")
        )
        return cls(original, learned, HeadInputs.of(memory, "inputs"), memory["agreement"])


def sample(items: Items, settings: Similarity, generator: torch.Generator) -> Items:
    """A random sample of a task's items, in memory, by which it is compared with others."""
    wanted = min(MAX_SAMPLE, max(settings.sample_items, math.ceil(settings.sample_share * len(items))))
    chosen = items[torch.randperm(len(items), generator=generator)[:wanted].to(items.labels.device)]
    return replace(chosen, images=load(chosen.images))


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

    def original(self, items: Items) -> SampleSignature:
        """The signature of a sample before anything is learned."""
        return self._describe(self._untrained_features(items))

    def learned(self, items: Items, name: str) -> SampleSignature:
        """The signature of a sample in the sub-network of a finished task."""
        return self._describe(self.network.embed(items.images, name).cpu())

    def compare(
        self, items: Items, classes: tuple[str, ...], signatures: Mapping[str, TaskSignature]
    ) -> tuple[Comparison, ...]:
        """A new task's sample held against finished tasks, at most `candidates` of them (Eq. eq-dis, SDM)."""
        if self.settings.similar == "none" or not signatures:
            return ()
        untrained = self._untrained_features(items)
        original = self._describe(untrained)
        signatures = self._nearest(original, signatures)
        resamples = self._resamples(len(items))
        redrawn = [self._describe(untrained[chosen]) for chosen in resamples]
        distances, originals, deviations = [], [], []
        features = {name: self.network.embed(items.images, name) for name in signatures}
        for name, signature in signatures.items():
            learned = features[name].cpu()
            distances.append(self.distance.between(signature.learned, self._describe(learned)))
            originals.append(self.distance.between(signature.original, original))
            again = [self._describe(learned[chosen]) for chosen in resamples]
            deviations.append(self._deviation(signature, again, redrawn))
        rule, margin, doubt = self.settings.rule, self.settings.margin, self.settings.doubt
        return tuple(
            self._verdict(comparison, signatures[comparison.task], features[comparison.task], items.labels, classes)
            for comparison in by_distance(list(signatures), distances, originals, deviations, rule, margin, doubt)
        )

    def _verdict(
        self,
        comparison: Comparison,
        signature: TaskSignature,
        features: Tensor,
        labels: Tensor,
        classes: tuple[str, ...],
    ) -> Comparison:
        """The verdict once the earlier task's answers to the new items are held against their labels."""
        state = self.network.finished[comparison.task]
        own = float(signature.agreement.nan_to_num(1.0))
        if state.classes == classes:
            found = evidence(logits(state.head, features).argmax(1), labels.to(features.device), len(classes))
            against = found.contradicted if own >= KNOWS else {}
            names = {classes[number]: classes[other] for number, other in against.items()}
            comparison = replace(comparison, agreement=found.kappa, contradicted=names)
        if self.settings.similar == "all":
            return replace(comparison, similar=True, reason="all tasks are taken for similar")
        if not comparison.near or not self.settings.agreement:
            return comparison
        if comparison.agreement is None:
            return replace(comparison, similar=False, reason=f"{comparison.reason}, but other classes")
        similar = comparison.agreement >= max(self.settings.agreement * own, LEAST)
        told = f"answers agree with the new labels by {comparison.agreement:.2f}, with its own by {own:.2f}"
        return replace(comparison, similar=similar, reason=f"{comparison.reason}; {told}")

    @torch.no_grad()
    def _untrained_features(self, items: Items) -> Tensor:
        self.untrained.eval()
        self.untrained.norms.train()  # the sample's own statistics: this network has no others
        return self.untrained.features(torch.as_tensor(items.images).to(self.network.device)).cpu()

    def _describe(self, features: Tensor) -> SampleSignature:
        return self.distance.describe(features, self.settings.energy)

    def _resamples(self, count: int) -> list[Tensor]:
        """Samples of a sample of `count` items, with replacement; none where nobody asks how uncertain a gap is."""
        generator = torch.Generator().manual_seed(0)
        wanted = RESAMPLES if self.settings.doubt else 0
        return [torch.randint(count, (count,), generator=generator) for _ in range(wanted)]

    def _deviation(
        self, signature: TaskSignature, learned: Sequence[SampleSignature], untrained: Sequence[SampleSignature]
    ) -> float:
        """The deviation of a gap over samples of the sample."""
        if not learned:
            return 0.0
        distances = [self.distance.between(signature.learned, again) for again in learned]
        originals = [self.distance.between(signature.original, again) for again in untrained]
        return float(np.std(relative_gaps(distances, originals), ddof=1))

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
