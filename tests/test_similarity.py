from __future__ import annotations

import pytest
import torch
from torch import Tensor

from etcl_deploy.learn.projection import principal
from etcl_deploy.learn.similarity import DISTANCES, RULES, Comparison, SampleSignature, by_distance, transport


def features(seed: int, items: int = 60, size: int = 12) -> Tensor:
    """Random features whose directions differ in energy, and with a mean of their own."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.linalg.qr(torch.randn(size, size, generator=generator)).Q
    return torch.randn(items, size, generator=generator) * torch.linspace(3, 0.01, size) @ directions + 2


@pytest.mark.parametrize("name", sorted(DISTANCES))
def test_a_sample_is_at_no_distance_from_itself(name: str) -> None:
    """And at the same distance from another in both directions."""
    distance = DISTANCES[name]
    one, two = (distance.describe(features(seed), 0.99) for seed in (1, 2))
    assert distance.between(one, one) == pytest.approx(0, abs=1e-6)
    assert distance.between(one, two) == pytest.approx(distance.between(two, one))
    assert distance.between(one, two) > 1e-3


@pytest.mark.parametrize("name", ["centred_transport", "transport"])
def test_the_sign_of_a_direction_does_not_count(name: str) -> None:
    """Singular vectors have no sign of their own."""
    one = DISTANCES[name].describe(features(1), 0.99)
    assert transport(one, SampleSignature(-one.points, one.weights)) == pytest.approx(0, abs=1e-6)


def test_orthogonal_directions_are_as_far_as_can_be() -> None:
    """Nothing in common: the whole weight moves at cost one."""
    axes = torch.eye(4)
    half = torch.full((2,), 0.5)
    assert transport(SampleSignature(axes[:2], half), SampleSignature(axes[2:], half)) == pytest.approx(1)
    assert transport(SampleSignature(axes[:2], half), SampleSignature(axes[1:3], half)) == pytest.approx(0.5)


def test_bases_are_the_principal_directions_weighted_by_their_energy() -> None:
    """Weights sum to one; what the directions are is told in test_projection.py."""
    directions, shares = principal(features(3), 0.9)
    signature = DISTANCES["transport"].describe(features(3), 0.9)
    assert torch.equal(signature.points, directions)
    torch.testing.assert_close(signature.weights, shares / shares.sum())


def test_centring_removes_the_mean() -> None:
    """Two samples that differ in their mean alone are the same once centred, and not before."""
    one, two = features(1), features(1) + 5
    for name, same in (("centred_transport", True), ("transport", False)):
        describe, between = DISTANCES[name].describe, DISTANCES[name].between
        assert (between(describe(one, 0.99), describe(two, 0.99)) < 1e-4) == same


def test_items_that_are_all_alike_have_a_signature() -> None:
    """No spread at all is odd, not an error."""
    flat = torch.ones(10, 4)
    for distance in DISTANCES.values():
        one = distance.describe(flat, 0.99)
        assert distance.between(one, one) == pytest.approx(0, abs=1e-6)


def decided(distances: list[float], originals: list[float], rule: str, margin: float) -> list[Comparison]:
    """Verdicts on tasks a, b, ... whose gaps are certain."""
    tasks, gaps = list("abcd"[: len(distances)]), RULES[rule](distances, originals)
    return list(by_distance(tasks, distances, originals, gaps, [0.0] * len(distances), margin, 2.0))


def test_the_relative_rule() -> None:
    """Near where learning removed at least the margin of the original distance."""
    close, far, worse, nothing = decided([0.2, 0.8, 1.5, 0.0], [1.0, 1.0, 1.0, 0.0], "relative", 0.5)
    assert (close.near, close.gap) == (True, pytest.approx(0.8))
    assert close.reason == "gap 0.80 >= 0.5"
    assert (far.near, far.reason) == (False, "gap 0.20 < 0.5")
    assert (worse.near, worse.reason) == (False, "learning brought them no closer")
    assert nothing.near, "the same to begin with, and still the same"


@pytest.mark.parametrize(("deviation", "near"), [(0.04, False), (0.06, True)])
def test_a_gap_that_may_be_enough_is(deviation: float, near: bool) -> None:
    """The distance only proposes: what is uncertain is left to the labels and to a probe."""
    (one,) = by_distance(["a"], [0.6], [1.0], [0.4], [deviation], 0.5, 2.0)
    assert (one.near, one.gap) == (near, pytest.approx(0.4))
    assert one.reason.startswith(f"gap 0.40 ± {deviation}")
    (further,) = by_distance(["a"], [1.1], [1.0], [-0.1], [10.0], 0.5, 2.0)
    assert not further.near, "however uncertain, learning brought them no closer"


def test_the_rule_of_the_paper_is_blind_to_a_single_task() -> None:
    """Normalized over one earlier task both distances are 1, so task 2 never has a similar one."""
    (only,) = decided([0.01], [1.0], "paper", 0.0)
    assert not only.near
    one, two = decided([0.1, 0.9], [0.5, 0.5], "paper", 0.3)
    assert (one.near, two.near) == (True, False)
    assert one.gap == pytest.approx(0.4)


@pytest.mark.parametrize("name", sorted(DISTANCES.keys() - {"flat_bases"}))  # which is nearly blind
def test_the_rough_distance_finds_the_nearest(name: str) -> None:
    """A sample with other items of the same kind is nearer than samples of other kinds."""
    distance = DISTANCES[name]
    kinds = [features(seed, items=400) * (1 + seed) + 5 * seed for seed in range(4)]
    kept = [distance.describe(kind[:200], 0.99) for kind in kinds]
    for number, kind in enumerate(kinds):
        new = distance.describe(kind[200:], 0.99)
        distances = [distance.roughly(one, new) for one in kept]
        assert distances.index(min(distances)) == number
    assert distance.roughly(kept[0], kept[0]) == pytest.approx(0, abs=1e-5)
