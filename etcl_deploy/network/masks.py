"""Choose, join and measure binary masks. Pure: no file, no clock, no random numbers."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import numpy as np
import torch
from torch import Tensor

WORD = 8  # truth values in one 64-bit word: as many values are passed over at a time


def keep_top(scores: Tensor, density: float) -> Tensor:
    """True for exactly `round(density * n)` scores of largest magnitude; of equal ones the first (Eq. nm)."""
    ranked = scores.detach().abs().flatten().argsort(descending=True, stable=True)
    mask = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    mask[ranked[: round(density * scores.numel())]] = True
    return mask.view(scores.shape)


class TopKMask:
    """The mask that `keep_top` gives, kept up to date while the scores change a little at every step.

    The mask is not written down: it is true where `keys` are above a number. It depends on the scores alone; what is
    remembered of earlier steps, where the threshold lay, only makes it quick: instead of all scores, those near the
    threshold are ranked.
    """

    def __init__(self, density: float) -> None:
        self.density = density
        self._keys, self._above = torch.empty(0), inf  # nothing is kept until there are scores
        self._low = self._high = 0.0

    def follow(self, scores: Tensor) -> None:
        """Keep the largest of `scores`, none of which is negative. Good for as long as they do not change."""
        kept = round(self.density * scores.numel())
        if kept in (0, scores.numel()):
            self._keys, self._above = scores, -1.0 if kept else inf
        elif scores.device.type != "cpu":  # a GPU ranks everything quickly, and nothing here waits for it
            self.show(keep_top(scores, self.density))
        else:
            values = scores.numpy().ravel()  # numpy compares several times faster than torch
            threshold, surplus = self._threshold(values, kept)
            self._keys, self._above = scores, float(np.nextafter(threshold, np.float32(-inf)))
            if surplus:  # of equal ones the first, so that `kept` remain
                mask = values >= threshold
                mask[np.flatnonzero(values == threshold)[-surplus:]] = False
                self.show(torch.from_numpy(mask).view(scores.shape))

    def show(self, mask: Tensor) -> None:
        """Be that mask until the next `follow`."""
        self._keys, self._above = mask.float(), 0.5

    def select(self, values: Tensor, out: Tensor) -> Tensor:
        """`values` where the mask is true, 0 elsewhere, written to `out`: selected, not multiplied, in one pass."""
        # The backward pass of a threshold is the one kernel of torch that compares and selects at once, and quickly.
        chosen: Tensor = torch.ops.aten.threshold_backward.grad_input(values, self._keys, self._above, grad_input=out)
        return chosen

    def _threshold(self, values: np.ndarray, kept: int) -> tuple[np.float32, int]:
        """The `kept`-th largest value, and how many more values than `kept` reach it."""
        above = values >= self._high
        rest = kept - int(np.count_nonzero(above))  # still to be found below `high`
        near = self._near(values, above)
        if not 0 < rest <= len(near):  # not where it was, or not known yet: rank them all
            near, rest = values, kept
        ranked = np.partition(near, len(near) - rest)
        threshold = ranked[len(near) - rest]
        surplus = int(np.count_nonzero(ranked[: len(near) - rest] == threshold))
        self._look_around(float(threshold), len(near), len(values))
        return threshold, surplus

    def _near(self, values: np.ndarray, above: np.ndarray) -> np.ndarray:
        """The values from `low` to `high`, which are few; `above` says which are not below `high`."""
        whole = len(values) - len(values) % WORD
        words = [reached[:whole].view(np.uint64) for reached in (above, values >= self._low)]
        rows = np.take(values[:whole].reshape(-1, WORD), np.flatnonzero(words[0] != words[1]), axis=0)
        candidates = np.append(rows, values[whole:])
        near: np.ndarray = candidates[(candidates >= self._low) & (candidates < self._high)]
        return near

    def _look_around(self, threshold: float, seen: int, total: int) -> None:
        """Next time rank what is this close to the threshold: about one value in 256, wider after a miss."""
        width = self._high - self._low
        if seen == total or not width:
            width = max(2 * width, threshold / 64)
        else:
            width *= min(2.0, max(0.5, total / 256 / seen))
        self._low, self._high = threshold - width / 2, threshold + width / 2


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
