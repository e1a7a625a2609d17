"""ETCL: masks over one backbone, and similar tasks that help each other forwards and backwards.

In the paper's order; equations are named as in its source. `wsn` (Winning SubNetworks; Kang et al., ICML 2022) is what
remains of it without transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import sqrt

import torch
from torch import Tensor

from etcl_deploy.config import Learning
from etcl_deploy.core.task import Items
from etcl_deploy.learn.advice import Advice
from etcl_deploy.learn.backward import OldTask, improve_head, lesson_of, take_head
from etcl_deploy.learn.events import Compared, Warned
from etcl_deploy.learn.evidence import answered
from etcl_deploy.learn.forward import align, guide, pull, pull_target
from etcl_deploy.learn.head_inputs import HeadInputs, Seen, describe_inputs, logits, seen_by_head
from etcl_deploy.learn.methods.method import Method, TaskContext
from etcl_deploy.learn.projection import outside
from etcl_deploy.learn.signature import MAX_DISTANCES, Comparer, TaskSignature, sample
from etcl_deploy.learn.similarity import Comparison
from etcl_deploy.learn.task_record import HeadChange, TaskRecord, most_similar_first
from etcl_deploy.learn.task_training import FULL, Shares, TaskTraining
from etcl_deploy.network.distributed import Batch
from etcl_deploy.network.masked_network import MaskedNetwork
from etcl_deploy.network.state import TaskState

CLEARLY = 2.0  # deviations by which a start from a task that is not similar must be better than one from nothing


class Etcl(Method):
    """Similarity, forward transfer, masks, backward transfer."""

    dense = False
    forgets = False
    learns_scores = True

    def __init__(self, network: MaskedNetwork, options: Learning) -> None:
        super().__init__(network, options)
        self.improves_heads = options.similarity.similar != "none" and options.transfer.backward != "off"
        self.probe_epochs = min(options.transfer.probe_epochs, options.epochs // 10)
        self.comparer = Comparer(network, options.similarity)
        self._items = Items(torch.empty(0), torch.empty(0))
        self._comparisons: dict[str, Comparison] = {}
        self._target: Tensor | None = None  # the direction the new head is drawn to
        self._signatures: dict[str, TaskSignature] = {}
        self._advice = Advice(torch.empty(0, dtype=torch.int64), 0, {}, 0)
        self._seen: dict[str, Seen] = {}  # the training items as similar tasks see them
        self._old_heads: dict[str, Tensor] = {}  # of similar tasks, learned along with the new one

    def starts(self, context: TaskContext) -> Sequence[str | None]:
        """Find the similar tasks (Eq. SDM), and what the new task may start from: nothing, or one of them."""
        self._items = sample(context.training, self.options.similarity, context.generator)
        self._signatures = {
            name: TaskSignature.of(known.memory) for name, known in context.past.items() if known.memory
        }
        compared = self.comparer.compare(self._items, context.task.classes, self._signatures)
        self._comparisons = {comparison.task: comparison for comparison in compared}
        self._advice = self._ask(context)
        model = self._model() if self.options.transfer.alignment == "warm_start" else None
        if model is None:
            return (None,)
        if self.probe_epochs and len(context.validation):
            return None, model
        return (model if self._comparisons[model].similar else None,)

    def choose_start(self, context: TaskContext, starts: Sequence[str | None], probed: Sequence[float]) -> str | None:
        """What learned more; a task that is not known to be similar has to be clearly better than nothing."""
        chosen = starts[0]
        if len(probed) == len(starts) == 2:
            model = self._comparisons[starts[1] or ""]
            cold, warm = probed
            share = (cold + warm) / 200
            chance = 100 * sqrt(2 * share * (1 - share) / len(context.validation))
            if warm >= cold if model.similar else warm - cold > CLEARLY * chance:
                chosen = model.task
            told = f"{model.reason}; a start from it has {warm:.1f} % where one from nothing has {cold:.1f} %"
            self._comparisons[model.task] = replace(model, reason=told)
        if chosen is not None:
            self._comparisons[chosen] = replace(self._comparisons[chosen], started=True)
        context.report(Compared(context.task.name, tuple(self._comparisons.values())))
        for comparison in self._comparisons.values():
            if comparison.near and comparison.contradicted:
                context.report(Warned(context.task.name, _in_words(comparison, self.options.transfer.backward)))
        return chosen

    def begin(self, context: TaskContext) -> TaskTraining:
        """Begin a task from nothing or as an earlier one, and with heads of similar ones to be learned (Eq. Lsim)."""
        network, transfer = self.network, self.options.transfer
        kin = self._kin(context.task.classes)
        trusted = self._trusted(context.task.classes)
        in_loop = transfer.backward == "in_loop"
        self._old_heads = {s.name: s.head["weight"].clone().requires_grad_() for s in kin} if in_loop else {}
        drawn = transfer.backward == "replay" and trusted
        self._target = pull_target([state.head["weight"] for state in trusted]) if drawn else None
        start = network.finished[context.start] if context.start else None
        network.begin(
            context.task.name,
            context.task.classes,
            context.generator,
            density=self.density,
            fresh_scores=self.options.scores == "fresh",
            start=start,
            with_head=start in kin,
        )
        rate = Shares(backbone=transfer.warm_rate, head=transfer.warm_rate if start in kin else 1.0) if start else FULL
        return self.prepare(context, rate, self._old_heads)

    def lessons(self, context: TaskContext, done: float) -> Items:
        """Training items with their labels and, at first more than later, what similar tasks say of them."""
        return replace(context.training, labels=self._advice.targets(1 - done)) if self._advice else context.training

    def _ask(self, context: TaskContext) -> Advice:
        """Ask similar tasks about the training items."""
        share, classes = self.options.transfer.advice, context.task.classes
        trusted = self._trusted(classes) if share else []
        self._seen = {state.name: seen_by_head(self.network, context.training, state.name) for state in trusted}
        said = {state.name: logits(state.head, self._seen[state.name].features).softmax(1) for state in trusted}
        replay = self.options.transfer.backward == "replay"
        # Features are large: those that no head will learn from are not kept.
        self._seen = {n: seen for n, seen in self._seen.items() if replay and self._comparisons[n].alike}
        return Advice(context.training.labels, len(classes), said, share)

    def first_step(self, progress: TaskTraining, training: Items) -> None:
        """Forward transfer as in the paper: one step along the score gradients through both masks."""
        model = self._model()
        if self.options.transfer.alignment == "once" and model and self._comparisons[model].similar:
            align(progress, training, self.network.finished[model])
            progress.follow_gradients()

    def penalty(self) -> Tensor | None:
        """The head is drawn to those of similar tasks (Eq. Lsim); in the paper they are drawn to it, too."""
        target = pull_target(list(self._old_heads.values())) if self._old_heads else self._target
        if target is None:
            return None
        return self.options.transfer.pull * pull(target, self.network.head["weight"])

    def add_gradients(self, batch: Batch) -> None:
        """Forward transfer as in the authors' code."""
        if self.options.transfer.alignment == "every_step":
            guide(self.network, batch, self._similar())

    def after_step(self) -> None:
        """Old heads move only outside the space of their own data (GPM), whatever the optimizer."""
        for name, weight in self._old_heads.items():
            before = self.network.finished[name].head["weight"]
            moved = outside(weight.detach() - before, self._signatures[name].inputs.space)
            weight.data.copy_(before + moved)

    def finish(self, context: TaskContext) -> TaskRecord:
        """Fix the mask, claim its weights, improve the heads of similar tasks, take the task's signature."""
        record = self.freeze(context)
        comparisons = tuple(self._comparisons.values())
        if self.options.similarity.similar == "none":  # nobody would look at a signature
            return record
        changes: list[HeadChange] = []
        if self.options.transfer.backward != "off":
            learning = [
                s for s in self._kin(context.task.classes) if self._comparisons[s.name].alike or self._old_heads
            ]
            changes = [self._change_head(context, state) for state in learning]
        return replace(
            record, memory=self._signature(context).tensors(), comparisons=comparisons, changes=tuple(changes)
        )

    def _change_head(self, context: TaskContext, state: TaskState) -> HeadChange:
        """Improve the head of a similar task by the new one's items, or take the head that was learned in the loop."""
        network, name = self.network, state.name
        inputs, key = self._signatures[name].inputs, f"met/{name}"
        met = HeadInputs.of(self.memory, key) if f"{key}/means" in self.memory else inputs
        held = context.held(name)
        own = None if held is None else seen_by_head(network, held, name)
        if own is not None and len(own) != self._signatures[name].answers.sum():  # other items were held back then
            own = None
        old = OldTask(name, inputs, met, context.past[name].head, own)
        checked = seen_by_head(network, context.validation, name)
        if name in self._old_heads:
            head = {**state.head, "weight": self._old_heads[name].detach()}
            return take_head(network, old, checked, head, context.generator)
        training = self._seen.pop(name, None) or seen_by_head(network, context.training, name)
        lesson = lesson_of(training, self._advice.targets(without=name), checked, old)
        change = improve_head(network, old, lesson, self.options.transfer, context.generator)
        if change.kept:
            taught = describe_inputs(lesson.training, len(state.classes), None)
            self.memory = {**self.memory, **met.joined(taught).tensors(key)}
        return change

    def _signature(self, context: TaskContext) -> TaskSignature:
        name, classes = context.task.name, len(context.task.classes)
        head = self.network.finished[name].head
        inputs = describe_inputs(
            seen_by_head(self.network, context.training, name), classes, self.options.transfer.head_energy
        )
        answers, distances = torch.zeros(classes, classes, dtype=torch.int64), torch.empty(0)
        if len(context.validation):
            held = seen_by_head(self.network, context.validation, name)
            answers = answered(logits(head, held.features).argmax(1), held.labels, classes)
            inputs = inputs.as_hard_as(head, float(answers.trace()) / (len(held) + 1))
            distances = inputs.distances(held)[:MAX_DISTANCES].cpu()
        learned = self.comparer.learned(self._items, name)
        return TaskSignature(self.comparer.original(self._items), learned, inputs, answers, distances)

    def _similar(self) -> list[TaskState]:
        """The similar tasks, the most similar first."""
        return [self.network.finished[name] for name in most_similar_first(self._comparisons.values())]

    def _kin(self, classes: tuple[str, ...]) -> list[TaskState]:
        """The similar tasks with these classes: only there heads mean the same."""
        return [state for state in self._similar() if state.classes == classes]

    def _trusted(self, classes: tuple[str, ...]) -> list[TaskState]:
        """Those of them that contradict no label."""
        return [state for state in self._kin(classes) if not self._comparisons[state.name].contradicted]

    def _model(self) -> str | None:
        """The task a new one is modelled on: a similar one, or else the nearest, if any is near."""
        model = self.options.transfer.model
        order = {name: number for number, name in enumerate(self.network.finished)}

        def rank(c: Comparison) -> tuple[float, ...]:
            proven = c.agreement or 0.0 if model == "proven" else 0.0
            return (c.similar, proven, order[c.task] if model == "latest" else c.gap, order[c.task])

        near = [c for c in self._comparisons.values() if c.similar or c.near]
        return max(near, key=rank).task if near else None


def _in_words(comparison: Comparison, backward: str) -> str:
    """What an earlier task says against the names of the new one's classes."""
    pairs = [f"{name!r} as its {other!r}" for name, other in comparison.contradicted.items()]
    shown = ", ".join(pairs[:3]) + (f" and {len(pairs) - 3} more" if len(pairs) > 3 else "")
    then = " That task's head learns nothing from this one" if backward == "replay" else ""
    return f"{comparison.task!r} knows {shown}: are names swapped, or used for something else?{then}"


class Wsn(Etcl):
    """Masks alone: no task is taken for similar to another."""

    def __init__(self, network: MaskedNetwork, options: Learning) -> None:
        super().__init__(network, replace(options, similarity=replace(options.similarity, similar="none")))
