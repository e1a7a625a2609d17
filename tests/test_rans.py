"""Bits of unlike probability as words, and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etcl_deploy.bundle import rans

groups = st.lists(st.tuples(st.integers(0, 40), st.floats(0, 1)), max_size=12)


def batch_of(shape: list[tuple[int, float]], seed: int) -> rans.Batch:
    chance = np.random.default_rng(seed)
    parts = [chance.random(size) < density for size, density in shape]
    sizes = np.array([size for size, _ in shape], dtype=np.int64)
    ones = np.array([int(part.sum()) for part in parts], dtype=np.int64)
    return np.concatenate([np.empty(0, np.bool_), *parts]), sizes, rans.levels_for(ones, sizes)


@given(st.lists(st.tuples(groups, st.integers(0, 2**32)), max_size=4))
def test_what_was_encoded_is_decoded(made: list[tuple[list[tuple[int, float]], int]]) -> None:
    """Any groups of any density, batch after batch, and nothing is left."""
    batches = [batch_of(shape, seed) for shape, seed in made]
    decoder = rans.Decoder(rans.encode(batches))
    for bits, sizes, levels in batches:
        assert np.array_equal(decoder.take(sizes, levels), bits)
    decoder.finish()


@pytest.mark.parametrize("level", [1, 7, 31, 32, 63])
def test_slots_add_up(level: int) -> None:
    """Every byte has one, all have 2 ** 24."""
    slots = rans.frequencies(level)
    assert len(slots) == 256 and min(slots) >= 1 and sum(slots) == 2**24


@pytest.mark.parametrize("density", [0.01, 0.1, 0.4, 0.5, 0.97])
def test_it_takes_what_the_entropy_says(density: float) -> None:
    """And hardly more; levels are close enough to any density."""
    bits, sizes, levels = batch_of([(100_000, density), (100_000, density * 0.9)], 1)
    shares = np.array([bits[:100_000].mean(), bits[100_000:].mean()])
    bound = -100_000 * (shares * np.log2(shares) + (1 - shares) * np.log2(1 - shares)).sum()
    found = rans.encode([(bits, sizes, levels)]).nbytes * 8
    assert bound < found + 8 and found < 1.004 * bound + 64
    assert rans.cost(shares * sizes, sizes) / rans.SCALE == pytest.approx(bound, rel=0.004)


def test_extremes_take_no_room() -> None:
    """A group that is all zeros, or all ones, is told by its level."""
    bits, sizes, levels = batch_of([(1000, 0.0), (1000, 1.0), (0, 0.5)], 0)
    assert levels.tolist() == [0, 64, 0]
    assert len(rans.encode([(bits, sizes, levels)])) == 0


def test_what_is_no_code_is_refused() -> None:
    """Words that end too early or too late, unknown levels, a bit set beyond the last."""
    bits, sizes, levels = batch_of([(100, 0.4)], 0)
    words = rans.encode([(bits, sizes, levels)])
    for wrong in (words[:-1], words[1:], np.append(np.uint32(7), words), np.append(words, np.uint32(7))):
        decoder = rans.Decoder(wrong)
        with pytest.raises(ValueError, match=r"do not end|filled up|another level"):
            decoder.take(sizes, levels)
            decoder.finish()
    with pytest.raises(ValueError, match="levels"):
        rans.Decoder(words).take(sizes, levels + 60)
    one_kind = rans.encode([(np.zeros(16, np.bool_), np.array([16]), levels)])
    with pytest.raises(ValueError, match="all zeros or all ones has another level"):
        rans.Decoder(one_kind).take(np.array([16]), levels)
    with pytest.raises(ValueError, match="filled up"):
        rans.Decoder(rans.encode([(np.ones(8, np.bool_), np.array([8]), levels)])).take(np.array([7]), levels)
