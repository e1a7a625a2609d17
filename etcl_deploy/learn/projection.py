"""Directions that matter to a sample, and updates that keep out of them (GPM). Pure."""

from __future__ import annotations

import torch
from torch import Tensor

NOTHING = 1e-12  # a share of the energy below which a direction is rounding


def principal(inputs: Tensor, energy: float) -> tuple[Tensor, Tensor]:
    """Orthonormal rows `[k, dimensions]` that hold `energy` of the squared norm of `inputs [items, dimensions]`,
    and the share each holds, largest first.

    These are the first right singular vectors (Eq. svd; the paper's Eq. approxi-R omits the factor `energy`), found as
    eigenvectors of the smaller of the two products of the inputs with themselves: the same, several times faster.
    """
    wide = inputs.shape[0] < inputs.shape[1]
    x = inputs.double() if wide else inputs
    values, vectors = torch.linalg.eigh(x @ x.T if wide else _gram(x))
    values, vectors = values.flip(0).clamp_min(0), vectors.flip(1).T
    total = values.sum()
    if not total:
        return torch.eye(1, x.shape[1], device=x.device), torch.ones(1, device=x.device)
    shares = values / total
    kept = min(int((shares.cumsum(0) < energy).sum()) + 1, int((shares > NOTHING).sum()))
    rows = vectors[:kept]
    if wide:
        rows = (rows @ x) / values[:kept].sqrt().unsqueeze(1)
    return rows.float().contiguous(), shares[:kept].float()


def _gram(inputs: Tensor) -> Tensor:
    """`X^T X` in double precision, without a copy of all the inputs in it."""
    total = torch.zeros(inputs.shape[1], inputs.shape[1], dtype=torch.float64, device=inputs.device)
    for part in torch.split(inputs, 4096):
        total += part.double().T @ part.double()
    return total


def outside(update: Tensor, space: Tensor) -> Tensor:
    """`g - g P` with `P = B^T B`: what is left of an update of head weights outside the space of rows `B`."""
    return update - (update @ space.T) @ space


def extended(space: Tensor | None, inputs: Tensor, energy: float) -> Tensor:
    """`space` with as many rows more as it takes to hold `energy` of the squared norm of `inputs`; all orthonormal."""
    if space is None:
        return principal(inputs, energy)[0]
    rest = outside(inputs, space)
    left = float(rest.double().square().sum() / inputs.double().square().sum().clamp_min(NOTHING))
    if left <= 1 - energy or len(space) == space.shape[1]:
        return space
    rows = torch.cat([space, principal(rest, (energy - (1 - left)) / left)[0]])
    orthonormal: Tensor = torch.linalg.qr(rows.T.double())[0]
    return orthonormal.T.float().contiguous()
