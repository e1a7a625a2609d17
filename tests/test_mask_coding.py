"""Masks in few bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etcl_deploy.bundle import mask_coding
from etcl_deploy.bundle.mask_coding import CHAIN, WeightOwners
from etcl_deploy.bundle.masks import CodedMasks, code
from etcl_deploy.bundle.sections import as_tensor
from etcl_deploy.errors import BundleError

layers = st.lists(st.integers(0, 60), min_size=1, max_size=5)


def related(sizes: Sequence[int], tasks: int, density: float, change: float, seed: int) -> list[np.ndarray]:
    """Masks that each differ from the one before in a share of their weights."""
    chance = np.random.default_rng(seed)
    masks = [chance.random(sum(sizes)) < density]
    for _ in range(tasks - 1):
        fresh = chance.random(sum(sizes)) < density
        masks.append(np.where(chance.random(sum(sizes)) < change, fresh, masks[-1]))
    return masks[:tasks]


def tensors(masks: Sequence[np.ndarray]) -> list[torch.Tensor]:
    return [torch.from_numpy(mask) for mask in masks]


@settings(deadline=None)
@given(layers, st.integers(0, 12), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2**32))
def test_every_mask_comes_back(sizes: list[int], tasks: int, density: float, change: float, seed: int) -> None:
    """Of any shapes and densities, none or many, in any order."""
    masks = related(sizes, tasks, density, change, seed)
    used, owner, bits = code(tensors(masks), len(masks), sizes)
    assert np.array_equal(used.numpy(), np.any([np.zeros(sum(sizes), np.bool_), *masks], axis=0))
    store = CodedMasks(owner, bits, sizes)
    for number in reversed(range(tasks)):
        assert np.array_equal(store[number].numpy(), masks[number])
    assert np.array_equal(store.owners.owner, WeightOwners.of(masks, len(masks), sizes).owner)


def test_hundreds_of_tasks() -> None:
    """Any of them is decoded by itself, over at most CHAIN others."""
    sizes = [300, 41]
    masks = related(sizes, 300, 0.2, 0.1, 0)
    _, owner, bits = code(tensors(masks), len(masks), sizes)
    depths: list[int] = []
    for number, data in enumerate(bits):
        other = mask_coding.reference_of(data.numpy().tobytes(), number)
        depths.append(0 if other is None else depths[other] + 1)
    assert max(depths) == CHAIN
    for number in (299, 0, 150):
        assert np.array_equal(CodedMasks(owner, bits, sizes)[number].numpy(), masks[number])


def test_what_later_tasks_claim_is_told_apart() -> None:
    """Owners since a task, with those before it known, are the owners; what came before keeps its bytes."""
    sizes = [500, 77]
    masks = related(sizes, 6, 0.3, 0.2, 1)
    whole = WeightOwners.of(masks, len(masks), sizes)
    later = mask_coding.encode_owners(whole, since=4)
    found = mask_coding.decode_owners(later, 6, WeightOwners.of(masks[:4], 4, sizes))
    assert np.array_equal(found.owner, whole.owner)
    _, _, first = code(tensors(masks[:4]), 4, sizes)
    _, _, both = code(tensors(masks), len(masks), sizes)
    assert all(torch.equal(a, b) for a, b in zip(first, both, strict=False))


def test_related_masks_take_less() -> None:
    """A mask that differs little from an earlier one takes few bits, and refers to it."""
    sizes = [20_000]
    masks = related(sizes, 2, 0.4, 0.05, 2)
    other = related(sizes, 1, 0.4, 0, 3)[0]
    _, _, bits = code(tensors([masks[0], other, masks[1]]), 3, sizes)
    assert mask_coding.reference_of(bits[2].numpy().tobytes(), 2) is None, "the owners say as much"
    _, _, bits = code(tensors([other, masks[0], masks[1]]), 3, sizes)
    assert mask_coding.reference_of(bits[2].numpy().tobytes(), 2) == 1
    assert len(bits[2]) < 0.4 * len(bits[1])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "cut off"),
        (b"\5\0", "refers to task 4"),
        (b"\2\0" + bytes(9), "cut off"),
    ],
)
def test_nonsense_is_refused(data: bytes, reason: str) -> None:
    """With a reason, whatever it is."""
    sizes = [100]
    masks = related(sizes, 3, 0.4, 0.2, 4)
    _, owner, bits = code(tensors(masks), len(masks), sizes)
    with pytest.raises((ValueError, BundleError), match=reason):
        _ = CodedMasks(owner, [*bits[:2], as_tensor(data)], sizes)[2]


def test_a_chain_that_is_too_long_is_refused() -> None:
    """Reading one task must not mean reading all."""
    sizes = [50]
    masks = related(sizes, CHAIN + 2, 0.5, 0.1, 5)
    owners = WeightOwners.of(masks, len(masks), sizes)
    chain = [as_tensor(mask_coding.encode_mask(owners, 0, owners.by_owner(masks[0]), {}))]
    for number in range(1, len(masks)):
        chain.append(as_tensor(number.to_bytes(2, "little") + bytes(40)))
    with pytest.raises(ValueError, match="over more than 4 steps"):
        CodedMasks(as_tensor(mask_coding.encode_owners(owners)), chain, sizes)
