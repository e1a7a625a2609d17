"""Backward transfer: a new task's items improve the heads of earlier tasks whose classes mean the same (Eq. Lsim).

An old task's sub-network is frozen, so the features of the new items under it are constants: computed once a task. Its
head learns from them and from draws of all that it met before (`HeadInputs`): its own data, and what other tasks taught
it. Only items that are to it as its own teach it anything (evidence.py), and only their classes against each other: one
that is missing, or much rarer than before, is not pushed away.

An update is kept only as far as no harm is seen: not on the new task's held-back items, not on the old task's where
they are at hand, and not in any class on draws of its own data.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

import torch
from torch import Tensor
from torch.nn import functional as F

from etcl_deploy.config import Transfer
from etcl_deploy.core.task import Items
from etcl_deploy.learn.evidence import rarer
from etcl_deploy.learn.head_inputs import HeadInputs, Seen, logits
from etcl_deploy.learn.task_record import HeadChange
from etcl_deploy.network.masked_network import MaskedNetwork
from etcl_deploy.network.state import Head

BATCH = 64
NEVER = -1e4  # a logit of what cannot be; an infinite one has no product with a probability of 0
DRAWS = 200  # a class, to hold an old head against what it knew
NOISE = 0.01  # of its draws: what any class may lose
# Or so many deviations of what as many items as the class had can tell: draws are guesses, own items are not.
DEVIATIONS, WITH_OWN = 1.0, 2.0
SHARES = (1.0, 0.8, 0.6, 0.4, 0.2, 0.1)  # of an update that are tried
CAREFUL = (0.4, 0.2, 0.1)  # where no items of the old task are there to judge, or classes are rarer than they were


@dataclass(frozen=True)
class Lesson:
    """What a head can learn from: new items, some to learn from and some to check by."""

    training: Seen
    targets: Tensor  # [items, classes], what the training items are to be taken for: labels, or labels and advice
    checked: Seen
    taught: Tensor  # the classes these are of, one truth value each
    like_before: bool  # no class is rarer among the new items than it was


@dataclass(frozen=True)
class OldTask:
    """What is known of an earlier task whose head may learn."""

    name: str
    inputs: HeadInputs  # of its own items
    met: HeadInputs  # of its own items and all that its head has learned from since
    first: Head  # as it was finished with
    own: Seen | None  # its validation items, if they are at hand


@dataclass(frozen=True)
class Score:
    """How a head does on some items."""

    loss: float  # mean; of no items nan
    right: int
    items: int

    @property
    def accuracy(self) -> float | None:
        """In percent; of no items None."""
        return 100 * self.right / self.items if self.items else None


@dataclass(frozen=True)
class Verdict:
    """How a head does on everything it is judged by."""

    new: Score  # on the new task's held-back items
    own: Score  # on its own task's, where they are at hand
    drawn: Tensor  # [classes], the share of draws of each class it gets right

    @property
    def right(self) -> int:
        """How many of all held-back items it gets right."""
        return self.new.right + self.own.right


class Judge:
    """Judges a head by the new task's held-back items, by its own, and by draws of each of its classes."""

    def __init__(self, old: OldTask, checked: Seen, taught: Tensor, generator: torch.Generator) -> None:
        present = old.inputs.counts.nonzero()[:, 0]
        self._new, self._own = checked, old.own
        self._drawn = old.inputs.of_each(DRAWS, generator)
        self._counts, self._taught = old.inputs.counts[present], taught[present]
        self._deviations = WITH_OWN if old.own else DEVIATIONS
        self._first = self._right(old.first)

    @torch.no_grad()
    def __call__(self, head: Head) -> Verdict:
        """The verdict on a head."""
        return Verdict(_score(head, self._new), _score(head, self._own), self._right(head))

    def sees_harm(self, before: Verdict, after: Verdict) -> bool:
        """True if anything fell."""
        if not after.new.loss <= before.new.loss:
            return True
        if self._own and not (after.own.loss <= before.own.loss and after.own.right >= before.own.right):
            return True
        known = torch.maximum(before.drawn, self._first)  # so that small losses do not add up
        # Of a class that the new items do not have it may be one of its items.
        deviation = (known * (1 - known) / self._counts).sqrt()
        allowed = torch.where(self._taught, self._deviations * deviation, 1 / self._counts)
        return bool((known - after.drawn > allowed.clamp_min(NOISE)).any())

    def _right(self, head: Head) -> Tensor:
        """The share of draws of each class that a head gets right."""
        right = logits(head, self._drawn.features).argmax(1) == self._drawn.labels
        return right.view(-1, DRAWS).double().mean(1)


