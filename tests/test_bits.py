from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etcl_deploy.bundle.bits import check_padding, first_owner, pack, packed_size, unpack

shapes = st.lists(st.integers(0, 7), min_size=1, max_size=4).map(tuple)


@given(shapes, st.floats(0, 1), st.integers(0, 2**32))
def test_unpack_undoes_pack(shape: tuple[int, ...], density: float, seed: int) -> None:
    """For every shape, odd ones and empty ones included."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density
    packed = pack(mask)
    assert packed.shape == (packed_size(shape),)
    assert torch.equal(unpack(packed, shape), mask)


def test_the_bytes_are_the_ones_the_format_states() -> None:
    """Bit i % 8 of byte i // 8 is weight i, padding is zero; all 256 bytes, both ways."""
    assert pack(torch.tensor([1, 0, 0, 0, 0, 0, 0, 1, 0, 1], dtype=torch.bool)).tolist() == [0b10000001, 0b10]
    mask = torch.tensor([[byte >> bit & 1 for bit in range(8)] for byte in range(256)], dtype=torch.bool)
    assert pack(mask).tolist() == list(range(256))
    assert torch.equal(unpack(torch.arange(256, dtype=torch.uint8), (256, 8)), mask)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [*((shape, torch.uint8) for shape in ((1,), (3,), (1, 2), (0,))), ((2,), torch.int8), ((2,), torch.bool)],
)
def test_what_is_not_so_many_bytes_is_refused(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """With the length that would be right."""
    with pytest.raises(ValueError, match="a mask of 10 bits takes 2 bytes, not"):
        unpack(torch.zeros(shape, dtype=dtype), (2, 5))


@pytest.mark.parametrize("count", range(25))
def test_a_set_padding_bit_is_refused_and_no_other(count: int) -> None:
    """Each bit beyond the last is looked at, and all before it may be set."""
    full = pack(torch.ones(count, dtype=torch.bool))
    check_padding(full, count)
    for bit in range(count % 8 or 8, 8):
        wrong = full.clone()
        wrong[-1] |= 1 << bit
        with pytest.raises(ValueError, match="a padding bit of the mask is set"):
            check_padding(wrong, count)
        with pytest.raises(ValueError, match="a padding bit of the mask is set"):
            unpack(wrong, (count,))


@given(st.integers(0, 6), st.integers(0, 40), st.integers(0, 2**32))
def test_the_first_owner_is_the_first_that_selects(tasks: int, weights: int, seed: int) -> None:
    """Whoever comes later; what nobody selects has the number of tasks."""
    masks = torch.rand(tasks, weights, generator=torch.Generator().manual_seed(seed)) < 0.3
    owner = first_owner(iter(masks), tasks, weights)
    assert owner.dtype == torch.int32
    assert owner.tolist() == [next((n for n in range(tasks) if masks[n, w]), tasks) for w in range(weights)]
