"""Masks in few bits: each is coded group by group, in groups of weights with equally old owners. Pure.

The *owner* of a weight is the first task that selects it. The owners of all weights are coded once: for each task in
turn, one bit for every weight that nobody owns yet, set where the task claims it. A group (see rans.py) is what is left
of a layer.

    levels      uint8 [tasks, layers]
    fill        zeros to a multiple of four bytes
    words       uint32, little-endian, to the end

A mask then follows from the owners but for the weights that earlier tasks own, and that is what is coded of it: a bit
is set where the mask differs from its *reference*, the mask of an earlier task; without one, where it selects the
weight. A group is the weights of one layer whose owner came equally long ago (1, 2-3, 4-7, 8-15, ... tasks before).
Groups come layer by layer, the oldest owners first, and so do the weights inside them; those of one owner in their
order. Groups without a weight are left out.

    reference   uint16, little-endian: 0 for none, else the number of the task from 1; an earlier one
    levels      uint8 [groups]
    fill        zeros to a multiple of four bytes
    words       uint32, little-endian, to the end

To decode one task it takes the owners, its own mask and those it refers to, CHAIN at the most.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch

from etcl_deploy.bundle import rans
from etcl_deploy.bundle.bits import first_owner

REFERENCE = struct.Struct("<H")
CHAIN = 4
CANDIDATES = 8  # how many earlier tasks are tried as a reference


@dataclass(frozen=True)
class WeightOwners:
    """The task that owns each weight, the layers one after another; `tasks` itself stands for nobody."""

    owner: np.ndarray  # uint16 [weights]
    tasks: int
    layers: tuple[int, ...]  # sizes

    @classmethod
    def of(cls, masks: Iterable[np.ndarray], tasks: int, layers: Sequence[int]) -> WeightOwners:
        """The owners that follow from the masks of so many tasks, bool [weights]."""
        owner = first_owner((torch.from_numpy(mask) for mask in masks), tasks, sum(layers))
        return cls(owner.numpy().astype(np.uint16), tasks, tuple(layers))

    @property
    def used(self) -> np.ndarray:
        """Which weights some task selects, bool."""
        return self.owner < self.tasks

    @cached_property
    def edges(self) -> np.ndarray:
        """Where each layer begins, and the last one ends."""
        return np.concatenate([[0], np.cumsum(self.layers)]).astype(np.int64)

    @cached_property
    def order(self) -> np.ndarray:
        """The weights layer by layer, in each the oldest owner's first."""
        parts = [np.argsort(self.owner[start:end], kind="stable") + start for start, end in pairwise(self.edges)]
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])

    @cached_property
    def bounds(self) -> np.ndarray:
        """[layers, tasks + 2]: where in that order each owner's weights of a layer begin, and the last one's end."""
        counts = [np.bincount(self.owner[start:end], minlength=self.tasks + 1) for start, end in pairwise(self.edges)]
        starts = self.edges[:-1, None] + np.cumsum(np.reshape(counts, (len(self.layers), -1)), axis=1)
        return np.concatenate([self.edges[:-1, None], starts], axis=1)

    def by_owner(self, mask: np.ndarray) -> np.ndarray:
        """A mask, bool [weights], in that order."""
        ordered: np.ndarray = mask[self.order]
        return ordered

    def in_place(self, ordered: np.ndarray) -> np.ndarray:
        """A mask in that order with every weight in its own place again."""
        mask = np.empty_like(ordered)
        mask[self.order] = ordered
        return mask

    def before(self, task: int) -> tuple[list[slice], np.ndarray]:
        """Where in that order the weights are that tasks before this one own, and the sizes of their groups."""
        doubled = np.frexp(task - np.arange(task))[1]  # how often 1 is doubled until it is more than so long ago
        firsts = np.flatnonzero(np.diff(doubled, prepend=0))  # where a group begins
        places = self.bounds[:, np.append(firsts, task)]
        sizes = np.diff(places, axis=1).ravel()
        return [slice(start, end) for start, end in zip(places[:, 0], places[:, -1], strict=True)], sizes[sizes > 0]


def encode_owners(owners: WeightOwners, since: int = 0) -> bytes:
    """Owners as described above; with `since`, only what that task and later ones claim."""
    batches: list[rans.Batch] = []
    free = np.flatnonzero(owners.owner >= since)
    for task in range(since, owners.tasks):
        claimed, sizes = owners.owner[free] == task, _sizes(free, owners.edges)
        batches.append((claimed, sizes, rans.levels_for(_sums(claimed, sizes), sizes)))
        free = free[~claimed]
    return _written(b"", batches)


