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
from etcl_deploy.learn.evidence import answered, evidence, further_out, kappa
from etcl_deploy.learn.head_inputs import HeadInputs, Seen, logits
from etcl_deploy.learn.similarity import DISTANCES, RULES, Comparison, SampleSignature, by_distance, relative_gaps
from etcl_deploy.network.masked_network import MaskedNetwork

MAX_SAMPLE = 2000  # items of a sample: more would tell nothing new
RESAMPLES = 10  # of a sample, to find how uncertain a gap is
MAX_DISTANCES = 500  # that are kept of a task's own held-back items
LEAST = 0.1  # agreement below which nothing is agreed, however little a task knows of its own items


@dataclass(frozen=True)
class TaskSignature:
    """One task's part in later comparisons: two signatures of a sample, its head's inputs, and how well it answers."""

    original: SampleSignature  # of a sample of it, in a network that never learned
    learned: SampleSignature  # of the same sample, in its own sub-network
    inputs: HeadInputs
    answers: Tensor  # [label, answer], how often it gave each to its own held-back items
    distances: Tensor  # of some of those from the means of their classes

    def tensors(self) -> dict[str, Tensor]:
        """All of it as named tensors."""
        parts = {"original": self.original, "learned": self.learned}
        pieces = {f"{name}/{p.name}": getattr(part, p.name) for name, part in parts.items() for p in fields(part)}
        rest = {"answers": self.answers, "distances": self.distances}
        return {**pieces, **self.inputs.tensors("inputs"), **rest}

    @classmethod
    def of(cls, memory: Mapping[str, Tensor]) -> TaskSignature:
        """The inverse of `tensors`."""
        # Signatures are compared on the CPU, wherever the network is.
        original, learned = (
            SampleSignature(*(memory[f"{part}/{piece.name}"].cpu() for piece in fields(SampleSignature)))
            for part in ("original", "learned")
        )
        inputs = HeadInputs.of(memory, "inputs")
        return cls(original, learned, inputs, memory["answers"].cpu(), memory["distances"].cpu())

    @property
    def agreement(self) -> float:
        """How well it agrees with the labels of its own held-back items (kappa); 1 if there are none to tell."""
        return kappa(self.answers) if self.answers.any() else 1.0


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
        distances, originals = [], []
        features = {name: self.network.embed(items.images, name) for name in signatures}
        for name, signature in signatures.items():
            distances.append(self.distance.between(signature.learned, self._describe(features[name].cpu())))
            originals.append(self.distance.between(signature.original, original))
        gaps = RULES[self.settings.rule](distances, originals)
        deviations = self._deviations(gaps, signatures, features, untrained)
        margin, doubt = self.settings.margin, self.settings.doubt
        found = by_distance(list(signatures), distances, originals, gaps, deviations, margin, doubt)
        return tuple(
            self._verdict(comparison, signatures[comparison.task], features[comparison.task], items.labels, classes)
            for comparison in found
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
        own = signature.agreement
        if state.classes == classes:
            counts = answered(logits(state.head, features).argmax(1), labels, len(classes))
            found = evidence(counts, signature.answers)
            names = {classes[number]: classes[other] for number, other in found.contradicted.items()}
            distances = signature.inputs.distances(Seen(features, labels.to(features.device)))
            alike = not names and not further_out(distances, signature.distances)
            comparison = replace(comparison, agreement=found.kappa, contradicted=names, alike=alike)
        if self.settings.similar == "all":
            return replace(comparison, similar=True, reason="all tasks are taken for similar")
        if not comparison.near or not self.settings.agreement:
            return comparison
        if comparison.agreement is None:
            return replace(comparison, similar=False, reason=f"{comparison.reason}, but other classes")
        similar = comparison.agreement >= max(self.settings.agreement * own, LEAST)
        told = f"answers agree with the new labels by {comparison.agreement:.2f}, with its own by {own:.2f}"
        if similar and not (comparison.alike or comparison.contradicted):
            told += "; of another style: it teaches that task's head nothing"
        return replace(comparison, similar=similar, reason=f"{comparison.reason}; {told}")

    @torch.no_grad()
    def _untrained_features(self, items: Items) -> Tensor:
        self.untrained.eval()
        self.untrained.norms.train()  # the sample's own statistics: this network has no others
        return self.untrained.features(torch.as_tensor(items.images).to(self.network.device)).cpu()

    def _describe(self, features: Tensor) -> SampleSignature:
        return self.distance.describe(features, self.settings.energy)

    def _deviations(
        self,
        gaps: Sequence[float],
        signatures: Mapping[str, TaskSignature],
        features: Mapping[str, Tensor],
        untrained: Tensor,
    ) -> list[float]:
        """The deviation of every gap over samples of the sample; 0 where it cannot change the verdict."""
        asked = self.settings.doubt > 0 and self.settings.rule == "relative"
        unsure = [asked and 0 < gap < self.settings.margin for gap in gaps]
        if not any(unsure):
            return [0.0] * len(gaps)
        generator = torch.Generator().manual_seed(0)
        resamples = [torch.randint(len(untrained), (len(untrained),), generator=generator) for _ in range(RESAMPLES)]
        redrawn = [self._describe(untrained[chosen]) for chosen in resamples]
        deviations = []
        for (name, signature), wanted in zip(signatures.items(), unsure, strict=True):
            learned = features[name].cpu()
            again = [self._describe(learned[chosen]) for chosen in resamples if wanted]
            distances = [self.distance.between(signature.learned, one) for one in again]
            originals = [self.distance.between(signature.original, one) for one in redrawn if wanted]
            deviations.append(float(np.std(relative_gaps(distances, originals), ddof=1)) if wanted else 0.0)
        return deviations

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
