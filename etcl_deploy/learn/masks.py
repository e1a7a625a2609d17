"""Choose, join and measure binary masks. Pure: tensors in, tensors out."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor


def keep_top(scores: Tensor, density: float) -> Tensor:
    """True for exactly `round(density * n)` scores of largest magnitude; of equal ones the first (Eq. nm)."""
    return Chooser(density)(scores.detach().abs()).bool()


class Chooser:
    """Chooses masks of magnitudes that change little from one call to the next, as they do from step to step.

    What it gives depends on the magnitudes alone: 1.0 for the kept, 0.0 for the others. What it remembers, where the
    threshold lay, only makes it quick: instead of all of them, those near it are ranked.
    """

    def __init__(self, density: float) -> None:
        self.density = density
        self._low = self._high = 0.0

    def __call__(self, magnitude: Tensor, out: Tensor | None = None) -> Tensor:
        """The mask, as numbers; written to `out` if there is one."""
        mask = torch.empty_like(magnitude) if out is None else out
        kept = round(self.density * magnitude.numel())
        if kept == 0:
            return mask.zero_()
        if magnitude.device.type != "cpu":
            return rank(magnitude, kept, mask)
        values = magnitude.numpy().ravel()  # numpy compares several times faster than torch
        threshold, surplus = self._threshold(values, kept)
        torch.ge(magnitude, threshold, out=mask)
        if surplus:  # the last of equal ones are dropped, so that exactly `kept` remain
            mask.numpy().ravel()[np.flatnonzero(values == np.float32(threshold))[-surplus:]] = 0
        return mask

    def _threshold(self, values: np.ndarray, kept: int) -> tuple[float, int]:
        """The `kept`-th largest value, and how many more values than `kept` reach it."""
        above = values >= self._high
        rest = kept - int(np.count_nonzero(above))  # still to be found below `high`
        near = values[(values >= self._low) ^ above]
        if not 0 < rest <= len(near):  # not where it was, or not known yet: rank them all
            near, rest = values, kept
        ranked = np.partition(near, len(near) - rest)
        threshold = ranked[len(near) - rest]
        surplus = int(np.count_nonzero(ranked[: len(near) - rest] == threshold))
        self._look_around(float(threshold), len(near), len(values))
        return float(threshold), surplus

    def _look_around(self, threshold: float, seen: int, total: int) -> None:
        """Next time rank what is this close to the threshold: about one value in 256, wider after a miss."""
        width = self._high - self._low
        if seen == total or not width:
            width = max(2 * width, threshold / 64)
        else:
            width *= min(2.0, max(0.5, total / 256 / seen))
        self._low, self._high = threshold - width / 2, threshold + width / 2


def rank(magnitude: Tensor, kept: int, mask: Tensor) -> Tensor:
    """`mask`, set to what a chooser chooses, by ranking everything: what a GPU is good at.

    Nothing here waits for the device, since no number is read back.
    """
    order = magnitude.flatten().argsort(descending=True, stable=True)
    mask.zero_().view(-1)[order[:kept]] = 1
    return mask


def reselect(scores: Tensor, mask: Tensor) -> Tensor:
    """The same numbers (none negative) dealt out anew: the largest to where `mask` is set, each part ranked as before.

    `keep_top` then selects `mask` (if it has as many ones); scores that select it already come back as they are.
    """
    magnitude = scores.detach().flatten()
    ranked = magnitude.argsort(descending=True, stable=True)
    chosen_first = ranked[(~mask.flatten()[ranked]).to(torch.uint8).argsort(stable=True)]
    dealt = torch.empty_like(magnitude)
    dealt[chosen_first] = magnitude[ranked]
    return dealt.view(scores.shape)


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
