"""Events that the trainer reports while it works. It never prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from etcl_deploy.learn.run import Run
from etcl_deploy.learn.similarity import Comparison
from etcl_deploy.learn.task_training import Checkpoint


@dataclass(frozen=True)
class TaskStarted:
    """A task is about to be learned; `position` counts from 1."""

    task: str
    position: int
    total: int


@dataclass(frozen=True)
class Resumed:
    """A task that was left in the middle of an epoch is taken up again there; epochs count from 1."""

    task: str
    epoch: int


@dataclass(frozen=True)
class SettingsChanged:
    """From here on tasks are learned with other settings."""

    values: Mapping[str, Any]


@dataclass(frozen=True)
class Compared:
    """A task was compared with earlier ones."""

    task: str
    comparisons: tuple[Comparison, ...]


@dataclass(frozen=True)
class Warned:
    """Something is odd about a task; it is learned all the same."""

    task: str
    message: str


@dataclass(frozen=True)
class ProbeStepDone:
    """One step of a probe of a start: an earlier task, or nothing. Of a probe no checkpoint can be taken."""

    task: str
    start: str | None
    epoch: int
    epochs: int
    step: int
    steps: int


@dataclass(frozen=True)
class StepDone:
    """One step of the optimizer, counted from 1; `checkpoint` gives everything needed to go on from here."""

    task: str
    epoch: int
    epochs: int
    step: int
    steps: int
    checkpoint: Callable[[], Checkpoint]


@dataclass(frozen=True)
class EpochDone:
    """One pass over a task's training data, with its mean loss and, in percent, the accuracy on what was held back."""

    task: str
    epoch: int
    epochs: int
    loss: float
    validation: float | None


@dataclass(frozen=True)
class TaskDone:
    """A task is learned for good; `run` holds it and all before it."""

    task: str
    run: Run


@dataclass(frozen=True)
class AccuracyFell:
    """Learning a task has lowered the accuracy of an earlier one on its test items; in percent."""

    task: str
    earlier: str
    before: float
    after: float


Event = (
    TaskStarted
    | Resumed
    | SettingsChanged
    | Compared
    | Warned
    | ProbeStepDone
    | StepDone
    | EpochDone
    | TaskDone
    | AccuracyFell
)
Report = Callable[[Event], None]
