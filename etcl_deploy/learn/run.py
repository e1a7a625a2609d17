"""A run: what a sequence of tasks left behind."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

from torch import Tensor

from etcl_deploy import __version__
from etcl_deploy.config import Config
from etcl_deploy.learn import metrics
from etcl_deploy.learn.metrics import AccuracyRow
from etcl_deploy.learn.task_record import TaskRecord
from etcl_deploy.network.masked_network import MaskedNetwork


def current_versions() -> dict[str, str]:
    """The versions that decide what training gives."""
    return {
        "etcl_deploy": __version__,
        "python": platform.python_version(),
        "torch": version("torch"),
    }


@dataclass(frozen=True)
class Run:
    """A network with its finished tasks, what is known of each and of all together, the accuracy matrix in percent, the
    time it took."""

    network: MaskedNetwork
    records: Mapping[str, TaskRecord] = field(default_factory=dict)
    memory: Mapping[str, Tensor] = field(default_factory=dict)  # what the method remembers of all tasks together
    matrix: tuple[AccuracyRow, ...] = ()
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=current_versions)  # what it was learned with

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks learned, in order."""
        return tuple(self.records)

    def summary(self, config: Config) -> dict[str, Any]:
        """What `etcl train` and `etcl eval` report."""
        return {
            "method": config.learning.method,
            "recipe": config.recipe,
            "seed": config.learning.seed,
            "tasks": list(self.tasks),
            "matrix": [list(row) for row in self.matrix],
            "acc": metrics.average_accuracy(self.matrix),
            "bwt": metrics.backward_transfer(self.matrix),
            "fwt": None,
            "claimed": self.network.claimed(),
            "similar": {name: list(known.similar) for name, known in self.records.items() if known.similar},
            "comparisons": {name: [asdict(c) for c in known.comparisons] for name, known in self.records.items()},
            "heads": {name: [asdict(c) for c in known.changes] for name, known in self.records.items()},
            "seconds": self.seconds,
        }
