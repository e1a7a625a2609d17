"""What is kept of a head's inputs: a distribution whose draws stand for the data, and no item."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from etcl_deploy.learn.head_inputs import HeadInputs, Seen, describe_inputs, logits


def features(seed: int, items: int = 900, classes: int = 3, size: int = 12, shift: float = 0.0) -> Seen:
    """Inputs around three means, spread more in some directions than in others."""
    chance = torch.Generator().manual_seed(seed)
    labels = torch.arange(items) % classes
    means = 3 * torch.eye(classes, size) + shift
    spread = torch.linspace(1.5, 0.1, size) * (1 + labels.unsqueeze(1) / 2)
    return Seen(means[labels] + spread * torch.randn(items, size, generator=chance), labels)


def scatter(seen: Seen, means: Tensor) -> Tensor:
    """The covariance of inputs around the means of their classes."""
    within = seen.features - means[seen.labels]
    return within.T @ within / len(seen)


def test_draws_have_the_means_and_the_spread_of_the_data() -> None:
    """Class by class the means and sizes, all together the directions."""
    seen = features(1, items=3000)
    inputs = describe_inputs(seen, 3, None)
    drawn = inputs.as_met(60_000, torch.Generator().manual_seed(1))
    for label in range(3):
        own, made = seen.features[seen.labels == label], drawn.features[drawn.labels == label]
        torch.testing.assert_close(made.mean(0), own.mean(0), atol=0.06, rtol=0)
        assert float(made.var(0).sum()) == pytest.approx(float(own.var(0).sum()), rel=0.1)
    assert float((scatter(drawn, inputs.means) - scatter(seen, inputs.means)).norm()) < 0.15 * float(
        scatter(seen, inputs.means).norm()
    )


@pytest.mark.parametrize("accuracy", [0.5, 0.6, 0.75])
def test_draws_are_made_as_hard_as_the_data(accuracy: float) -> None:
    """Whatever a head got right of validation items, it gets right of draws."""
    head = {"weight": 2 * torch.eye(3, 12)}
    inputs = describe_inputs(features(2), 3, None).as_hard_as(head, accuracy)
    drawn = inputs.as_met(20_000, torch.Generator().manual_seed(3))
    right = (logits(head, drawn.features).argmax(1) == drawn.labels).float().mean()
    assert float(right) == pytest.approx(accuracy, abs=0.03)


def test_draws_are_never_easier_than_the_data_learned_from() -> None:
    """However well a head does on a few validation items, its draws spread as far as its training items."""
    inputs = describe_inputs(features(2), 3, None).as_hard_as({"weight": 2 * torch.eye(3, 12)}, 1.0)
    assert float(inputs.stretch) == pytest.approx(1, abs=0.01)


def test_two_distributions_joined_are_that_of_all_items() -> None:
    """Counts and means exactly; the size of every class and the directions nearly."""
    one, other = features(1), features(2, items=300, shift=1.0)
    both = Seen(torch.cat([one.features, other.features]), torch.cat([one.labels, other.labels]))
    joined = describe_inputs(one, 3, None).joined(describe_inputs(other, 3, None))
    whole = describe_inputs(both, 3, None)
    assert torch.equal(joined.counts, whole.counts)
    torch.testing.assert_close(joined.means, whole.means)
    torch.testing.assert_close(joined.sizes, whole.sizes, atol=0.05, rtol=0)
    a, b = (inputs.spread.T @ inputs.spread + torch.eye(12) * inputs.rest.square() for inputs in (joined, whole))
    assert float((a - b).norm()) < 0.05 * float(b.norm())


def test_a_class_without_items_is_never_drawn() -> None:
    """It has no distribution; joined with items of it, it has theirs."""
    seen = features(1)
    without = describe_inputs(seen[seen.labels != 1], 3, None)
    chance = torch.Generator().manual_seed(0)
    assert set(without.of_each(5, chance).labels.tolist()) == {0, 2}
    assert set(without.as_met(100, chance).labels.tolist()) == {0, 2}
    with_it = without.joined(describe_inputs(seen[seen.labels == 1], 3, None))
    torch.testing.assert_close(with_it.means, describe_inputs(seen, 3, None).means)


def test_its_size_does_not_grow_with_the_items() -> None:
    """No item is kept, and it survives being written and read."""
    few, many = (describe_inputs(features(1, items=items), 3, None).tensors("x") for items in (90, 9000))
    assert {key: value.shape for key, value in few.items()} == {key: value.shape for key, value in many.items()}
    again = HeadInputs.of(few, "x").tensors("x")
    assert all(torch.equal(value, again[key]) for key, value in few.items())


def test_distances_are_in_units_of_the_size_of_a_class() -> None:
    """Items of a wide class lie as far out as those of a narrow one; of a class it never had none is told."""
    seen = features(1, items=3000)
    inputs = describe_inputs(seen, 3, None)
    means = [inputs.distances(seen[seen.labels == label]).square().mean().sqrt() for label in range(3)]
    assert max(means) < 1.05 * min(means)
    without = describe_inputs(seen[seen.labels != 1], 3, None)
    assert len(without.distances(seen)) == 2000
