"""Numbers in few bytes."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etcl_deploy.bundle import float_coding

DTYPES = [torch.float32, torch.float16, torch.int8]


def decode(data: bytes, dtype: torch.dtype, count: int) -> torch.Tensor:
    return float_coding.decode(memoryview(data), dtype, range(count, count + 1))


@given(st.binary(max_size=600), st.sampled_from(DTYPES))
def test_every_bit_comes_back(data: bytes, dtype: torch.dtype) -> None:
    """Whatever the numbers are: none, endless ones, those that are none."""
    data = data[: len(data) // 4 * 4]
    made = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    assert decode(float_coding.encode(made), dtype, len(made)).numpy().tobytes() == data


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 0.87), (torch.float16, 0.92), (torch.int8, 0.9)])
def test_weights_take_less(dtype: torch.dtype, most: float) -> None:
    """Numbers as learned ones are; the shape does not matter."""
    made = torch.randn(100, 200, generator=torch.Generator().manual_seed(0)) / 10
    made = (made * 300).clamp(-127, 127).to(dtype) if dtype == torch.int8 else made.to(dtype)
    data = float_coding.encode(made)
    assert len(data) < most * made.nbytes
    assert torch.equal(decode(data, dtype, made.numel()).view(made.shape), made)


@pytest.mark.parametrize("kinds", [1, 2, 255, 256])
def test_tables_of_every_size(kinds: int) -> None:
    """One kind of number takes no words; all that there are fit."""
    made = torch.arange(40_000).remainder(kinds).to(torch.uint8).view(torch.int8)
    data = float_coding.encode(made)
    assert torch.equal(decode(data, torch.int8, 40_000), made)
    assert kinds > 1 or len(data) < 1000


def test_a_few_bytes_are_not_many_numbers() -> None:
    """The writer keeps to what a reader takes, or writes the numbers as they are."""
    made = torch.zeros(1_000_000, dtype=torch.int8)
    assert len(float_coding.encode(made)) == 1_000_000 + float_coding.HEAD.size
    short = struct.pack("<IH", 1_000_000, 1) + b"\1" + bytes(31) + struct.pack("<H", 65535)
    with pytest.raises(ValueError, match="do not hold 1000000 numbers"):
        decode(short, torch.int8, 1_000_000)


def test_nonsense_is_refused() -> None:
    """Cut off anywhere, longer, with another table or fill."""
    made = torch.randn(999, generator=torch.Generator().manual_seed(1))
    good = float_coding.encode(made)
    kinds = struct.unpack_from("<IH", good)[1]
    assert kinds > 1 and torch.equal(decode(good, torch.float32, 999), made)
    end = float_coding.HEAD.size + float_coding.PRESENT + 2 * kinds + 3 * 999
    filled = bytearray(good)
    assert end % 4, "there is something to be filled"
    filled[end] = 1
    other = bytearray(good)
    other[float_coding.HEAD.size] ^= 1
    cases = [good[:cut] for cut in range(0, len(good), 97)] + [good + bytes(4), good + b"\1\0\0\0", good[:-4]]
    for case in [*cases, bytes(filled), bytes(other), struct.pack("<IH", 3, 0) + bytes(13)]:
        with pytest.raises(ValueError, match=r"cut off|too long|add up|do not end|last word"):
            float_coding.decode(memoryview(case), torch.float32, range(3, 1000))
    with pytest.raises(ValueError, match="it holds 999 numbers, not 998"):
        decode(good, torch.float32, 998)
