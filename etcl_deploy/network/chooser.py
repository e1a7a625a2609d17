"""Choosing a mask at every step, quickly: what `masks.keep_top` gives, for scores that change little in between."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

TOGETHER = 8  # values that are passed over at a time: as many truth values as fit into one word


class Choice(NamedTuple):
    """A mask that nobody has written down: it holds where `keys` are above a number."""

    keys: Tensor
    above: float

    @classmethod
    def by(cls, mask: Tensor) -> Choice:
        """The choice that a mask is."""
        return cls(mask.float(), 0.5)

    def of(self, values: Tensor, out: Tensor) -> Tensor:
        """`values` where it holds, 0 elsewhere, written to `out`: selected, not multiplied, in one pass."""
        # The backward pass of a threshold is the one kernel of torch that compares and selects at once, and quickly.
        chosen: Tensor = torch.ops.aten.threshold_backward.grad_input(values, self.keys, self.above, grad_input=out)
        return chosen


class Chooser:
    """Chooses the masks of magnitudes (none negative) that change little from one call to the next.

    What it gives depends on the magnitudes alone. What it remembers, where the threshold lay, only makes it quick:
    instead of all of them, those near it are ranked.
    """

    def __init__(self, density: float) -> None:
        self.density = density
        self._low = self._high = 0.0

    def __call__(self, magnitude: Tensor) -> Choice:
        """The choice, which is good for as long as the magnitudes stay as they are."""
        kept = round(self.density * magnitude.numel())
        if kept in (0, magnitude.numel()):
            return Choice(magnitude, -1.0 if kept else inf)
        if magnitude.device.type != "cpu":
            return Choice(rank(magnitude, kept), 0.5)
        values = magnitude.numpy().ravel()  # numpy compares several times faster than torch
        threshold, surplus = self._threshold(values, kept)
        if not surplus:
            return Choice(magnitude, float(np.nextafter(threshold, np.float32(-inf))))
        mask = (values >= threshold).astype(np.float32)
        mask[np.flatnonzero(values == threshold)[-surplus:]] = 0  # of equal ones the first, so that `kept` remain
        return Choice(torch.from_numpy(mask).view(magnitude.shape), 0.5)

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
        whole = len(values) - len(values) % TOGETHER
        words = [reached[:whole].view(np.uint64) for reached in (above, values >= self._low)]
        rows = np.take(values[:whole].reshape(-1, TOGETHER), np.flatnonzero(words[0] != words[1]), axis=0)
        found = np.append(rows, values[whole:])
        near: np.ndarray = found[(found >= self._low) & (found < self._high)]
        return near

    def _look_around(self, threshold: float, seen: int, total: int) -> None:
        """Next time rank what is this close to the threshold: about one value in 256, wider after a miss."""
        width = self._high - self._low
        if seen == total or not width:
            width = max(2 * width, threshold / 64)
        else:
            width *= min(2.0, max(0.5, total / 256 / seen))
        self._low, self._high = threshold - width / 2, threshold + width / 2


def rank(magnitude: Tensor, kept: int) -> Tensor:
    """1.0 for what a chooser keeps, by ranking everything: what a GPU is good at, and nothing here waits for it."""
    order = magnitude.flatten().argsort(descending=True, stable=True)
    mask = torch.zeros_like(magnitude)
    mask.view(-1)[order[:kept]] = 1
    return mask
