"""The masks of a bundle: packed, one bit a weight, or coded in fewer; each is decoded when it is asked for."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from etcl_deploy.bundle.bits import unpack
from etcl_deploy.bundle.sections import as_tensor
from etcl_deploy.errors import BundleError

if TYPE_CHECKING:
    import numpy as np

    from etcl_deploy.bundle.mask_coding import WeightOwners

KEPT = 8  # decoded masks, for those that refer to them


class Masks(Protocol):
    """Masks by number, bool [weights]."""

    def __getitem__(self, number: int) -> Tensor: ...


class PackedMasks:
    """Masks of one bit a weight, as they lie in the file."""

    def __init__(self, packed: Callable[[int], Tensor], weights: int) -> None:
        self._packed = packed
        self._weights = weights

    def __getitem__(self, number: int) -> Tensor:
        return unpack(self._packed(number), (self._weights,))


class CodedMasks:
    """Masks in fewer bits. Decoding one also decodes the few it refers to."""

    def __init__(self, owners: Tensor, coded: Sequence[Tensor], layers: Sequence[int]) -> None:
        """Raises ValueError where a mask refers to a later one, or to others over too many steps."""
        from etcl_deploy.bundle import mask_coding  # needs numpy, which a server may lack

        self._coding = mask_coding
        self._data = owners.numpy().tobytes()
        self._coded = [data.numpy().tobytes() for data in coded]
        self._layers = layers
        self.references = [mask_coding.reference_of(data, number) for number, data in enumerate(self._coded)]
        depths: list[int] = []
        for number, other in enumerate(self.references):
            depths.append(0 if other is None else depths[other] + 1)
            if depths[-1] > mask_coding.CHAIN:
                raise ValueError(f"the mask of task {number} refers to others over more than {mask_coding.CHAIN} steps")
        self._ready: OrderedDict[int, np.ndarray] = OrderedDict()
        self._owners: WeightOwners | None = None
        self._lock = threading.RLock()

    @property
    def owners(self) -> WeightOwners:
        """Which task owns each weight."""
        with self._lock:
            if self._owners is None:
                nobody = self._coding.WeightOwners.of([], 0, self._layers)
                try:
                    self._owners = self._coding.decode_owners(self._data, len(self._coded), nobody)
                except ValueError as error:
                    raise BundleError(f"the bundle is damaged: section 'backbone/owner': {error}") from None
            return self._owners

    def __getitem__(self, number: int) -> Tensor:
        with self._lock:
            return torch.from_numpy(self.owners.in_place(self._decoded(number)))

    def _decoded(self, number: int) -> np.ndarray:
        """A mask in the order of owners."""
        if number not in self._ready:
            other = self.references[number]
            reference = None if other is None else self._decoded(other)
            try:
                mask = self._coding.decode_mask(self.owners, number, self._coded[number], reference)
            except ValueError as error:
                raise BundleError(f"the bundle is damaged: section 'task/{number}/mask': {error}") from None
            self._ready[number] = mask
            while len(self._ready) > KEPT:
                self._ready.popitem(last=False)
        self._ready.move_to_end(number)
        return self._ready[number]


def code(masks: Masks, tasks: int, layers: Sequence[int]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The weights that some task uses, bool; then, coded as uint8, the owner of each weight, and every mask."""
    from etcl_deploy.bundle import mask_coding

    owners = mask_coding.WeightOwners.of((masks[number].numpy() for number in range(tasks)), tasks, layers)
    coded: list[Tensor] = []
    depths: list[int] = []  # of each mask, over how many others it is decoded

    @lru_cache(2 * mask_coding.CANDIDATES)
    def ordered(number: int) -> np.ndarray:
        return owners.by_owner(masks[number].numpy())

    for number in range(tasks):
        earlier = {other: ordered(other) for other in mask_coding.candidates(number, depths)}
        data = mask_coding.encode_mask(owners, number, ordered(number), earlier)
        reference = mask_coding.reference_of(data, number)
        depths.append(0 if reference is None else depths[reference] + 1)
        coded.append(as_tensor(data))
    return torch.from_numpy(owners.used), as_tensor(mask_coding.encode_owners(owners)), coded