def lesson_of(training: Seen, targets: Tensor, checked: Seen, old: OldTask) -> Lesson:
    """The new items, but for those of classes that are rarer than they were: the others would push these away."""
    found = torch.bincount(training.labels, minlength=len(old.inputs.counts))
    missing = rarer(found, old.inputs.counts).to(found.device)
    taught = (found > 0) & ~missing
    targets = targets[: len(training)].to(training.features) * taught
    chosen = taught[training.labels]
    checked = checked[taught[checked.labels]]
    return Lesson(training[chosen], targets[chosen], checked, taught, not missing.any())


def improve_head(
    network: MaskedNetwork, old: OldTask, lesson: Lesson, settings: Transfer, generator: torch.Generator
) -> HeadChange:
    """Train the head of a finished task, keep of the shares that do no harm the best, and report it."""
    head = network.finished[old.name].head
    judge = Judge(old, lesson.checked, lesson.taught, generator)
    before = judge(head)
    best, kept, verdict = head, 0.0, before
    if len(lesson.training) and len(lesson.checked):
        trained = _train(head, lesson, old.met, settings, generator)
        for share in SHARES if old.own and lesson.like_before else CAREFUL:
            candidate = {key: torch.lerp(value, trained[key], share) for key, value in head.items()}
            after = judge(candidate)
            if not judge.sees_harm(before, after) and (not kept or after.right > verdict.right):
                best, kept, verdict = candidate, share, after
    return _changed(network, old.name, best, kept, before, verdict)


def take_head(
    network: MaskedNetwork, old: OldTask, checked: Seen, head: Head, generator: torch.Generator
) -> HeadChange:
    """Give a finished task a head that was learned elsewhere, whatever it does, and report what it does."""
    judge = Judge(old, checked, torch.ones_like(old.inputs.counts, dtype=torch.bool), generator)
    return _changed(network, old.name, head, 1.0, judge(network.finished[old.name].head), judge(head))


def _changed(network: MaskedNetwork, name: str, head: Head, kept: float, before: Verdict, after: Verdict) -> HeadChange:
    """Change the head of a finished task, if anything of the update is kept."""
    old = network.finished[name].head["weight"]
    if kept:
        network.change_head(name, head)
    moved = float((head["weight"] - old).norm() / old.norm())
    worst = 100 * float((after.drawn - before.drawn).min())
    new, own = (before.new.accuracy, after.new.accuracy), (before.own.accuracy, after.own.accuracy)
    return HeadChange(name, kept, moved, *new, *own, worst)


def _train(head: Head, lesson: Lesson, met: HeadInputs, settings: Transfer, generator: torch.Generator) -> Head:
    """The head after learning from the lesson, and its own answers to draws of what it met before."""
    learned = {key: value.clone().requires_grad_() for key, value in head.items()}
    optimizer = torch.optim.Adam(learned.values(), lr=settings.head_rate)
    new = lesson.training
    unknown = ~lesson.taught
    per_item = settings.head_draws
    for _ in range(settings.head_epochs):
        for batch in Items(new.features, new.labels).batches(BATCH, generator):
            drawn = met.as_met(max(1, round(per_item * len(batch))), generator).features
            answers = logits(head, drawn).softmax(1)
            # The new items say nothing of classes they do not teach.
            said = logits(learned, new.features[batch]).masked_fill(unknown, NEVER)
            kept = F.cross_entropy(logits(learned, drawn), answers)
            loss = F.cross_entropy(said, lesson.targets[batch]) + per_item * kept
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return {key: value.detach() for key, value in learned.items()}


@torch.no_grad()
def _score(head: Head, seen: Seen | None) -> Score:
    """How a head does on items it has seen."""
    if seen is None or not len(seen):
        return Score(nan, 0, 0)
    said = logits(head, seen.features)
    return Score(float(F.cross_entropy(said, seen.labels)), int((said.argmax(1) == seen.labels).sum()), len(seen))
