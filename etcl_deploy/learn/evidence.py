"""Evidence before transfer: an earlier task's answers to a new task's items, held against their labels. Pure.

Equal names of classes prove nothing: `healthy` is a class of every crop, and numbers name the classes of every `.npz`
file. What the earlier task takes the new items for does. No training is needed for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

KNOWS = 0.5  # a task's agreement with its own labels (kappa) from which on it is believed to contradict others
DOUBT = 0.01  # the probability, over all classes, of finding a contradiction where there is none
UNLIKE = 0.05  # and of finding that new items are not as a task's own, where they are


@dataclass(frozen=True)
class Evidence:
    """How an earlier task with the same names of classes answers a new task's items."""

    kappa: float  # Cohen's: agreement with the labels beyond chance; 1 at most
    contradicted: Mapping[int, int]  # classes whose items it clearly takes for one other class, with that class


def answered(answers: Tensor, labels: Tensor, classes: int) -> Tensor:
    """How often items of each class got each answer: `[label, answer]`."""
    counts = torch.zeros(classes, classes, dtype=torch.int64)
    return counts.index_put_((labels.cpu(), answers.cpu()), torch.ones(len(labels), dtype=torch.int64), accumulate=True)


def evidence(counts: Tensor, own: Tensor) -> Evidence:
    """The evidence in what an earlier task answered to new items, beside what it answers to its own held-back ones."""
    taken = {number: _taken_for(counts[number], own[number], number) for number in range(len(counts))}
    knows = kappa(own) >= KNOWS
    return Evidence(kappa(counts), {number: other for number, other in taken.items() if knows and other is not None})


def further_out(new: Tensor, own: Tensor) -> bool:
    """Whether new items lie further from the means of their classes than a task's own held-back ones (Mann-Whitney).

    Another style moves a task's features long before it costs many answers. Where nothing is known (no items, or
    classes without any spread) it is True.
    """
    from scipy.stats import mannwhitneyu

    if not len(new) or not len(own) or not torch.cat([new.cpu(), own.cpu()]).isfinite().all():
        return True
    return bool(mannwhitneyu(new.cpu().numpy(), own.cpu().numpy(), alternative="greater").pvalue < UNLIKE)


def rarer(new: Tensor, own: Tensor) -> Tensor:
    """The classes of which `new` items are fewer than those of `own` let expect, beyond chance: one truth value each.

    Both are counts by class. The chance of what is found is that of a random part of all items having so few of a class
    (hypergeometric), over all classes `DOUBT`.
    """
    from scipy.stats import hypergeom

    new, own = new.cpu().long(), own.cpu().long()
    both = (new + own).numpy()
    chance = hypergeom(int(both.sum()), both, int(new.sum())).cdf(new.numpy())
    return torch.as_tensor(chance < DOUBT / len(new))


def kappa(counts: Tensor) -> float:
    """Cohen's kappa of `counts [label, answer]`; of no items 0."""
    total = max(1, int(counts.sum()))
    agreed = float(counts.diagonal().sum()) / total
    by_chance = float((counts.sum(0) * counts.sum(1)).sum()) / total**2
    return (agreed - by_chance) / (1 - by_chance) if by_chance < 1 else agreed


def _taken_for(answers: Tensor, own: Tensor, label: int) -> int | None:
    """The one other class that items of a class are taken for: more often than for it, and than its own items are."""
    from scipy.stats import binomtest  # slow to import, and needed once a task

    others = answers.clone()
    others[label] = -1
    best = int(others.argmax())
    right, other = int(answers[label]), int(others[best])
    usual = (int(own[best]) + 1) / (int(own[best]) + int(own[label]) + 2)
    if other <= right or binomtest(other, other + right, usual, "greater").pvalue >= DOUBT / len(answers):
        return None
    return best
