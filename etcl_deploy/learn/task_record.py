"""The knowledge base of a run: a record of each task, for the sake of later ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from etcl_deploy.learn.similarity import Comparison
from etcl_deploy.network.state import Head


@dataclass(frozen=True)
class HeadChange:
    """The attempt of a later task to improve the head of an earlier one, and its result."""

    task: str
    kept: float  # the share of the update that was kept; 0: the head is as it was
    moved: float  # length of the change over length of the head
    before: float | None  # accuracy on the new task's validation items through the old task, in percent
    after: float | None
    own_before: float | None  # and on its own validation items, where they were at hand
    own_after: float | None
    worst: float  # the change of the class that lost most, on draws from its own inputs, in points


@dataclass(frozen=True)
class TaskRecord:
    """Everything later tasks need to know of one task."""

    head: Head  # as the task was finished with; later tasks may have improved it since
    memory: Mapping[str, Tensor] = field(default_factory=dict)  # what its method remembers of it alone
    comparisons: tuple[Comparison, ...] = ()  # with earlier tasks, before it was learned
    changes: tuple[HeadChange, ...] = ()  # of earlier heads, while it was learned

    @property
    def similar(self) -> tuple[str, ...]:
        """The similar tasks, the most similar first."""
        return most_similar_first(self.comparisons)


def most_similar_first(comparisons: Iterable[Comparison]) -> tuple[str, ...]:
    """The tasks found similar; of equally similar ones the latest, which knows most, comes first."""
    similar = [c for c in comparisons if c.similar]
    return tuple(c.task for c in sorted(reversed(similar), key=lambda c: -c.gap))
