"""What an earlier task's answers prove about a new task's labels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from factories import make_tasks, small
from torch import Tensor

from etcl_deploy.config import Learning, Similarity
from etcl_deploy.core.task import Task
from etcl_deploy.learn.events import Compared, Event, Warned
from etcl_deploy.learn.evidence import Evidence, answered, evidence, further_out, kappa, rarer
from etcl_deploy.learn.similarity import Comparison
from etcl_deploy.learn.trainer import learn_sequence

LABELS = torch.arange(300) % 3


def found(answers: Tensor, labels: Tensor = LABELS, own: Tensor | None = None) -> Evidence:
    """The evidence in answers, of a task that gets nine tenths of its own items right or has the answers `own`."""
    usual = 9 * torch.eye(3, dtype=torch.int64) + 1 if own is None else own
    return evidence(answered(answers, labels, 3), usual)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [(LABELS, 1.0), ((LABELS + 1) % 3, -0.5), (torch.zeros_like(LABELS), 0.0), (torch.full_like(LABELS, 2), 0.0)],
)
def test_kappa_is_agreement_beyond_chance(answers: Tensor, expected: float) -> None:
    """Saying always the same proves nothing, however often it is right."""
    assert found(answers).kappa == pytest.approx(expected)
    assert kappa(torch.zeros(3, 3)) == 0


def test_swapped_classes_are_found_and_others_are_not() -> None:
    """Two classes change names; of the third one only chance differs."""
    assert found(torch.tensor([1, 0, 2])[LABELS]).contradicted == {0: 1, 1: 0}
    mistaken = torch.where(torch.arange(300) % 9 == 0, (LABELS + 1) % 3, LABELS)  # a third of class 0
    assert found(mistaken).contradicted == {}


def test_a_class_a_task_does_not_know_itself_contradicts_nothing() -> None:
    """It takes most of its own items of that class for another, too; of a task without such items nothing is known."""
    lookalike = torch.where((LABELS == 0) & (torch.arange(300) % 2 == 0), 1, LABELS)
    lookalike[0:90:3] = 1  # now two thirds of class 0
    assert found(lookalike).contradicted == {0: 1}
    assert found(lookalike, own=torch.tensor([[4, 8, 0], [1, 11, 0], [0, 0, 12]])).contradicted == {}
    assert found(lookalike, own=torch.zeros(3, 3, dtype=torch.int64)).contradicted == {}


def test_few_items_prove_nothing() -> None:
    """One mistake is not a contradiction; thirty of one kind are."""
    labels, answers = torch.zeros(30, dtype=torch.int64), torch.ones(30, dtype=torch.int64)
    assert found(answers[:1], labels[:1]).contradicted == {}
    assert found(answers, labels).contradicted == {0: 1}


@pytest.mark.parametrize(("shift", "further"), [(0.0, False), (-0.5, False), (0.5, True)])
def test_items_of_another_style_lie_further_out(shift: float, further: bool) -> None:
    """Seventy of a task's own items are enough to tell; nearer ones, and none at all, are another matter."""
    chance = torch.Generator().manual_seed(0)
    own, new = (torch.randn(count, 20, generator=chance).norm(dim=1) for count in (70, 300))
    assert further_out(new + shift, own) == further
    assert further_out(new, own[:0])
    assert further_out(new[:0], own)


def test_a_class_is_rarer_only_beyond_chance() -> None:
    """Ten beside forty are; none beside eight only where very many are new; none beside one or two never."""
    own = torch.tensor([40, 40, 8, 2, 1])
    assert rarer(torch.tensor([80, 10, 0, 0, 5]), own).tolist() == [False, True, False, False, False]
    assert rarer(torch.tensor([400, 390, 10, 3, 9]), own).tolist() == [False, False, True, False, False]
    assert rarer(torch.zeros(5), own).tolist() == [False] * 5


def renamed(task: Task, order: list[int]) -> Task:
    """The same images, their labels exchanged."""
    exchange = torch.tensor(order)
    return replace(task, train_y=exchange[task.train_y], test_y=exchange[task.test_y])


@pytest.mark.parametrize(
    ("order", "similar", "told"),
    [
        ([0, 1, 2], True, {}),
        ([0, 2, 1], False, {"c": "b", "b": "c"}),
        ([1, 2, 0], False, {"b": "a", "c": "b", "a": "c"}),
    ],
)
def test_names_that_contradict_what_was_learned_are_told(order: list[int], similar: bool, told: dict[str, str]) -> None:
    """The same images under other names are near by distance, and not similar: the user hears which names differ."""
    tasks = make_tasks(2, items=240)
    heard: list[Event] = []
    options = Learning(epochs=9, batch_size=16, learning_rate=0.01, similarity=Similarity(margin=0.0))
    learn_sequence(small("fcn3", width=30), [tasks[0], renamed(tasks[1], order)], options, heard.append)
    (comparison,) = compared(heard)[-1]
    assert (comparison.near, comparison.similar, comparison.contradicted) == (True, similar, told), comparison
    warnings = [event.message for event in heard if isinstance(event, Warned)]
    assert len(warnings) == bool(told)
    for name, other in told.items():
        assert f"{name!r} as its {other!r}" in warnings[0]


def compared(events: list[Event]) -> list[tuple[Comparison, ...]]:
    """What was compared, task by task."""
    return [event.comparisons for event in events if isinstance(event, Compared)]
