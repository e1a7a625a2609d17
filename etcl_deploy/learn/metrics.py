"""ACC, BWT and FWT from the matrix of accuracies (Eq. metrics). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

# Row t holds the test accuracy, in percent, of tasks 0..t after task t was learned; None where it is not known.
AccuracyRow = tuple[float | None, ...]
Matrix = Sequence[Sequence[float | None]]

CROWDED = 0.95  # the share of claimed weights from which on a user should know


def shortage(claimed: float) -> str | None:
    """A warning that few free weights are left, and what helps; None while there are enough."""
    if claimed <= CROWDED:
        return None
    how_many = "every weight is" if claimed > 0.999 else "nearly every weight is"
    helps = "a run with a lower --density, a wider network (--set width=N) or --set scores=fresh"
    return (
        f"{how_many} claimed: a new task chooses among those of earlier ones; {helps} leaves more room (docs/scale.md)"
    )


def average_accuracy(matrix: Matrix) -> float | None:
    """ACC: mean of the last row, in percent."""
    return _mean(matrix[-1]) if matrix else None


def backward_transfer(matrix: Matrix) -> float | None:
    """BWT: mean change of the earlier tasks since each was learned, as a fraction; None for a single task."""
    if not matrix:
        return None
    last = matrix[-1]
    return _mean_change((last[i], matrix[i][i]) for i in range(len(last) - 1))


def forward_transfer(matrix: Matrix, alone: Sequence[float | None]) -> float | None:
    """FWT: mean gain of the later tasks over networks that learned each alone (ONE, in percent), as a fraction."""
    return _mean_change((matrix[i][i], alone[i]) for i in range(1, len(matrix)))


def _mean_change(pairs: Iterable[tuple[float | None, float | None]]) -> float | None:
    change = _mean(None if now is None or then is None else now - then for now, then in pairs)
    return None if change is None else change / 100


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean; None for no values, or if any of them is not known."""
    given = list(values)
    known = [value for value in given if value is not None]
    return fmean(known) if known and len(known) == len(given) else None


def falls(tasks: Sequence[str], matrix: Matrix) -> Iterator[tuple[str, float, float]]:
    """The earlier tasks whose accuracy the last one lowered, with the accuracies before and after."""
    for name, before, after in zip(tasks, *matrix[-2:], strict=False) if len(matrix) > 1 else ():
        if before is not None and after is not None and after < before:
            yield name, before, after
