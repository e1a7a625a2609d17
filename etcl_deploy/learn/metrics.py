"""The accuracy matrix and what is read from it (Eq. metrics). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

# Row t holds the test accuracy, in percent, of tasks 0..t after task t was learned.
Matrix = Sequence[Sequence[float]]


def average_accuracy(matrix: Matrix) -> float:
    """ACC: mean of the last row, in percent."""
    return fmean(matrix[-1])


def backward_transfer(matrix: Matrix) -> float | None:
    """BWT: mean change of the earlier tasks since each was learned, as a fraction; None for a single task."""
    last = matrix[-1]
    if len(last) < 2:
        return None
    return fmean(last[i] - matrix[i][i] for i in range(len(last) - 1)) / 100
