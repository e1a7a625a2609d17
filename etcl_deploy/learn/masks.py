"""Choose, join and measure binary masks. Pure: tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor


def keep_top(scores: Tensor, density: float) -> Tensor:
    """True for exactly `round(density * n)` scores of largest magnitude; of equal ones the first (Eq. nm)."""
    magnitude = scores.detach().abs().flatten()
    kept = round(density * magnitude.numel())
    if kept == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    threshold = _largest(magnitude, kept)
    mask = magnitude >= threshold
    surplus = int(mask.sum()) - kept
    if surplus:
        ties = magnitude == threshold
        # The last `surplus` of the ties are dropped, so that exactly `kept` remain.
        mask &= ~(ties & (ties.cumsum(0) > ties.sum() - surplus))
    return mask.view(scores.shape)


def _largest(values: Tensor, rank: int) -> Tensor:
    """The `rank`-th largest value."""
    index = values.numel() - rank
    if values.device.type == "cpu":
        # The same selection as kthvalue, several times faster.
        return torch.tensor(np.partition(values.numpy(), index)[index])
    return values.kthvalue(index + 1).values


def reselect(scores: Tensor, mask: Tensor) -> Tensor:
    """The same magnitudes, dealt out anew: the largest to where `mask` is set, in the order they had in either part.

    `keep_top` then selects `mask` (if it has as many ones); scores that select it already come back as they are.
    """
    magnitude = scores.detach().abs().flatten()
    ranked = magnitude.argsort(descending=True, stable=True)
    chosen_first = ranked[(~mask.flatten()[ranked]).to(torch.uint8).argsort(stable=True)]
    dealt = torch.empty_like(magnitude)
    dealt[chosen_first] = magnitude[ranked]
    return torch.where(scores.detach() < 0, -dealt.view(scores.shape), dealt.view(scores.shape))


def union(masks: Iterable[Tensor]) -> Tensor:
    """True where any of the masks is."""
    first, *rest = masks
    joined = first.clone()
    for mask in rest:
        joined |= mask
    return joined


def density(masks: Iterable[Tensor]) -> float:
    """The share of ones over all the masks together."""
    ones = total = 0
    for mask in masks:
        ones += int(mask.sum())
        total += mask.numel()
    return ones / total if total else 0.0
