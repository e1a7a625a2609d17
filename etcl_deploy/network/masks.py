"""Choose, join and measure binary masks. Pure: tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def keep_top(scores: Tensor, density: float) -> Tensor:
    """True for exactly `round(density * n)` scores of largest magnitude; of equal ones the first (Eq. nm)."""
    ranked = scores.detach().abs().flatten().argsort(descending=True, stable=True)
    mask = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    mask[ranked[: round(density * scores.numel())]] = True
    return mask.view(scores.shape)


def reselect(scores: Tensor, mask: Tensor) -> Tensor:
    """The same numbers (none negative) dealt out anew: the largest to where `mask` is set, each part ranked as before.

    `keep_top` then selects `mask` (if it has as many ones); scores that select it already come back as they are. Where
    a tie would prevent that, the least of what is selected becomes the next larger number.
    """
    magnitude = scores.detach().flatten()
    ranked = magnitude.argsort(descending=True, stable=True)
    chosen_first = ranked[(~mask.flatten()[ranked]).to(torch.uint8).argsort(stable=True)]
    dealt = torch.empty_like(magnitude)
    dealt[chosen_first] = magnitude[ranked]
    dealt = dealt.view(scores.shape)
    if not torch.equal(keep_top(dealt, int(mask.sum()) / mask.numel()), mask):
        least = dealt[mask].min()
        dealt[mask & (dealt == least)] = torch.nextafter(least, torch.full_like(least, torch.inf))
    return dealt


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
