"""Numbers in few bytes."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etcl_deploy.bundle import values

DTYPES = [torch.float32, torch.float16, torch.int8]


@given(st.binary(max_size=600), st.sampled_from(DTYPES))
def test_every_bit_comes_back(data: bytes, dtype: torch.dtype) -> None:
    """Whatever the numbers are: none, endless ones, those that are none."""
    data = data[: len(data) // 4 * 4]
    made = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    assert values.decode(values.encode(made), dtype).numpy().tobytes() == data


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 0.87), (torch.float16, 0.92), (torch.int8, 0.9)])
def test_weights_take_less(dtype: torch.dtype, most: float) -> None:
    """Numbers as learned ones are; the shape does not matter."""
    made = torch.randn(100, 200, generator=torch.Generator().manual_seed(0)) / 10
    made = (made * 300).clamp(-127, 127).to(dtype) if dtype == torch.int8 else made.to(dtype)
    data = values.encode(made)
    assert len(data) < most * made.nbytes
    assert torch.equal(values.decode(data, dtype).view(made.shape), made)


@pytest.mark.parametrize("kinds", [1, 2, 255, 256])
def test_tables_of_every_size(kinds: int) -> None:
    """One kind of number takes no words; all that there are fit."""
    made = torch.arange(40_000).remainder(kinds).to(torch.uint8).view(torch.int8)
    data = values.encode(made)
    assert torch.equal(values.decode(data, torch.int8), made)
    assert kinds > 1 or len(data) < 1000


def test_a_few_bytes_are_not_many_numbers() -> None:
    """The writer keeps to what a reader takes, or writes the numbers as they are."""
    made = torch.zeros(1_000_000, dtype=torch.int8)
    assert len(values.encode(made)) == 1_000_000 + values.HEAD.size
    short = struct.pack("<IH", 1_000_000, 1) + b"\1" + bytes(31) + struct.pack("<H", 65535)
    with pytest.raises(ValueError, match="do not hold 1000000 numbers"):
        values.decode(short, torch.int8)


def test_nonsense_is_refused() -> None:
    """Cut off anywhere, longer, with another table or fill."""
    made = torch.randn(999, generator=torch.Generator().manual_seed(1))
    good = values.encode(made)
    kinds = struct.unpack_from("<IH", good)[1]
    assert kinds > 1 and torch.equal(values.decode(good, torch.float32), made)
    end = values.HEAD.size + values.PRESENT + 2 * kinds + 3 * 999
    filled = bytearray(good)
    assert end % 4, "there is something to be filled"
    filled[end] = 1
    other = bytearray(good)
    other[values.HEAD.size] ^= 1
    cases = [good[:cut] for cut in range(0, len(good), 97)] + [good + bytes(4), good + b"\1\0\0\0", good[:-4]]
    for case in [*cases, bytes(filled), bytes(other), struct.pack("<IH", 3, 0) + bytes(13)]:
        with pytest.raises(ValueError, match=r"cut off|too long|add up|do not end|last word|do not hold"):
            values.decode(case, torch.float32)


def decode_by_the_book(data: bytes, width: int) -> bytes:
    """A reader written from the text in values.py and entropy.py alone, with nothing of the code that writes."""
    count, kinds = struct.unpack_from("<IH", data)
    if not kinds:
        return data[6:]
    tops = [i for i in range(256) if data[6 + i // 8] >> i % 8 & 1]
    slots = [256 * (1 + share) for share in struct.unpack_from(f"<{kinds}H", data, 38)]
    rest = 38 + 2 * kinds
    end = rest + count * (width - 1)
    words = list(struct.unpack(f"<{(len(data) - end) // 4}I", data[end + -end % 4 :]))
    state, found = 0, bytearray()
    for number in range(count):
        top = tops[0]
        if kinds > 1:
            while state < 2**32 and words:
                state = state << 32 | words.pop()
            slot, start, place = state % 2**24, 0, 0
            while start + slots[place] <= slot:
                start, place = start + slots[place], place + 1
            state = (state >> 24) * slots[place] + slot - start
            top = tops[place]
        found += bytes(data[rest + plane * count + number] for plane in range(width - 1)) + bytes([top])
    assert not words and state == 0
    return bytes(found)


@given(st.lists(st.floats(-3, 3, width=16), max_size=60), st.sampled_from(DTYPES), st.integers(1, 30))
def test_the_text_is_enough_to_write_a_reader(numbers: list[float], dtype: torch.dtype, times: int) -> None:
    """One in plain arithmetic reads what the coder wrote."""
    made = torch.tensor(numbers * times, dtype=torch.float32).to(dtype)
    expected = np.ascontiguousarray(made.numpy()).tobytes()
    assert decode_by_the_book(values.encode(made), dtype.itemsize) == expected
