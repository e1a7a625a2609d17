"""Masks to packed bits and back, and the first owner of each weight. Pure.

Packed: bit `i % 8` of byte `i // 8` is weight `i` of the flattened tensor; the unused bits of the last byte are 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

# The eight bits of every byte, as the eight bytes of one number.
OCTETS = (torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1).to(torch.uint8).view(torch.int64).flatten()


def packed_size(shape: tuple[int, ...]) -> int:
    """The number of bytes that `pack` gives for a mask of that shape."""
    return (prod(shape) + 7) // 8


def pack(mask: Tensor) -> Tensor:
    """A bool tensor of any shape as uint8 `[packed_size]`."""
    bits = mask.flatten().to(torch.uint8)
    padded = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (padded * weights).sum(1, dtype=torch.uint8)


def unpack(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The bool tensor that `pack` took. Raises ValueError on a wrong length or a padding bit that is set."""
    count = prod(shape)
    if packed.dtype != torch.uint8 or packed.shape != (packed_size(shape),):
        raise ValueError(f"a mask of {count} bits takes {packed_size(shape)} bytes, not {tuple(packed.shape)}")
    check_padding(packed, count)
    bits: Tensor = OCTETS.to(packed.device)[packed.int()].view(torch.bool)  # eight at once
    return bits[:count].view(shape)


def check_padding(packed: Tensor, count: int) -> None:
    """Raise ValueError if a bit beyond the first `count` is set."""
    if count % 8 and int(packed[-1]) >> count % 8:
        raise ValueError("a padding bit of the mask is set")


def first_owner(masks: Iterable[Tensor], tasks: int, weights: int) -> Tensor:
    """For each weight the number of the first task whose mask selects it, int32; `tasks` where none does."""
    owner = torch.full((weights,), tasks, dtype=torch.int32)
    for number, mask in enumerate(masks):
        owner = torch.where(mask & (owner == tasks), number, owner)
    return owner
