"""Statistics for reports: the overlap of masks, and how the backbone fills up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from etcl_deploy.network.masked_network import MaskedNetwork
from etcl_deploy.network.state import TaskState


def overlap(states: Sequence[TaskState]) -> Tensor:
    """`[tasks, tasks]`: of the weights either of two tasks uses, the share both do."""
    shared = torch.zeros(len(states), len(states), dtype=torch.float64)
    for step in states[0].masks:
        rows = torch.stack([state.masks[step].flatten() for state in states])
        for part in torch.split(rows, 1 << 20, dim=1):  # as numbers they take much more room than as bits
            numbers = part.float()
            shared += (numbers @ numbers.T).cpu()
    own = shared.diagonal()
    return shared / (own.unsqueeze(0) + own.unsqueeze(1) - shared).clamp_min(1)


def used_over_time(states: Sequence[TaskState]) -> list[float]:
    """The share of the backbone's weights some task uses, after every task."""
    counts, total = [0] * len(states), 0
    for step, first in states[0].masks.items():
        used = torch.zeros_like(first)
        total += first.numel()
        for number, state in enumerate(states):
            used |= state.masks[step]
            counts[number] += int(used.sum())
    return [count / total for count in counts]


def needed_bytes(network: MaskedNetwork) -> dict[str, int]:
    """The bytes needed to predict every task, by part: weights that some mask selects, masks of one bit a weight (none
    where all are selected), normalization and heads; in single precision."""
    sizes = dict.fromkeys(("backbone", "masks", "heads", "norms"), 0)
    states = list(network.finished.values())
    for state in states:
        sizes["backbone"] += sum(weight.nbytes for weight in (state.weights or {}).values())
        sizes["masks"] += sum(-(-mask.numel() // 8) for mask in state.masks.values() if not bool(mask.all()))
        sizes["heads"] += sum(tensor.nbytes for tensor in state.head.values())
        sizes["norms"] += 2 * sum(norm.gamma.nbytes for norm in state.norms.values())  # a scale and a shift a channel
    sharing = [state for state in states if state.weights is None]
    if sharing:
        for step in sharing[0].masks:
            sizes["backbone"] += 4 * int(torch.stack([state.masks[step] for state in sharing]).any(0).sum())
    return sizes
