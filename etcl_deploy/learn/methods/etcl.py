"""ETCL: masks over one backbone, and similar tasks that help each other forwards and backwards.

In the paper's order; equations are named as in its source. `wsn` (Winning SubNetworks; Kang et al., ICML 2022) is what
remains of it without transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from etcl_deploy.config import Learning
from etcl_deploy.core.task import Items, Task
from etcl_deploy.learn.events import Compared
from etcl_deploy.learn.methods.method import Method, TaskContext
from etcl_deploy.learn.signature import Comparer, TaskSignature, describe_inputs, sample, seen_by_head
from etcl_deploy.learn.similarity import Comparison
from etcl_deploy.learn.task_record import HeadChange, TaskRecord, most_similar_first
from etcl_deploy.learn.task_training import FULL, Shares, TaskTraining
from etcl_deploy.learn.transfer import align, guide, improve_heads, pull, pull_target
from etcl_deploy.network.distributed import Batch
from etcl_deploy.network.masked_network import MaskedNetwork
from etcl_deploy.network.state import TaskState


class Etcl(Method):
    """Similarity, forward transfer, masks, backward transfer."""

    dense = False
    forgets = False
    learns_scores = True

    def __init__(self, network: MaskedNetwork, options: Learning) -> None:
        super().__init__(network, options)
        self.improves_heads = options.similarity.similar != "none"
        self.comparer = Comparer(network, options.similarity)
        self._items = torch.empty(0)
        self._comparisons: tuple[Comparison, ...] = ()
        self._similar: Sequence[TaskState] = ()
        self._kin: Sequence[TaskState] = ()
        self._target: Tensor | None = None

    def begin(self, context: TaskContext) -> TaskTraining:
        """Find the similar tasks (Eq. SDM), and start from one of them (Eq. G-Align)."""
        network, transfer = self.network, self.options.transfer
        self._items = sample(context.training.images, self.options.similarity, context.generator)
        signatures = {name: TaskSignature.of(known.memory) for name, known in context.past.items() if known.memory}
        self._comparisons = self.comparer.compare(self._items, signatures)
        context.report(Compared(context.task.name, self._comparisons))
        self._similar = [network.finished[name] for name in most_similar_first(self._comparisons)]
        # Heads mean the same where classes do.
        self._kin = [state for state in self._similar if state.classes == context.task.classes]
        self._target = pull_target(self._kin) if transfer.backward != "off" else None
        warm = self._model() if transfer.alignment == "warm_start" else None
        network.begin(
            context.task.name,
            context.task.classes,
            context.generator,
            density=self.density,
            fresh_scores=self.options.scores == "fresh",
            start=warm,
        )
        return self.prepare(context, self._shares(warm, context.task))

    def first_step(self, progress: TaskTraining, training: Items) -> None:
        """Forward transfer as in the paper: one step along the score gradients through both masks."""
        model = self._model()
        if model and self.options.transfer.alignment == "once":
            align(progress, training, model)
            progress.follow_gradients()

    def penalty(self) -> Tensor | None:
        """The head is drawn to those of similar tasks (Eq. Lsim)."""
        if self._target is None:
            return None
        return self.options.transfer.pull * pull(self._target, self.network.head["weight"])

    def add_gradients(self, batch: Batch) -> None:
        """Forward transfer as in the authors' code."""
        if self.options.transfer.alignment == "every_step":
            guide(self.network, batch, self._similar)

    def finish(self, context: TaskContext) -> TaskRecord:
        """Fix the mask, claim its weights, improve the heads of similar tasks, take the task's signature."""
        network, transfer = self.network, self.options.transfer
        record = self.freeze(context)
        changes: tuple[HeadChange, ...] = ()
        if transfer.backward != "off":
            changes = improve_heads(
                network,
                context.task.name,
                self._kin,
                context.training,
                context.validation,
                context.past,
                transfer,
                context.generator,
            )
        signature = self._signature(context).tensors() if self.improves_heads else {}  # nobody would look at it
        return replace(record, memory=signature, comparisons=self._comparisons, changes=changes)

    def _signature(self, context: TaskContext) -> TaskSignature:
        name = context.task.name
        seen = seen_by_head(self.network, context.training, name)
        inputs = describe_inputs(seen, len(context.task.classes), self.options.transfer.head_energy)
        return TaskSignature(self.comparer.original(self._items), self.comparer.learned(self._items, name), inputs)

    def _shares(self, start: TaskState | None, task: Task) -> Shares:
        """At a lower rate it learns what it is given: the backbone, and the head where classes are equal."""
        if start is None:
            return FULL
        rate = self.options.transfer.warm_rate
        return Shares(backbone=rate, head=rate if start.classes == task.classes else 1.0)

    def _model(self) -> TaskState | None:
        """The similar task a new one is modelled on; `_similar` begins with the most similar."""
        if not self._similar or self.options.transfer.model == "most_similar":
            return self._similar[0] if self._similar else None
        names = list(self.network.finished)
        return max(self._similar, key=lambda state: names.index(state.name))


class Wsn(Etcl):
    """Masks alone: no task is taken for similar to another."""

    def __init__(self, network: MaskedNetwork, options: Learning) -> None:
        super().__init__(network, replace(options, similarity=replace(options.similarity, similar="none")))
