"""Counters of a service, as sums since they were last reported, and their regular report to a server's metrics."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NoReturn

from etcl_deploy.runtime.predictor import Predictor

MAX_TASK_LABELS = 200  # tasks with a series of their own; the others are counted together, as OTHER
OTHER = "(other)"
REPORT_SECONDS = 5
PAUSE_EVERY, PAUSE_SECONDS = 10, 0.005  # updates after which requests get the processor again

# Name -> unit and labels, as handlers/metrics.yaml declares them.
COUNTERS = {
    "etcl_requests_total": ("Count", ["task"]),
    "etcl_items_total": ("Count", ["task"]),
    "etcl_errors_total": ("Count", ["code"]),
    "etcl_stage_microseconds_total": ("Microseconds", ["task", "stage"]),
    "etcl_cache_hits_total": ("Count", ["worker"]),
    "etcl_cache_misses_total": ("Count", ["worker"]),
    "etcl_cache_evictions_total": ("Count", ["worker"]),
}
GAUGES = {
    "etcl_tasks": ("Count", ["worker"]),
    "etcl_tasks_ready": ("Count", ["worker"]),
    "etcl_cache_bytes": ("Bytes", ["worker"]),
    "etcl_task_bytes": ("Bytes", ["task"]),
}

Labels = tuple[str, ...]
Update = Callable[[str, int, Labels], None]  # adds to a counter, or sets a gauge, of a server


class Meter:
    """Sums by name and labels. May be used from several threads."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, Labels], float] = defaultdict(float)
        self._task_labels: dict[str, str] = {}
        self._lock = threading.Lock()

    def add(self, name: str, labels: Labels, value: float = 1) -> None:
        """Count `value` more."""
        with self._lock:
            self._sums[name, labels] += value

    def observe(self, task: str, stage: str, seconds: float) -> None:
        """Count the time a task took in a stage."""
        self.add("etcl_stage_microseconds_total", (self.label(task), stage), 1e6 * seconds)

    def label(self, task: str) -> str:
        """The label of a task: its name, without characters that have a meaning in a line of metrics."""
        label = self._task_labels.get(task)
        if label is None:
            if len(self._task_labels) >= MAX_TASK_LABELS:
                return OTHER
            label = self._task_labels[task] = re.sub(r"[^\w .@/()+-]", "_", task)
        return label

    def drain(self) -> Iterator[tuple[str, Labels, float]]:
        """Name, labels and sum of everything that was counted since the last time."""
        with self._lock:
            sums, self._sums = self._sums, defaultdict(float)
        for (name, labels), value in sums.items():
            yield name, labels, value


def report_forever(meter: Meter, predictor: Predictor, update: Update) -> NoReturn:
    """Report what was counted and the state of the cache, every few seconds: each update may cost a line of a log."""
    worker = (str(os.getpid()),)
    bundle = predictor.bundle
    for name in bundle.tasks:
        label = meter.label(name)
        if label != OTHER:
            update("etcl_task_bytes", sum(bundle.bytes_of(name).values()), (label,))
    update("etcl_tasks", len(bundle.tasks), worker)
    reported = {"hits": 0, "misses": 0, "evictions": 0}
    while True:
        cache = predictor.cache()
        for kind, before in reported.items():
            reported[kind] = getattr(cache, kind)
            meter.add(f"etcl_cache_{kind}_total", worker, reported[kind] - before)
        for number, (name, labels, value) in enumerate(meter.drain()):
            if value:
                update(name, round(value), labels)
            if number % PAUSE_EVERY == 0:
                time.sleep(PAUSE_SECONDS)
        update("etcl_tasks_ready", len(cache.tasks), worker)
        update("etcl_cache_bytes", sum(cache.tasks.values()), worker)
        time.sleep(REPORT_SECONDS)
