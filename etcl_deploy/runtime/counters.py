"""Counts what happens, to be told to whoever keeps metrics: sums since the last time, so that telling is cheap."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Iterator

MOST_TASKS = 200  # that have a series of their own; the rest is counted as OTHER
OTHER = "(other)"

Labels = tuple[str, ...]


class Meter:
    """Sums by name and labels. May be used from several threads."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, Labels], float] = defaultdict(float)
        self._tasks: dict[str, str] = {}
        self._lock = threading.Lock()

    def add(self, name: str, labels: Labels, value: float = 1) -> None:
        """Count `value` more."""
        with self._lock:
            self._sums[name, labels] += value

    def label(self, task: str) -> str:
        """What a task is called in metrics: its name without what metrics give a spec, for so many tasks."""
        found = self._tasks.get(task)
        if found is None:
            if len(self._tasks) >= MOST_TASKS:
                return OTHER
            found = self._tasks[task] = re.sub(r"[^\w .@/()+-]", "_", task)
        return found

    def drain(self) -> Iterator[tuple[str, Labels, float]]:
        """Name, labels and sum of all that was counted since the last time."""
        with self._lock:
            sums, self._sums = self._sums, defaultdict(float)
        for (name, labels), value in sums.items():
            yield name, labels, value
