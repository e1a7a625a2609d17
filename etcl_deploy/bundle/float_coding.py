"""Numbers in fewer bytes, without loss: their most significant bytes are entropy-coded. Pure.

The *top* of a number is its most significant byte: of a float32 or float16 its sign and most of its exponent, of an
int8 all of it. A few values make up most tops; the other bytes are as good as random and kept as they are.

    count       uint32, little-endian: how many numbers
    kinds       uint16, little-endian: how many different tops; 0 for none of this: the numbers follow as they are
    present     32 bytes: bit `i % 8` of byte `i // 8` is set where a top `i` occurs
    shares      uint16 [kinds], little-endian: for each of them in order, its share in parts of 2 ** 16, less one; they
                add up to 2 ** 16
    rest        the other bytes of all numbers: first the least significant of each, then the next
    fill        zeros to a multiple of four bytes
    words       uint32, little-endian, to the end: the tops, coded with rANS as in rans.py, each with 2 ** 8 times
                its share of slots; none if there is but one kind

There are at most 65,536 numbers and 64 more for every byte of the whole: a small file does not ask for much memory.
"""

from __future__ import annotations

import struct

import numpy as np
import torch
from torch import Tensor

from etcl_deploy.bundle import rans

HEAD = struct.Struct("<IH")
ALWAYS_ALLOWED = 1 << 16
SHARES = 1 << 16
PRESENT = 32  # bytes


def encode(values: Tensor) -> bytes:
    """The bytes of float32, float16 or int8 numbers of any shape."""
    raw = values.contiguous().view(-1).view(torch.uint8).numpy().reshape(values.numel(), values.element_size())
    tops, places = np.unique(raw[:, -1], return_inverse=True)
    shares = _shares(np.bincount(places, minlength=len(tops)))
    present = np.packbits(np.isin(np.arange(256), tops), bitorder="little").tobytes()
    table = HEAD.pack(len(raw), len(tops)) + present + (shares - 1).astype("<u2").tobytes() + raw[:, :-1].T.tobytes()
    words = rans.encode_symbols(places, shares << 8) if len(tops) > 1 else np.empty(0)
    coded = table + bytes(-len(table) % 4) + words.astype("<u4").tobytes()
    plain = HEAD.pack(len(raw), 0) + raw.tobytes()
    return coded if len(coded) < len(plain) and len(raw) <= ALWAYS_ALLOWED + 64 * len(coded) else plain


def decode(data: memoryview, dtype: torch.dtype, counts: range) -> Tensor:
    """The numbers that were encoded, flat. Raises ValueError for any other data, or a count that is not in `counts`."""
    if len(data) < HEAD.size:
        raise ValueError("it is cut off")
    count, kinds = HEAD.unpack_from(data)
    if count not in counts:
        raise ValueError(f"it holds {count} numbers, not {counts.stop - 1}")
    if count > ALWAYS_ALLOWED + 64 * len(data):
        raise ValueError(f"{len(data)} bytes do not hold {count} numbers")
    raw = np.empty((count, dtype.itemsize), dtype=np.uint8)
    rest = raw[:, :-1].size if kinds else raw.size
    shares_end = HEAD.size + (PRESENT + 2 * kinds if kinds else 0)
    end = shares_end + rest
    words = end + -end % 4 if kinds else end
    if len(data) < words or any(data[end:words]) or (len(data) - words) % 4 or (len(data) > words and kinds < 2):
        raise ValueError("it is cut off, too long, or not filled up with zeros")
    middle = np.frombuffer(data, dtype=np.uint8, count=rest, offset=shares_end)
    if not kinds:
        raw[:] = middle.reshape(raw.shape)
    else:
        raw[:, :-1] = middle.reshape(-1, count).T if rest else 0
        present = np.frombuffer(data, dtype=np.uint8, count=PRESENT, offset=HEAD.size)
        tops = np.flatnonzero(np.unpackbits(present, bitorder="little")).astype(np.uint8)
        shares = np.frombuffer(data, dtype="<u2", count=kinds, offset=HEAD.size + PRESENT).astype(np.int64) + 1
        if len(tops) != kinds or shares.sum() != SHARES:
            raise ValueError("its table does not add up")
        coded = np.frombuffer(data, dtype="<u4", offset=words).astype(np.uint32)
        raw[:, -1] = tops[rans.decode_symbols(coded, shares << 8, count) if kinds > 1 else 0]
    return torch.from_numpy(raw.reshape(-1)).view(dtype)


def _shares(counts: np.ndarray) -> np.ndarray:
    """Whole parts of SHARES, at least one each; the most frequent one takes the remainder."""
    shares: np.ndarray = np.maximum(1, counts * SHARES // max(1, counts.sum()))
    if len(shares):
        shares[counts.argmax()] += SHARES - shares.sum()
    return shares
