"""The interface of all methods: how a task begins, which of its parameters are learned, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from etcl_deploy.config import Learning
from etcl_deploy.core.task import Items, Task
from etcl_deploy.learn.events import Report
from etcl_deploy.learn.task_record import TaskRecord
from etcl_deploy.learn.task_training import FULL, Shares, TaskTraining
from etcl_deploy.network.distributed import ALONE, Batch, Distributed
from etcl_deploy.network.masked_network import EVALUATION_BATCH, MaskedNetwork
from etcl_deploy.network.state import Masks

HeldBack = Callable[[str], Items | None]  # the validation items of an earlier task, if they are at hand


@dataclass(frozen=True)
class TaskContext:
    """A task to be learned, with everything a method may use to learn it."""

    task: Task
    training: Items
    validation: Items
    past: Mapping[str, TaskRecord]  # of earlier tasks, in order
    generator: torch.Generator
    report: Report
    group: Distributed = ALONE  # the processes that learn it together
    held: HeldBack = lambda name: None
    start: str | None = None  # the finished task to start from; None: from nothing


class Method:
    """A way to learn tasks one after another over one backbone. As it stands: plain fine-tuning of a dense network.

    `begin` is called when a task begins, `finish` when it was learned, the others at every step in between. `finish`
    may keep tensors for later tasks: in `memory` if they are about all tasks together, or in the record of the one
    task, which later tasks find in `past`. A method that knows several ways to start a task names them in `starts`;
    each is probed for `probe_epochs`, and `choose_start` says which goes on.
    """

    dense: bool = True  # a task uses all weights while it is learned, not the share `density` of them
    forgets: bool = True  # later tasks may change what a finished one answers, other than by its head
    learns_weights: bool = True
    learns_scores: bool = False
    improves_heads: bool = False  # of earlier tasks
    probe_epochs: int = 0  # of each of several starts

    def __init__(self, network: MaskedNetwork, options: Learning) -> None:
        self.network = network
        self.options = options
        self.memory: Mapping[str, Tensor] = {}
        self.said: set[str] = set()  # warnings about the whole run that were given

    @property
    def density(self) -> float:
        """The share of each layer's weights a task uses while it is learned."""
        return 1.0 if self.dense else self.network.density

    def starts(self, context: TaskContext) -> Sequence[str | None]:
        """The finished tasks a new one may start from (None: from nothing). Called once, before it begins."""
        return (None,)

    def choose_start(self, context: TaskContext, starts: Sequence[str | None], probed: Sequence[float]) -> str | None:
        """The start to go on with; `probed` has the validation accuracy of each in percent; nothing, if none was."""
        return starts[0]

    def begin(self, context: TaskContext) -> TaskTraining:
        """Begin a task. Only the weights remain of what was learned before."""
        self.network.begin(context.task.name, context.task.classes, context.generator, density=self.density)
        return self.prepare(context)

    def prepare(
        self, context: TaskContext, shares: Shares = FULL, extra: Mapping[str, Tensor] = MappingProxyType({})
    ) -> TaskTraining:
        """The optimizer and all else the task at hand is learned with, at `shares` of the learning rate.

        `extra` is learned too, outside the network.
        """
        layers = self.network.masked_layers.values()
        weights = [layer.weight for layer in layers] if self.learns_weights else []
        scores = [layer.scores for layer in layers] if self.learns_scores else []
        position = len(self.network.finished) + 1
        parameters = (weights, scores)
        name, group = context.task.name, context.group
        return TaskTraining(self.network, name, self.options, position, parameters, extra, shares, group)

    def lessons(self, context: TaskContext, done: float) -> Items:
        """The training items as they are to be learned: with labels, or with probabilities `[items, classes]`.

        Called for every epoch; `done` is the share of the epochs that are over.
        """
        return context.training

    def first_step(self, progress: TaskTraining, training: Items) -> None:
        """Called once, before the first step of a task."""

    def before_batch(self, share: float) -> None:
        """Called before every batch. `share` is how much of the epoch is over: 0 at its first batch, 1 at its last.

        Also called with 1 before anything is measured.
        """

    def penalty(self) -> Tensor | None:
        """A term to add to the loss of a batch."""
        return None

    def add_gradients(self, batch: Batch) -> None:
        """Change the gradients of a batch before a step is taken along them."""

    def after_step(self) -> None:
        """Called after every step."""

    def finish(self, context: TaskContext) -> TaskRecord:
        """Fix the task for ever, and give its record."""
        return self.freeze(context, claims={})

    def freeze(
        self, context: TaskContext, masks: Masks | None = None, claims: Masks | None = None, *, alone: bool = False
    ) -> TaskRecord:
        """Fix mask and normalization, and claim weights; see `MaskedNetwork.finish`. Gives a record with the head."""
        training = context.training
        batches = training.read(training.batches(EVALUATION_BATCH), self.network.device)
        state = self.network.finish((images for images, _ in batches), masks, claims, alone=alone)
        return TaskRecord(state.head)
