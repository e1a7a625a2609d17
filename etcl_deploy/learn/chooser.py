"""Choosing a mask at every step, quickly: what `masks.keep_top` gives, for scores that change little in between."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class Chooser:
    """Chooses the masks of magnitudes (none negative) that change little from one call to the next.

    What it gives depends on the magnitudes alone: 1.0 for the kept, 0.0 for the others. What it remembers, where the
    threshold lay, only makes it quick: instead of all of them, those near it are ranked.
    """

    def __init__(self, density: float) -> None:
        self.density = density
        self._low = self._high = 0.0

    def __call__(self, magnitude: Tensor, out: Tensor) -> Tensor:
        """The mask, written to `out`."""
        kept = round(self.density * magnitude.numel())
        if kept in (0, magnitude.numel()):
            return out.fill_(1 if kept else 0)
        if magnitude.device.type != "cpu":
            return rank(magnitude, kept, out)
        values = magnitude.numpy().ravel()  # numpy compares several times faster than torch
        threshold, surplus = self._threshold(values, kept)
        torch.ge(magnitude, threshold, out=out)
        if surplus:  # the last of equal ones are dropped, so that exactly `kept` remain
            out.numpy().ravel()[np.flatnonzero(values == np.float32(threshold))[-surplus:]] = 0
        return out

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


def rank(magnitude: Tensor, kept: int, out: Tensor) -> Tensor:
    """What a chooser chooses, by ranking everything: what a GPU is good at, and nothing here waits for it."""
    order = magnitude.flatten().argsort(descending=True, stable=True)
    out.zero_().view(-1)[order[:kept]] = 1
    return out
