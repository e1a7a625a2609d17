from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etcl_deploy.learn import masks


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=60), st.floats(0, 1))
def test_keeps_exactly_the_share_by_magnitude_then_index(values: list[int], density: float) -> None:
    """Exactly round(density * n) are kept: the largest magnitudes, and of equal ones the first."""
    scores = torch.tensor(values, dtype=torch.float32)
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))
    expected = set(order[: round(density * len(values))])
    assert set(masks.keep_top(scores, density).nonzero().flatten().tolist()) == expected


def test_keeps_the_shape_and_the_argument() -> None:
    """A mask has its scores' shape, and the scores are not touched."""
    scores = torch.randn(3, 5, 2)
    before = scores.clone()
    assert masks.keep_top(scores, 0.5).shape == scores.shape
    assert torch.equal(scores, before)


def test_union_never_loses_a_bit() -> None:
    """What any mask has, the union has, and nothing else."""
    parts = [torch.rand(4, 7) < 0.3 for _ in range(5)]
    assert torch.equal(masks.union(parts), torch.stack(parts).any(0))


def test_density_counts_ones_over_all_masks() -> None:
    """Density is the share of ones, weighted by size."""
    assert masks.density([torch.tensor([True, False]), torch.zeros(6, dtype=torch.bool)]) == pytest.approx(1 / 8)
