"""Backward transfer that cannot harm: whatever a new task's labels say, no class of an old task is lost.

One task of six kinds of stripes is learned by a real network; then its head is offered lessons, right and wrong ones.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from io import StringIO

import pytest
import torch
from factories import small
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from etcl_deploy.cli.progress import TrainingProgress
from etcl_deploy.config import Learning, Transfer
from etcl_deploy.core.task import Items, Task
from etcl_deploy.learn.backward import Judge, OldTask, improve_head, lesson_of
from etcl_deploy.learn.events import AccuracyFell, Event
from etcl_deploy.learn.head_inputs import Seen, logits, seen_by_head
from etcl_deploy.learn.run import Run
from etcl_deploy.learn.signature import TaskSignature
from etcl_deploy.learn.task_record import HeadChange
from etcl_deploy.learn.trainer import learn_sequence
from etcl_deploy.network.masked_network import MaskedNetwork

CLASSES = tuple("abcdef")
OPTIONS = Learning(epochs=8, batch_size=16, learning_rate=0.01, validation_share=0.2)


def stripes(count: int, seed: int, noise: int = 200) -> Items:
    """Images of 16 pixels with a bright bar at one of six places, under noise that hides it now and then."""
    chance = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 6
    images = torch.randint(0, noise, (count, 16, 16, 1), generator=chance)
    for place in range(6):
        images[labels == place, 2 + 2 * place : 4 + 2 * place] += 35
    return Items(images.clamp_max(255).to(torch.uint8), labels)


def task(name: str, items: Items, test: Items) -> Task:
    """Items as a task."""
    return Task(name, CLASSES, items.images, items.labels, test.images, test.labels)


OLD = task("old", stripes(300, seed=1), stripes(600, seed=2))


@pytest.fixture(scope="module")
def run() -> Run:
    """One task, learned from few items: another one can teach its head something."""
    return learn_sequence(small("fcn3", width=40, density=0.5), [OLD], OPTIONS)


@pytest.fixture
def network(run: Run) -> MaskedNetwork:
    """Its network, with the head as it was learned."""
    run.network.change_head("old", run.records["old"].head)
    return run.network


def offered(run: Run, training: Items, validation: Items, own: Seen | None = None) -> HeadChange:
    """What becomes of the old head when it is offered items as a lesson, though they may not be as its own."""
    inputs = TaskSignature.of(run.records["old"].memory).inputs
    seen, labels = seen_by_head(run.network, training, "old"), F.one_hot(training.labels, 6).float()
    old = OldTask("old", inputs, inputs, run.records["old"].head, own)
    lesson = lesson_of(seen, labels, seen_by_head(run.network, validation, "old"), old)
    return improve_head(run.network, old, lesson, Transfer(), torch.Generator().manual_seed(0))


def by_class(network: MaskedNetwork) -> Tensor:
    """The accuracy of the old task's classes on many items it never saw, in percent."""
    seen = seen_by_head(network, stripes(6000, seed=3), "old")
    right = logits(network.finished["old"].head, seen.features).argmax(1) == seen.labels
    return 100 * torch.stack([right[seen.labels == label].float().mean() for label in range(6)])


def relabelled(items: Items, order: list[int]) -> Items:
    """The same images, their labels exchanged."""
    return Items(items.images, torch.tensor(order)[items.labels])


def only(items: Items, classes: int) -> Items:
    """The items of the first classes."""
    return items[items.labels < classes]


def test_a_good_lesson_helps(run: Run, network: MaskedNetwork) -> None:
    """More items of the same kind: the old task gains on items it never saw."""
    before = by_class(network).mean()
    change = offered(run, stripes(600, seed=4), stripes(150, seed=5))
    assert change.kept and change.moved > 0
    assert by_class(network).mean() > before + 0.3, before


def rare(items: Items, every: int) -> Items:
    """The items without most of the last class."""
    return items[(items.labels != 5) | (torch.arange(len(items)) % every == 5)]


HARM = {
    "swapped": lambda items: relabelled(items, [0, 1, 2, 3, 5, 4]),
    "permuted": lambda items: relabelled(items, [1, 2, 3, 4, 5, 0]),
    "all one but a few": lambda items: Items(items.images, items.labels * (torch.arange(len(items)) % 50 == 0)),
    "half of them missing": lambda items: only(items, 3),
    "another style": lambda items: Items(255 - items.images, items.labels),
    "noise": lambda items: Items(torch.randint_like(items.images, 256), items.labels),
}


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("at_hand", [False, True], ids=["own items gone", "own items at hand"])
def test_no_later_task_harms_a_class(run: Run, network: MaskedNetwork, harm: str, at_hand: bool) -> None:
    """Whatever its labels say, in its validation items, too: no class of the earlier task loses a point."""
    before = by_class(network)
    new = task("new", HARM[harm](stripes(600, seed=7)), HARM[harm](stripes(60, seed=8)))
    again = copy.deepcopy(run)
    learned = learn_sequence(again.network, [new], OPTIONS, before=again, earlier=[OLD] if at_hand else [])
    assert (by_class(again.network) - before).min() >= -1, learned.records["new"]


