"""Bits of unlike probability as words, and back."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etcl_deploy.bundle import entropy

groups = st.lists(st.tuples(st.integers(0, 40), st.floats(0, 1)), max_size=12)


def batch_of(shape: list[tuple[int, float]], seed: int) -> entropy.Batch:
    chance = np.random.default_rng(seed)
    parts = [chance.random(size) < density for size, density in shape]
    sizes = np.array([size for size, _ in shape], dtype=np.int64)
    ones = np.array([int(part.sum()) for part in parts], dtype=np.int64)
    return np.concatenate([np.empty(0, np.bool_), *parts]), sizes, entropy.levels_for(ones, sizes)


def decode_by_the_book(words: list[int], sizes: list[int], levels: list[int]) -> list[int]:
    """A reader written from the text in entropy.py alone, with nothing of the code that writes."""
    words, state = list(words), 0
    starts = np.cumsum([0, *sizes])
    bits = [0] * sum(sizes)
    for level in range(65):
        places = [p for n, own in enumerate(levels) if own == level for p in range(starts[n], starts[n + 1])]
        if level == 64:
            for place in places:
                bits[place] = 1
        if level in (0, 64):
            continue
        p = round(65536 * math.sin(math.pi * level / 128) ** 2)
        slots = [
            1 + p ** bin(b).count("1") * (65536 - p) ** (8 - bin(b).count("1")) * (2**24 - 256) // 2**128
            for b in range(256)
        ]
        slots[0 if level < 32 else 255] += 2**24 - sum(slots)
        for first in range(0, len(places), 8):
            while state < 2**32 and words:
                state = state << 32 | words.pop()
            slot, start, byte = state % 2**24, 0, 0
            while start + slots[byte] <= slot:
                start, byte = start + slots[byte], byte + 1
            state = (state >> 24) * slots[byte] + slot - start
            for bit, place in enumerate(places[first : first + 8]):
                bits[place] = byte >> bit & 1
    assert not words and state == 0
    return bits


@given(st.lists(st.tuples(groups, st.integers(0, 2**32)), max_size=4))
def test_what_was_encoded_is_decoded(made: list[tuple[list[tuple[int, float]], int]]) -> None:
    """Any groups of any density, batch after batch, and nothing is left."""
    batches = [batch_of(shape, seed) for shape, seed in made]
    decoder = entropy.Decoder(entropy.encode(batches))
    for bits, sizes, levels in batches:
        assert np.array_equal(decoder.take(sizes, levels), bits)
    decoder.finish()


@given(groups, st.integers(0, 2**32))
def test_the_text_is_enough_to_write_a_reader(shape: list[tuple[int, float]], seed: int) -> None:
    """One in plain arithmetic reads what the coder wrote."""
    bits, sizes, levels = batch_of(shape, seed)
    words = entropy.encode([(bits, sizes, levels)]).tolist()
    assert decode_by_the_book(words, sizes.tolist(), levels.tolist()) == bits.tolist()


@pytest.mark.parametrize("level", [1, 7, 31, 32, 63])
def test_slots_add_up(level: int) -> None:
    """Every byte has one, all have 2 ** 24."""
    slots = entropy.frequencies(level)
    assert len(slots) == 256 and min(slots) >= 1 and sum(slots) == 2**24


@pytest.mark.parametrize("density", [0.01, 0.1, 0.4, 0.5, 0.97])
def test_it_takes_what_the_entropy_says(density: float) -> None:
    """And hardly more; levels are close enough to any density."""
    bits, sizes, levels = batch_of([(100_000, density), (100_000, density * 0.9)], 1)
    shares = np.array([bits[:100_000].mean(), bits[100_000:].mean()])
    bound = -100_000 * (shares * np.log2(shares) + (1 - shares) * np.log2(1 - shares)).sum()
    found = entropy.encode([(bits, sizes, levels)]).nbytes * 8
    assert bound < found + 8 and found < 1.004 * bound + 64
    assert entropy.cost(shares * sizes, sizes) / entropy.SCALE == pytest.approx(bound, rel=0.004)


def test_extremes_take_no_room() -> None:
    """A group that is all zeros, or all ones, is told by its level."""
    bits, sizes, levels = batch_of([(1000, 0.0), (1000, 1.0), (0, 0.5)], 0)
    assert levels.tolist() == [0, 64, 0]
    assert len(entropy.encode([(bits, sizes, levels)])) == 0


def test_what_is_no_code_is_refused() -> None:
    """Words that end too early or too late, unknown levels, a bit set beyond the last."""
    bits, sizes, levels = batch_of([(100, 0.4)], 0)
    words = entropy.encode([(bits, sizes, levels)])
    for wrong in (words[:-1], words[1:], np.append(np.uint32(7), words), np.append(words, np.uint32(7))):
        decoder = entropy.Decoder(wrong)
        with pytest.raises(ValueError, match=r"do not end|filled up"):
            decoder.take(sizes, levels)
            decoder.finish()
    with pytest.raises(ValueError, match="levels"):
        entropy.Decoder(words).take(sizes, levels + 60)
    with pytest.raises(ValueError, match="filled up"):
        entropy.Decoder(entropy.encode([(np.ones(8, np.bool_), np.array([8]), levels)])).take(np.array([7]), levels)
