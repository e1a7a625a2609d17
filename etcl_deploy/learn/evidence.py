"""Evidence before transfer: an earlier task's answers to a new task's items, held against their labels. Pure.

Equal names of classes prove nothing: `healthy` is a class of every crop, and numbers name the classes of every `.npz`
file. What the earlier task takes the new items for does. No training is needed for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

DOUBT = 0.01  # the probability, over all classes, of finding a contradiction where there is none


@dataclass(frozen=True)
class Evidence:
    """How an earlier task with the same names of classes answers a new task's items."""

    kappa: float  # Cohen's: agreement with the labels beyond chance; 1 at most
    contradicted: Mapping[int, int]  # classes whose items it clearly takes for one other class, with that class


def evidence(answers: Tensor, labels: Tensor, classes: int) -> Evidence:
    """The evidence in answers (class numbers) to labelled items."""
    counts = torch.zeros(classes, classes, dtype=torch.int64)
    counts.index_put_((labels.cpu(), answers.cpu()), torch.ones(len(labels), dtype=torch.int64), accumulate=True)
    taken = {number: _taken_for(counts[number], number) for number in range(classes)}
    return Evidence(kappa(counts), {number: other for number, other in taken.items() if other is not None})


def kappa(counts: Tensor) -> float:
    """Cohen's kappa of `counts [label, answer]`; of no items 0."""
    total = max(1, int(counts.sum()))
    agreed = float(counts.diagonal().sum()) / total
    by_chance = float((counts.sum(0) * counts.sum(1)).sum()) / total**2
    return (agreed - by_chance) / (1 - by_chance) if by_chance < 1 else agreed


def _taken_for(answers: Tensor, label: int) -> int | None:
    """The one other class that the counted answers to items of a class say it is, if they do (a sign test)."""
    from scipy.stats import binomtest  # slow to import, and needed once a task

    others = answers.clone()
    others[label] = -1
    right, other = int(answers[label]), int(others.max())
    if other <= right or binomtest(other, other + right, 0.5, "greater").pvalue >= DOUBT / len(answers):
        return None
    return int(others.argmax())