def decode_owners(data: bytes, tasks: int, before: WeightOwners) -> WeightOwners:
    """The owners that were encoded, added to those of the tasks before. Raises ValueError for any other data."""
    count = tasks - before.tasks
    levels, decoder = _opened(data, 0, count * len(before.layers))
    owners = WeightOwners(np.where(before.used, before.owner, tasks).astype(np.uint16), tasks, before.layers)
    free = np.flatnonzero(~before.used)
    for task, table in enumerate(levels.reshape(count, len(before.layers)), before.tasks):
        if not table.any():
            continue  # it claims nothing
        claimed = decoder.take(_sizes(free, owners.edges), table)
        owners.owner[free[claimed]] = task
        free = free[~claimed]
    decoder.finish()
    return owners


def encode_mask(owners: WeightOwners, task: int, mask: np.ndarray, earlier: Mapping[int, np.ndarray]) -> bytes:
    """A mask as described above, with the reference of `earlier` that costs least, or none.

    All masks are in the order of owners.
    """
    places, sizes = owners.before(task)
    bits = _at(mask, places)
    choices = {0: bits, **{number + 1: bits ^ _at(other, places) for number, other in earlier.items()}}
    number = min(choices, key=lambda choice: rans.cost(_sums(choices[choice], sizes), sizes))
    chosen = choices[number]
    return _written(REFERENCE.pack(number), [(chosen, sizes, rans.levels_for(_sums(chosen, sizes), sizes))])


def reference_of(data: bytes, task: int) -> int | None:
    """The number of the task that a coded mask refers to, or None."""
    if len(data) < REFERENCE.size:
        raise ValueError("it is cut off")
    (number,) = REFERENCE.unpack_from(data)
    if number > task:
        raise ValueError(f"it refers to task {number - 1}, which is no earlier one")
    return number - 1 if number else None


def decode_mask(owners: WeightOwners, task: int, data: bytes, other: np.ndarray | None) -> np.ndarray:
    """The mask that was encoded; `other` is the one it refers to. Raises ValueError for any other data."""
    places, sizes = owners.before(task)
    levels, decoder = _opened(data, REFERENCE.size, len(sizes))
    bits = decoder.take(sizes, levels)
    decoder.finish()
    mask = np.zeros(len(owners.owner), dtype=np.bool_)
    done = 0
    for place, (start, end) in zip(places, owners.bounds[:, task : task + 2], strict=True):
        mask[start:end] = True  # the weights it owns
        count = place.stop - place.start
        mask[place] = bits[done : done + count]
        if other is not None:
            mask[place] ^= other[place]
        done += count
    return mask


def candidates(task: int, depths: Sequence[int]) -> list[int]:
    """The earlier tasks whose masks a task may refer to; `depths` says how long the chain of each is."""
    # A chain that is as long as it may be would force all later tasks to refer further and further back.
    if task % (CHAIN + 1) == 0:
        return []
    return [number for number in range(task) if depths[number] < CHAIN][-CANDIDATES:]


def _at(mask: np.ndarray, places: Sequence[slice]) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype=np.bool_), *(mask[place] for place in places)])


def _sums(bits: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """How many bits of each group are set."""
    edges = np.concatenate([[0], np.cumsum(sizes)])
    return np.array([np.count_nonzero(bits[start:end]) for start, end in pairwise(edges)], dtype=np.int64)


def _sizes(places: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """How many of the places, which ascend, lie in each layer."""
    return np.diff(np.searchsorted(places, edges))


def _written(head: bytes, batches: Sequence[rans.Batch]) -> bytes:
    table = head + b"".join(levels.tobytes() for _, _, levels in batches)
    return table + bytes(-len(table) % 4) + rans.encode(batches).astype("<u4").tobytes()


def _opened(data: bytes, start: int, count: int) -> tuple[np.ndarray, rans.Decoder]:
    """The `count` levels that begin at `start`, and the decoder of the words after them."""
    end = start + count
    words = end + -end % 4
    if len(data) < words or len(data) % 4 or any(data[end:words]):
        raise ValueError("it is cut off, or not filled up with zeros")
    levels = np.frombuffer(data, dtype=np.uint8, count=count, offset=start)
    return levels, rans.Decoder(np.frombuffer(data, dtype="<u4", offset=words).astype(np.uint32))
