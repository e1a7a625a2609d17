"""Normalization that belongs to a task: `y = gamma_t * (x - mean_t) / std_t + beta_t`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from etcl_deploy.core.operations import along_channels, normalize
from etcl_deploy.core.plan import Step
from etcl_deploy.network.distributed import Batch, summed

MOMENTUM = 0.1  # of the running statistics, at every step


@dataclass(frozen=True)
class Norm:
    """One task's state of one normalization layer, each `[features]`; group and layer norm have no mean and var."""

    gamma: Tensor
    beta: Tensor
    mean: Tensor
    var: Tensor

    def as_affine(self, eps: float) -> Tensor:
        """`[2, features]`: what the frozen layer multiplies by and what it adds."""
        if not len(self.var):
            return torch.stack([self.gamma, self.beta])
        scale = self.gamma / torch.sqrt(self.var + eps)
        return torch.stack([scale, self.beta - self.mean * scale])


class TaskNorm(nn.Module):
    """Batch, group or layer normalization whose scale, and statistics if any, belong to the selected task.

    In training batch norm uses the batch's statistics; afterwards the task's own, so that an answer never depends
    on its neighbours in a batch. Group and layer norm look at one item only: they keep no statistics.
    """

    gamma: nn.Parameter
    beta: nn.Parameter
    mean: Tensor
    var: Tensor

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        features = step.settings["features"]
        kept = features if step.op == "norm" else 0
        self.momentum = MOMENTUM
        self.gamma = nn.Parameter(torch.ones(features))
        self.beta = nn.Parameter(torch.zeros(features))
        self.register_buffer("mean", torch.zeros(kept))
        self.register_buffer("var", torch.ones(kept))

    def bind(self, norm: Norm | None, *, trainable: bool = False) -> None:
        """Use a finished task's state, as it is or as a start to learn from; None starts afresh."""
        norm = norm or Norm(
            torch.ones_like(self.gamma),
            torch.zeros_like(self.beta),
            torch.zeros_like(self.mean),
            torch.ones_like(self.var),
        )
        # Copies, so that nothing done with this layer reaches the state of a finished task.
        gamma, beta, mean, var = (t.clone() for t in (norm.gamma, norm.beta, norm.mean, norm.var))
        self.gamma = nn.Parameter(gamma, requires_grad=trainable)
        self.beta = nn.Parameter(beta, requires_grad=trainable)
        self.mean, self.var = mean, var

    def state(self) -> Norm:
        """A copy of what is bound now."""
        return Norm(*(t.detach().clone() for t in (self.gamma, self.beta, self.mean, self.var)))

    def forward(self, x: Tensor, batch: Batch | None = None) -> Tensor:
        """`x`, normalized; in training, with the statistics of the whole `batch` that `x` is a part of."""
        op, settings = self.step.op, self.step.settings
        if op != "norm":
            return normalize(op, settings, x, self.gamma, self.beta)
        # In training the batch's own statistics are used and a running mean of them is kept, to look at validation
        # items by; `MaskedNetwork.finish` replaces it by the statistics of all the items.
        if self.training and batch and batch.group.size > 1:
            return self._over_all(x, batch)
        state = (self.mean, self.var, self.gamma, self.beta)
        return F.batch_norm(x, *state, self.training, self.momentum, settings["eps"])

    def _over_all(self, x: Tensor, batch: Batch) -> Tensor:
        """`F.batch_norm` in training, with the statistics of the parts of all processes together."""
        axes, count = [0, *range(2, x.ndim)], batch.count * prod(x.shape[2:])
        mean = summed(x.float().sum(axes), batch.group) / count
        centred = x.float() - along_channels(mean, x)
        var = summed(centred.square().sum(axes), batch.group) / count
        with torch.no_grad():
            self.mean.lerp_(mean, self.momentum)
            self.var.lerp_(var * count / max(1, count - 1), self.momentum)
        scale = self.gamma * torch.rsqrt(var + self.step.settings["eps"])
        return (centred * along_channels(scale, x) + along_channels(self.beta, x)).to(x.dtype)


@contextmanager
def measuring(norms: Sequence[TaskNorm]) -> Iterator[None]:
    """Measure the inputs of batch norms; afterwards each has the mean and the variance of all of them."""
    sums = [torch.zeros(3, len(norm.mean)).double() for norm in norms]

    def note(sums: Tensor, x: Tensor) -> None:
        channels = x.double().transpose(0, 1).flatten(1)
        count = torch.full_like(channels[:, 0], channels.shape[1])
        sums += torch.stack([count, channels.sum(1), channels.square().sum(1)]).cpu()

    hooks = [
        norm.register_forward_pre_hook(lambda _, args, total=total: note(total, args[0]))
        for norm, total in zip(norms, sums, strict=True)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for norm, (count, total, squares) in zip(norms, sums, strict=True):
        mean = total / count
        norm.mean = mean.float().to(norm.mean.device)
        norm.var = (squares / count - mean.square()).clamp_min(0).float().to(norm.var.device)
