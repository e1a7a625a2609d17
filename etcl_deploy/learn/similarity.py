"""Similarity of a new task to earlier ones (Eq. eq-dis, SDM). Pure.

A sample of a task's data is seen twice: by a network that never learned anything, and by the sub-network of an earlier
task. Where learning brought two tasks closer than they were by nature, they share knowledge: they are similar.
Of each sample only a `SampleSignature` of its features is kept, never an item.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, lgamma, pi, sqrt

import numpy as np
import torch
from torch import Tensor

from etcl_deploy.learn.projection import principal

SAME = 1e-6  # a distance below which two samples are the same
NARROW = 0.05  # the least cost of random directions that is divided by; of samples in one dimension it is 0
QUANTILES = 1024  # points that stand for a one-dimensional distribution


@dataclass(frozen=True)
class SampleSignature:
    """A sample's features in short: unit vectors (or points on a line) with their weights.

    points `[k, dimensions]`, weights `[k]`, summing to 1.
    """

    points: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Distance:
    """A way to describe a sample, given its features `[items, dimensions]` and the energy to keep, and to compare two.

    `roughly` is a cheap stand-in for `between`: it orders samples by distance nearly as `between` does.
    """

    describe: Callable[[Tensor, float], SampleSignature]
    between: Callable[[SampleSignature, SampleSignature], float]
    roughly: Callable[[SampleSignature, SampleSignature], float]


@dataclass(frozen=True)
class Comparison:
    """A new task compared with an earlier one: both distances, how much closer learning brought them, the verdict."""

    task: str
    distance: float  # in the earlier task's sub-network
    original: float  # in the network that never learned
    gap: float  # what the rule compares with the margin
    deviation: float  # of the gap, by bootstrap over items; 0 where it could not change the verdict
    near: bool  # by distances alone
    similar: bool
    reason: str
    agreement: float | None = None  # of the earlier task's answers with the new labels (kappa); None: other classes
    contradicted: Mapping[str, str] = field(default_factory=dict)  # new classes it clearly takes for another: that one
    alike: bool = False  # the new items are to the earlier task as its own are: its head may learn from them
    started: bool = False  # the new task began as this one


def bases(features: Tensor, energy: float) -> SampleSignature:
    """The directions that hold `energy` of the features' squared norm, weighted by what each holds (Eq. svd)."""
    vectors, shares = principal(features, energy)
    return SampleSignature(vectors, shares / shares.sum())


def centred_bases(features: Tensor, energy: float) -> SampleSignature:
    """The bases of how features vary, their mean removed."""
    return bases(features - features.mean(0), energy)


def flat_features(features: Tensor, _: float) -> SampleSignature:
    """All entries of the features as one distribution of numbers."""
    return _on_a_line(features)


def flat_bases(features: Tensor, energy: float) -> SampleSignature:
    """All entries of the bases as one distribution of numbers: the paper's words taken literally."""
    return _on_a_line(bases(features, energy).points)


def mean_feature(features: Tensor, _: float) -> SampleSignature:
    """The mean feature, as one point."""
    return SampleSignature(features.mean(0, keepdim=True), torch.ones(1))


def _on_a_line(values: Tensor) -> SampleSignature:
    at = (np.arange(QUANTILES) + 0.5) / QUANTILES
    points = np.quantile(values.double().numpy(), at).astype(np.float32)
    return SampleSignature(torch.from_numpy(points).unsqueeze(1), torch.full((QUANTILES,), 1 / QUANTILES))


def transport(a: SampleSignature, b: SampleSignature) -> float:
    """The cost of turning one set of weighted directions into the other, `1 - |<u, v>|` apiece; signs do not count."""
    import ot  # slow to import, and needed once a task

    cost = 1 - (a.points.double() @ b.points.double().T).abs().clamp_max(1)
    # The exact solver wants both sides to sum to the same number, to the last digit.
    left, right = (side.weights.double() / side.weights.double().sum() for side in (a, b))
    return float(ot.emd2(left.numpy(), right.numpy(), cost.numpy()))


