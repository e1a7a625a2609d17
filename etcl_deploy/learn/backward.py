"""Backward transfer: a new task's items improve the heads of earlier tasks whose classes mean the same (Eq. Lsim).

An old task's sub-network is frozen, so the features of the new items under it are constants: computed once a task. Its
head learns from them, and at the same time to answer as it does on draws from its own inputs (`HeadInputs`), so that
it keeps what it knows where the new items say nothing. New items teach only classes they do not contradict, and only
against each other: a missing class is not pushed away.

An update is kept only as far as no harm is seen: not on the new task's held-back items, not on the old task's where
they are at hand, and not in any class on draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan

import torch
from torch import Tensor
from torch.nn import functional as F

from etcl_deploy.config import Transfer
from etcl_deploy.core.task import Items, percent_right
from etcl_deploy.learn.head_inputs import HeadInputs, Seen, logits, seen_by_head
from etcl_deploy.learn.task_record import HeadChange
from etcl_deploy.network.masked_network import MaskedNetwork
from etcl_deploy.network.state import Head

BATCH = 64
DRAWS = 50  # a class, to hold an old head against what it knew
TOLERATED = 0.02  # of a class's draws: what it may lose, on balance
SHARES = (1.0, 0.5, 0.25, 0.125)  # of an update that are tried, until one does no harm


@dataclass(frozen=True)
class Lesson:
    """What a head can learn from: new items that do not contradict it, some to learn from and some to check by."""

    training: Seen
    checked: Seen
    classes: Tensor  # those the training items teach, one truth value each


@dataclass(frozen=True)
class Verdict:
    """How a head does on everything it is judged by."""

    new: tuple[float, float | None]  # loss and accuracy on the new task's held-back items
    own: tuple[float, float | None]  # and on its own task's, where they are at hand
    drawn: Tensor  # [classes], the share of draws of each class it gets right

    def is_no_worse_than(self, before: Verdict) -> bool:
        """True if nothing of it fell."""
        if self.own[0] > before.own[0] or (self.own[1] or 0) < (before.own[1] or 0):  # false where nothing is known
            return False
        return self.new[0] <= before.new[0] and bool((self.drawn >= before.drawn - TOLERATED).all())


@dataclass(frozen=True)
class Judge:
    """What a head is judged by: the new task's held-back items, its own, and draws of each of its classes."""

    new: Seen
    own: Seen | None
    drawn: Seen

    @torch.no_grad()
    def __call__(self, head: Head) -> Verdict:
        """The verdict on a head."""
        right = logits(head, self.drawn.features).argmax(1) == self.drawn.labels
        return Verdict(_score(head, self.new), _score(head, self.own), right.view(-1, DRAWS).double().mean(1))


def lesson_for(
    network: MaskedNetwork, name: str, training: Items, validation: Items, contradicted: Sequence[int]
) -> Lesson:
    """The new items as a finished task's head sees them, without those of contradicted classes."""
    classes = len(network.finished[name].classes)
    trusted = torch.ones(classes, dtype=torch.bool, device=network.device)
    trusted[list(contradicted)] = False
    parts = [seen_by_head(network, items, name) if len(items) else None for items in (training, validation)]
    nothing = Seen(torch.zeros(0, network.plan.features), torch.zeros(0, dtype=torch.int64))
    seen, checked = (part[trusted[part.labels]] if part else nothing for part in parts)
    taught = torch.bincount(seen.labels, minlength=classes) > 0
    return Lesson(seen, checked, taught)


def improve_head(
    network: MaskedNetwork,
    name: str,
    lesson: Lesson,
    inputs: HeadInputs,
    own: Seen | None,
    settings: Transfer,
    generator: torch.Generator,
) -> HeadChange:
    """Train the head of a finished task, keep as much of the update as does no harm, and report it.

    `own` are the old task's validation items, if they are at hand.
    """
    head = network.finished[name].head
    judge = Judge(lesson.checked, own, inputs.of_each(DRAWS, generator))
    before = judge(head)
    if len(lesson.training) and len(lesson.checked):
        trained = _train(head, lesson, inputs, settings, generator)
        for share in SHARES:
            candidate = {key: torch.lerp(value, trained[key], share) for key, value in head.items()}
            after = judge(candidate)
            if after.is_no_worse_than(before):
                return _changed(network, name, candidate, share, before, after)
    return _changed(network, name, head, 0.0, before, before)


def take_head(
    network: MaskedNetwork,
    name: str,
    head: Head,
    lesson: Lesson,
    inputs: HeadInputs,
    own: Seen | None,
    generator: torch.Generator,
) -> HeadChange:
    """Give a finished task a head that was learned elsewhere, whatever it does, and report what it does."""
    judge = Judge(lesson.checked, own, inputs.of_each(DRAWS, generator))
    before = judge(network.finished[name].head)
    return _changed(network, name, head, 1.0, before, judge(head))


def _changed(network: MaskedNetwork, name: str, head: Head, kept: float, before: Verdict, after: Verdict) -> HeadChange:
    """Change the head of a finished task, if anything of the update is kept."""
    old = network.finished[name].head["weight"]
    if kept:
        network.change_head(name, head)
    moved = float((head["weight"] - old).norm() / old.norm())
    worst = 100 * float((after.drawn - before.drawn).min())
    return HeadChange(name, kept, moved, before.new[1], after.new[1], before.own[1], after.own[1], worst)


def _train(head: Head, lesson: Lesson, inputs: HeadInputs, settings: Transfer, generator: torch.Generator) -> Head:
    """The head after learning from the lesson, and its own answers to draws from its inputs."""
    learned = {key: value.clone().requires_grad_() for key, value in head.items()}
    optimizer = torch.optim.Adam(learned.values(), lr=settings.head_rate)
    new = lesson.training
    unknown = ~lesson.classes
    per_item = settings.head_draws
    for _ in range(settings.head_epochs):
        for batch in Items(new.features, new.labels).batches(BATCH, generator):
            drawn = inputs.as_met(max(1, round(per_item * len(batch))), generator).features
            answers = logits(head, drawn).softmax(1)
            # The new items say nothing of classes they do not have.
            said = logits(learned, new.features[batch]).masked_fill(unknown, -torch.inf)
            kept = F.cross_entropy(logits(learned, drawn), answers)
            loss = F.cross_entropy(said, new.labels[batch]) + per_item * kept
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return {key: value.detach() for key, value in learned.items()}


@torch.no_grad()
def _score(head: Head, seen: Seen | None) -> tuple[float, float | None]:
    """Mean loss, and accuracy in percent; of no items neither."""
    if seen is None or not len(seen):
        return nan, None
    said = logits(head, seen.features)
    return float(F.cross_entropy(said, seen.labels)), percent_right([(said, seen.labels)])
