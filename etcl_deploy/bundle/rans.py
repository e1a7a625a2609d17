"""Bits of unequal probability as 32-bit words, and back, by range asymmetric numeral systems (rANS). Pure.

Bits come in *groups*, each with a *level* from 0 to 64: the probability `p` of a one is `sin(pi * level / 128) ** 2`,
rounded to 16 bits. A group of level 0 is all zeros, one of level 64 all ones, and no others are; neither takes room.
Then, level by level, the bits of all groups of that level are joined in the order of the groups, filled up with zeros
to whole bytes (the first bit is the lowest) and coded byte by byte with rANS: a state of 64 bits that takes in and
gives out words of 32, and slots for the bytes, 2 ** 24 in all. A byte with `j` ones has `1 + floor(p ** j * (1 - p) **
(8 - j) * (2 ** 24 - 256))` of them; what is left over goes to the byte 0 below level 32, and to 255 from there on. The
slots of the bytes follow each other in their order. Eight bits at once is what makes decoding fast.

A reader starts from the state 0. Before every byte, as long as the state is below 2 ** 32 and a word is left, it
shifts the state up by 32 bits and adds the next word, from the end. The slot `state % 2 ** 24` is one of the `slots`
of a byte, which begin at `start`: this is the byte, and `state // 2 ** 24 * slots + state % 2 ** 24 - start` the next
state. In the end no word is left, and the state is 0. The last word is not 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

LEVELS = 64
SCALE = 1 << 16
TOTAL = 1 << 24

Batch = tuple[np.ndarray, np.ndarray, np.ndarray]  # bits (bool) of all groups in a row, sizes and levels of the groups


def probability(level: float) -> int:
    """The probability of a one at a level, in parts of 2 ** 16."""
    return round(SCALE * math.sin(math.pi * level / (2 * LEVELS)) ** 2)


EDGES = np.array([probability(level + 0.5) for level in range(1, LEVELS - 1)])  # between neighbouring levels


def levels_for(ones: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The best level, uint8, for each group; computed in whole numbers, so that every machine chooses the same."""
    shares = ones.astype(np.int64) * SCALE
    levels = 1 + (shares[:, None] >= EDGES * sizes.astype(np.int64)[:, None]).sum(1)
    levels[ones == 0] = 0
    levels[(ones == sizes) & (sizes > 0)] = LEVELS
    return np.asarray(levels, np.uint8)


# The cost of a zero and of a one at each level, in parts of 2 ** -16 bits; at levels 0 and 64 only one of them occurs.
PRICES = np.array(
    [[round(-SCALE * math.log2(max(1, part) / SCALE)) for part in (SCALE - p, p)] for p in map(probability, range(65))]
)


def cost(ones: np.ndarray, sizes: np.ndarray) -> int:
    """The cost of groups with so many ones, in parts of 2 ** -16 bits: a whole number, the same on every machine."""
    zero, one = PRICES[levels_for(ones, sizes)].T
    return int((zero * (sizes - ones) + one * ones).sum())


def encode(batches: Sequence[Batch]) -> np.ndarray:
    """The words, uint32, of batches that a decoder takes one after another."""
    coder = _coder()
    for bits, sizes, levels in reversed(batches):
        for level, groups in reversed(list(_by_level(sizes, levels))):
            joined = np.concatenate([bits[group] for group in groups])
            coder.encode_reverse(np.packbits(joined, bitorder="little").astype(np.int32), _model(level))
    words: np.ndarray = coder.get_compressed()
    return words


class Decoder:
    """Takes bits from words, batch by batch. Wrong words raise ValueError, at `finish` at the latest."""

    def __init__(self, words: np.ndarray) -> None:
        self._coder = _coder(words)

    def take(self, sizes: np.ndarray, levels: np.ndarray) -> np.ndarray:
        """The bits of the groups of a batch, in a row."""
        if len(levels) != len(sizes) or (levels > LEVELS).any():
            raise ValueError("the levels of its groups are too few or too high")
        bits = np.repeat(levels == LEVELS, sizes)
        for level, groups in _by_level(sizes, levels):
            count = sum(group.stop - group.start for group in groups)
            coded = self._coder.decode(_model(level), -(-count // 8)).astype(np.uint8)
            joined = np.unpackbits(coded, bitorder="little").view(np.bool_)
            if joined[count:].any():
                raise ValueError("a bit it is filled up with is set")
            start = 0
            for group in groups:
                end = start + group.stop - group.start
                bits[group] = joined[start:end]
                if not 0 < np.count_nonzero(joined[start:end]) < end - start:
                    raise ValueError("a group that is all zeros or all ones has another level")
                start = end
        return bits

    def finish(self) -> None:
        """Refuse words of which some are left."""
        if not self._coder.is_empty():
            raise ValueError("its words do not end where its bits do")


def _by_level(sizes: np.ndarray, levels: np.ndarray) -> Iterator[tuple[int, list[slice]]]:
    """For every level its groups that are not empty, as slices of all bits."""
    ends = np.cumsum(sizes)
    for level in range(1, LEVELS):
        chosen = np.flatnonzero((levels == level) & (sizes > 0))
        if len(chosen):
            yield level, [slice(int(ends[group] - sizes[group]), int(ends[group])) for group in chosen]


def frequencies(level: int) -> list[int]:
    """How many of the 2 ** 24 slots each byte has at a level."""
    one = probability(level)
    rest = SCALE - one
    by_ones = [1 + one**j * rest ** (8 - j) * (TOTAL - 256) // SCALE**8 for j in range(9)]
    slots = [by_ones[byte.bit_count()] for byte in range(256)]
    slots[0 if level < LEVELS // 2 else 255] += TOTAL - sum(slots)
    return slots


def encode_symbols(symbols: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """The words, uint32, of symbols counted from 0; `slots` gives each its share of 2 ** 24."""
    coder = _coder()
    coder.encode_reverse(symbols.astype(np.int32), _categorical(slots))
    words: np.ndarray = coder.get_compressed()
    return words


def decode_symbols(words: np.ndarray, slots: np.ndarray, count: int) -> np.ndarray:
    """The first `count` symbols of words. Raises ValueError if words are left."""
    coder = _coder(words)
    symbols: np.ndarray = coder.decode(_categorical(slots), count)
    if not coder.is_empty():
        raise ValueError("its words do not end where its numbers do")
    return symbols


@cache
def _model(level: int) -> Any:
    return _categorical(np.array(frequencies(level)))


def _categorical(slots: np.ndarray) -> Any:
    # The coder adds one slot for every symbol: given the others as whole numbers, it rounds nothing.
    return _constriction().stream.model.Categorical(slots.astype(np.float64) - 1, perfect=False)


def _coder(words: np.ndarray | None = None) -> Any:
    if words is not None and len(words) and not words[-1]:
        raise ValueError("its last word is 0")
    return _constriction().stream.stack.AnsCoder(words)


def _constriction() -> Any:
    import constriction  # a server, whose masks are packed, may lack it

    return constriction
