"""How labels and the advice of similar tasks are mixed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from etcl_deploy.learn.advice import Advice

LABELS = torch.arange(30) % 3
HARD = F.one_hot(LABELS, 3).float()


def saying(order: list[int], sure: float = 0.8) -> Tensor:
    """A task that takes items of each class for another one, mostly."""
    return F.one_hot(torch.tensor(order)[LABELS], 3) * (sure - (1 - sure) / 2) + (1 - sure) / 2


@pytest.mark.parametrize(("advisers", "share"), [(1, 0.25), (2, 1 / 3), (9, 0.45)])
def test_many_are_heeded_more_than_one(advisers: int, share: float) -> None:
    """Of a label at most half is advice, a quarter if only one task gives it."""
    said = {str(number): saying([0, 1, 2]) for number in range(advisers)}
    targets = Advice(LABELS, 3, said, 0.5).targets()
    torch.testing.assert_close(targets, (1 - share) * HARD + share * saying([0, 1, 2]))


def test_in_the_end_labels_are_learned() -> None:
    """Half of the weight is half of the advice; none is none."""
    advice = Advice(LABELS, 3, {"a": saying([0, 1, 2])}, 0.5)
    torch.testing.assert_close(advice.targets(0.5), 0.875 * HARD + 0.125 * saying([0, 1, 2]))
    assert torch.equal(advice.targets(0.0), HARD)
    assert torch.equal(Advice(LABELS, 3, {}, 0.5).targets(), HARD)


def test_a_task_is_not_advised_by_itself() -> None:
    """What it said of the items is left out; of one adviser nothing remains."""
    said = {"a": saying([0, 1, 2]), "b": saying([0, 1, 2], 0.6)}
    only_b = Advice(LABELS, 3, {"b": said["b"]}, 0.5)
    assert torch.equal(Advice(LABELS, 3, said, 0.5).targets(without="a"), only_b.targets())
    assert torch.equal(only_b.targets(without="b"), HARD)


def test_a_class_known_by_another_name_is_not_advised() -> None:
    """Two classes are swapped: their items keep their labels, those of the third take the advice."""
    targets = Advice(LABELS, 3, {"a": saying([1, 0, 2])}, 0.5).targets()
    assert torch.equal(targets[LABELS < 2], HARD[LABELS < 2])
    assert targets[2, 2] < 1


def test_items_nobody_was_asked_about_keep_their_labels() -> None:
    """Of very many items only the first are asked about."""
    targets = Advice(LABELS, 3, {"a": saying([0, 1, 2])[:10]}, 0.5).targets()
    assert (targets[:10].max(1).values < 1).all()
    assert torch.equal(targets[10:], HARD[10:])
