"""Directions that matter to a sample, and updates that keep out of them (GPM). Pure."""

from __future__ import annotations

import torch
from torch import Tensor


def principal(inputs: Tensor, energy: float) -> tuple[Tensor, Tensor]:
    """Orthonormal rows `[k, dimensions]` that hold `energy` of the squared norm of `inputs [items, dimensions]`,
    and the share each holds. (The paper's Eq. approxi-R omits the factor `energy`.)"""
    _, values, vectors = torch.linalg.svd(inputs.double(), full_matrices=False)
    total = values.square().sum()
    if not total:
        return vectors[:1].float().contiguous(), torch.ones(1, device=inputs.device)
    shares = values.square() / total
    kept = min(int((shares.cumsum(0) < energy).sum()) + 1, len(shares))
    return vectors[:kept].float().contiguous(), shares[:kept].float()


def outside(update: Tensor, space: Tensor) -> Tensor:
    """`g - g P` with `P = B^T B`: what is left of an update of head weights outside the space of rows `B`."""
    return update - (update @ space.transpose(-1, -2)) @ space
