"""A run: what a sequence of tasks left behind."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from etcl_deploy import __version__
from etcl_deploy.config import Config
from etcl_deploy.learn import metrics
from etcl_deploy.learn.metrics import AccuracyRow
from etcl_deploy.learn.similarity import Comparison
from etcl_deploy.learn.task_record import HeadChange, TaskRecord
from etcl_deploy.network.masked_network import MaskedNetwork


def current_versions() -> dict[str, str]:
    """The versions that decide what training gives; on a CPU also the instruction set and the number of threads do."""
    return {
        "etcl_deploy": __version__,
        "python": platform.python_version(),
        "torch": version("torch"),
        "kernels": f"{torch.backends.cpu.get_cpu_capability()}/{torch.get_num_threads()}",
    }


@dataclass(frozen=True)
class RunSummary:
    """The figures of a run, as `etcl train` and `etcl eval` report them."""

    method: str
    recipe: str | None
    seed: int
    tasks: tuple[str, ...]
    matrix: tuple[AccuracyRow, ...]
    acc: float | None
    bwt: float | None
    fwt: float | None  # only a run of `one` beside it tells
    claimed: float  # share of the backbone
    similar: Mapping[str, tuple[str, ...]]  # of the tasks that had similar ones, the most similar first
    comparisons: Mapping[str, tuple[Comparison, ...]]  # of every task with earlier ones
    heads: Mapping[str, tuple[HeadChange, ...]]  # of every task: the heads it tried to improve
    seconds: float
    partial: tuple[str, ...]  # data sets that were not complete, in words
    digest: str  # of every bit that was learned
    preset: str | None = None  # of the settings

    def as_json(self) -> dict[str, Any]:
        """The same as one JSON document."""
        return asdict(self)


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

    def summary(
        self, config: Config, *, fwt: float | None = None, partial: Sequence[str] = (), digest: str = ""
    ) -> RunSummary:
        """The figures of the run; `fwt`, `partial` and `digest` are known to whoever keeps it."""
        records = self.records.items()
        return RunSummary(
            method=config.learning.method,
            recipe=config.recipe,
            preset=config.preset,
            seed=config.learning.seed,
            tasks=self.tasks,
            matrix=self.matrix,
            acc=metrics.average_accuracy(self.matrix),
            bwt=metrics.backward_transfer(self.matrix),
            fwt=fwt,
            claimed=self.network.claimed(),
            similar={name: record.similar for name, record in records if record.similar},
            comparisons={name: record.comparisons for name, record in records},
            heads={name: record.changes for name, record in records},
            seconds=self.seconds,
            partial=tuple(partial),
            digest=digest,
        )