def normalized_transport(a: SampleSignature, b: SampleSignature) -> float:
    """The same, as a multiple of what two random directions of the space that both samples fill would cost.

    Features of a task that is small or badly learned fill few dimensions, in which everything looks near.
    """
    overlap = float(a.weights @ (a.points @ b.points.T).square() @ b.weights)
    rank = 4 / (float(a.weights.square().sum() + b.weights.square().sum()) + 2 * overlap)
    return transport(a, b) / max(NARROW, 1 - _mean_cosine(rank))


def _mean_cosine(rank: float) -> float:
    """The mean of |cos| between random directions in `rank` dimensions."""
    return exp(lgamma(rank / 2) - lgamma((rank + 1) / 2)) / sqrt(pi)


def apart(a: SampleSignature, b: SampleSignature) -> float:
    """One minus the cosine of the angle between the covariances that two sets of weighted directions stand for."""
    overlap = a.weights @ (a.points @ b.points.T).square() @ b.weights
    return 1 - float(overlap / (a.weights.norm() * b.weights.norm()))


def along_the_line(a: SampleSignature, b: SampleSignature) -> float:
    """The one-dimensional Wasserstein distance."""
    from scipy.stats import wasserstein_distance

    return float(wasserstein_distance(a.points[:, 0].numpy(), b.points[:, 0].numpy()))


def euclidean(a: SampleSignature, b: SampleSignature) -> float:
    """The Euclidean distance of two points, relative to their length: what the paper's ablation puts instead."""
    scale = float(a.points.norm() + b.points.norm())
    return float((a.points - b.points).norm()) / scale if scale else 0.0


DISTANCES: dict[str, Distance] = {
    "normalized_transport": Distance(centred_bases, normalized_transport, apart),
    "centred_transport": Distance(centred_bases, transport, apart),
    "transport": Distance(bases, transport, apart),
    "flat_bases": Distance(flat_bases, along_the_line, along_the_line),
    "flat_features": Distance(flat_features, along_the_line, along_the_line),
    "euclidean": Distance(mean_feature, euclidean, euclidean),
}

Rule = Callable[[Sequence[float], Sequence[float]], list[float]]


def relative_gaps(distances: Sequence[float], originals: Sequence[float]) -> list[float]:
    """`(dis' - dis) / dis'` for every earlier task: the share of the original distance that learning removed.

    Samples that were the same to begin with, and still are, have a gap of 1.
    """
    return [(o - d) / o if o > SAME else float(d <= SAME) for d, o in zip(distances, originals, strict=True)]


def normalized_gaps(distances: Sequence[float], originals: Sequence[float]) -> list[float]:
    """The paper's `dis' - dis`, each a share of the sum over all earlier tasks; always 0 with a single one."""
    total, original = sum(distances) or 1.0, sum(originals) or 1.0
    return [o / original - d / total for d, o in zip(distances, originals, strict=True)]


RULES: dict[str, Rule] = {"relative": relative_gaps, "paper": normalized_gaps}


def by_distance(
    tasks: Sequence[str],
    distances: Sequence[float],
    originals: Sequence[float],
    gaps: Sequence[float],
    deviations: Sequence[float],
    margin: float,
    doubt: float,
) -> tuple[Comparison, ...]:
    """A verdict on every earlier task by distances alone (Eq. SDM), a gap being larger by `doubt` of its deviations."""
    made = []
    for task, distance, original, gap, deviation in zip(tasks, distances, originals, gaps, deviations, strict=True):
        near = gap > 0 and gap + doubt * deviation >= margin
        reason = f"gap {gap:.2f}{f' ± {deviation:.2f}' if deviation else ''} {'>=' if near else '<'} {margin:g}"
        if gap <= 0:
            reason = "learning brought them no closer"
        made.append(Comparison(task, distance, original, gap, deviation, near, near, reason))
    return tuple(made)