@pytest.mark.parametrize("every", [600, 300, 120, 30])
def test_a_class_that_is_rare_is_not_pushed_away(run: Run, network: MaskedNetwork, every: int) -> None:
    """Items of the same kind and right labels, but of one class few or one: it loses nothing, and others gain."""
    before = by_class(network)
    assert offered(run, rare(stripes(600, seed=4), every), stripes(150, seed=5)).kept
    change = by_class(network) - before
    assert change[5] > -2
    assert change[:5].mean() > 0


def test_missing_classes_are_not_pushed_away(run: Run, network: MaskedNetwork) -> None:
    """Half of the classes are missing, in the validation items, too: those lose nothing, whoever else gains."""
    before = by_class(network)
    assert offered(run, only(stripes(600, seed=7), 3), only(stripes(150, seed=8), 3)).kept
    assert (by_class(network) - before)[3:].min() > -2


def test_small_losses_do_not_add_up(run: Run, network: MaskedNetwork) -> None:
    """Lesson after lesson with two classes swapped, though it should take none: the draws see one deviation at most."""
    inputs = TaskSignature.of(run.records["old"].memory).inputs
    drawn = inputs.of_each(2000, torch.Generator().manual_seed(9))

    def right() -> Tensor:
        said = logits(network.finished["old"].head, drawn.features).argmax(1)
        return (said == drawn.labels).view(6, -1).double().mean(1)

    first = right()
    for seed in range(10, 18):
        offered(run, *(HARM["swapped"](stripes(count, seed)) for count in (300, 60)))
    deviations = (first * (1 - first) / inputs.counts).sqrt()
    assert ((first - right()) <= deviations + 0.05).all()  # and the noise of the 200 draws


@pytest.mark.parametrize(
    ("deviations", "alone", "with_own"), [(0.9, False, False), (1.5, True, False), (2.1, True, True)]
)
def test_draws_may_lose_more_beside_own_items(
    run: Run, network: MaskedNetwork, deviations: float, alone: bool, with_own: bool
) -> None:
    """One deviation of a class's draws where they alone stand for the old task, two where its own items judge too."""
    inputs, head = TaskSignature.of(run.records["old"].memory).inputs, network.finished["old"].head
    seen = seen_by_head(network, stripes(60, seed=6), "old")
    for own, harm in ((None, alone), (seen, with_own)):
        old = OldTask("old", inputs, inputs, head, own)
        judge = Judge(old, seen, torch.ones(6, dtype=torch.bool), torch.Generator().manual_seed(0))
        before = judge(head)
        known = before.drawn[0]
        drawn = before.drawn.clone()
        drawn[0] -= deviations * (known * (1 - known) / inputs.counts[0]).sqrt()
        assert before.drawn[0] - drawn[0] > 0.01, "less than what any class may lose: this would prove nothing"
        assert judge.sees_harm(before, replace(before, drawn=drawn)) == harm


def test_own_items_have_the_last_word(run: Run, network: MaskedNetwork) -> None:
    """An update that lowers the old task's own validation items is not kept, whatever all else says."""
    good = stripes(600, seed=4), stripes(150, seed=5)
    seen = seen_by_head(network, stripes(3000, seed=6), "old")
    before = logits(network.finished["old"].head, seen.features).argmax(1) == seen.labels
    kept = offered(run, *good).kept
    assert kept
    after = logits(network.finished["old"].head, seen.features).argmax(1) == seen.labels
    network.change_head("old", run.records["old"].head)
    change = offered(run, *good, own=seen[before & ~after])
    assert change.kept < kept
    assert change.own_after == change.own_before == 100


def test_an_accuracy_that_falls_is_said() -> None:
    """Where nothing is checked heads may lose; then the run says which task, and by how much."""
    options = replace(OPTIONS, similarity=replace(OPTIONS.similarity, similar="all"))
    loose = replace(options, transfer=Transfer(backward="in_loop", head_energy=0.05, pull=30.0, advice=0.0))
    heard: list[Event] = []
    one, other = stripes(150, seed=1), relabelled(stripes(150, seed=9), [1, 2, 3, 4, 5, 0])
    tasks = [task("old", one, stripes(600, seed=2)), task("new", other, other)]
    made = learn_sequence(small("fcn3", width=40, density=0.5), tasks, loose, heard.append)
    (before,), (after, _) = made.matrix
    assert before is not None and after is not None and after < before, "nothing fell: this would prove nothing"
    told = [event for event in heard if isinstance(event, AccuracyFell)]
    assert told == [AccuracyFell("new", "old", before, after)]
    screen = Console(file=StringIO(), width=200)
    TrainingProgress(screen)(told[0])
    assert f"✗ old fell from {before:.1f} to {after:.1f} % on its test items" in screen.file.getvalue()  # type: ignore[attr-defined]
