from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etcl_deploy.network import masks
from etcl_deploy.network.masks import TopKMask


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=60), st.floats(0, 1))
def test_keeps_exactly_the_share_by_magnitude_then_index(values: list[int], density: float) -> None:
    """Exactly round(density * n) are kept: the largest magnitudes, and of equal ones the first."""
    scores = torch.tensor([values], dtype=torch.float32)
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))
    expected = set(order[: round(density * len(values))])
    kept = masks.keep_top(scores, density)
    assert kept.dtype == torch.bool and kept.shape == scores.shape
    assert set(kept[0].nonzero().flatten().tolist()) == expected
    assert scores.tolist() == [values], "the scores stay"


@pytest.mark.parametrize("density", [0.001, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("stride", [0.0, 0.001, 0.05, 5.0])
def test_a_mask_depends_on_its_scores_alone(density: float, stride: float) -> None:
    """A mask that followed other scores before, near or far, selects what a new one selects; also among equal scores.

    There are 2,003 of them, so that the last three do not fill a word.
    """
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2003, generator=generator)
    weight = torch.randn(2003, generator=generator)
    mask = TopKMask(density)
    for step in range(30):
        magnitude = (scores if step % 3 else scores.round(decimals=1)).abs()
        mask.follow(magnitude)
        ranked = sorted((-value, index) for index, value in enumerate(magnitude.tolist()))
        kept = torch.tensor([index for _, index in ranked[: round(density * 2003)]])
        expected = torch.zeros(2003).index_fill_(0, kept, 1.0)
        assert torch.equal(mask.select(weight, torch.empty(2003)), expected * weight)
        assert torch.equal(masks.keep_top(magnitude, density), expected.bool())
        scores = scores + stride * torch.randn(2003, generator=generator)


@pytest.mark.parametrize("density", [0.0, 1e-4])
def test_nothing_is_kept_where_the_share_is_less_than_one(density: float) -> None:
    """Neither an infinite score nor an infinite value changes that."""
    mask = TopKMask(density)
    mask.follow(torch.tensor([1.0, float("inf"), 0.0]))
    assert not mask.select(torch.full((3,), float("inf")), torch.empty(3)).any()


def test_scores_can_be_dealt_out_anew_to_select_any_mask() -> None:
    """The same magnitudes in other places; scores that select the mask already stay as they are."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(30, 20, generator=generator)
    wanted = masks.keep_top(torch.randn(30, 20, generator=generator), 0.4)
    dealt = masks.reselect(scores, wanted)
    assert torch.equal(masks.keep_top(dealt, 0.4), wanted)
    assert torch.equal(dealt.abs().flatten().sort().values, scores.abs().flatten().sort().values)
    assert torch.equal(masks.reselect(scores, masks.keep_top(scores, 0.4)), scores)
    for part in (wanted, ~wanted):
        assert torch.equal(dealt[part].argsort(), scores[part].argsort()), "each part is ranked as before"


def test_of_equal_scores_the_first_are_kept_however_many_there_are() -> None:
    """Sorting of long tensors is not stable by itself; nothing but the scores decides."""
    scores = torch.arange(20_000).remainder(3).float()
    expected = torch.tensor([n for n in range(20_000) if n % 3 == 2] + [n for n in range(20_000) if n % 3 == 1][:1334])
    assert torch.equal(masks.keep_top(scores, 0.4).nonzero().flatten(), expected.sort().values)
    assert torch.equal(masks.reselect(scores, masks.keep_top(scores, 0.4)), scores)
    dealt = masks.reselect(scores, scores == 0)  # 6667 of them for 6666 twos: the last one gets a little more than 1
    assert dealt[0::3].tolist() == [2.0] * 6666 + [1 + 2.0**-23]
    assert bool((dealt[2::3] == 1).all()) and not dealt[1::3].any()


@pytest.mark.parametrize("scores", [[0.5, 0.5, 0.9, 0.1], [0.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5], [2.0**25] * 4])
def test_scores_that_tie_still_select_the_mask_they_are_dealt_for(scores: list[float]) -> None:
    """Any number may be equal where the mask ends; in single precision 2^25 + 1 is 2^25."""
    wanted = torch.tensor([False, True, True, False])
    before = torch.tensor(scores)
    dealt = masks.reselect(before, wanted)
    assert torch.equal(masks.keep_top(dealt, 0.5), wanted)
    assert torch.equal(before, torch.tensor(scores)), "the argument stays"
    # The numbers are those that were there, but that the least selected one is the next larger.
    ranked, dealt = before.sort(descending=True).values, dealt.sort(descending=True).values
    assert torch.equal(dealt[2:], ranked[2:])
    least = torch.nextafter(ranked[1], torch.tensor(torch.inf))
    assert torch.equal(dealt[:2], torch.where(ranked[:2] == ranked[1], least, ranked[:2]))


def test_union_never_loses_a_bit() -> None:
    """The union has every bit that a mask has, and no other."""
    parts = [torch.rand(4, 7) < 0.3 for _ in range(5)]
    before = [part.clone() for part in parts]
    assert torch.equal(masks.union(parts), torch.stack(parts).any(0))
    assert all(torch.equal(part, kept) for part, kept in zip(parts, before, strict=True)), "no part is changed"


def test_density_counts_ones_over_all_masks() -> None:
    """Density is the share of ones, weighted by size."""
    assert masks.density([torch.tensor([True, False]), torch.zeros(6, dtype=torch.bool)]) == 1 / 8
    assert masks.density([torch.ones(3, dtype=torch.bool)]) == 1
    assert masks.density([]) == 0
