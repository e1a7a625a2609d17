from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etcl_deploy.bundle.codec import pack, packed_size, unpack

shapes = st.lists(st.integers(0, 7), min_size=1, max_size=4).map(tuple)


@given(shapes, st.floats(0, 1), st.integers(0, 2**32))
def test_unpack_undoes_pack(shape: tuple[int, ...], density: float, seed: int) -> None:
    """For every shape, odd ones and empty ones included."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density
    packed = pack(mask)
    assert packed.shape == (packed_size(shape),)
    assert torch.equal(unpack(packed, shape), mask)


def test_the_bytes_are_the_ones_the_format_states() -> None:
    """Bit i % 8 of byte i // 8 is weight i, padding is zero."""
    mask = torch.tensor([1, 0, 0, 0, 0, 0, 0, 1, 0, 1], dtype=torch.bool)
    assert pack(mask).tolist() == [0b10000001, 0b10]


@pytest.mark.parametrize("data", [[255], [255, 0, 0], [255, 0b100]])
def test_a_wrong_length_or_a_set_padding_bit_is_refused(data: list[int]) -> None:
    """Nothing in a packed mask is left unread."""
    with pytest.raises(ValueError, match=r"takes 2 bytes|padding bit"):
        unpack(torch.tensor(data, dtype=torch.uint8), (2, 5))
    assert prod((2, 5)) == 10
