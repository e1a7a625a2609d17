"""The layers of a backbone that many tasks share.

MaskedLayer:  y = layer(x; W * m)       one weight W, one mask m per task
TaskNorm:     y = gamma_t * (x - mean) / std + beta_t      batch norm: mean_t and std_t are the task's too
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from etcl_deploy.learn.chooser import Chooser
from etcl_deploy.learn.masks import keep_top, reselect, union
from etcl_deploy.operations import normalize, weigh
from etcl_deploy.plan import Step


class MaskedLayer(nn.Module):
    """A convolution, linear layer or bias whose weight a mask thins out.

    `mask` set: that mask is used. `mask` None: it is chosen from the scores, and learned with them; `borrowed` set:
    that mask is looked through instead, while gradients still reach the scores.
    The gradient of a mask passes straight through to its scores: `spread` takes it from the weight the layer was used
    with, by hand and in place, since these are the largest tensors there are and each is touched at every step.

    `claimed` marks the weights of finished tasks. While a task is learned they get no gradient (Eq. nws1), so that no
    optimizer moves them; and whatever may have happened, `thaw` puts them back, bit by bit, at its end.
    """

    weight: nn.Parameter
    scores: nn.Parameter
    claimed: Tensor
    _frozen: Tensor

    def __init__(self, step: Step, density: float, generator: torch.Generator) -> None:
        super().__init__()
        assert step.weight_shape is not None
        self.step = step
        self.density = density
        self.mask: Tensor | None = None
        self.borrowed: Tensor | None = None
        self.free: Tensor | None = None  # 1.0 where the task being learned may change a weight; None: everywhere
        self._choose = Chooser(density)
        self._scratch: dict[str, Tensor] = {}  # the tensors of a step, kept from one to the next
        self.weight = nn.Parameter(torch.empty(step.weight_shape))
        self.scores = nn.Parameter(torch.empty(step.weight_shape))
        self.register_buffer("claimed", torch.zeros(step.weight_shape, dtype=torch.bool))
        self.register_buffer("_frozen", torch.zeros(step.weight_shape), persistent=False)
        # A bias starts at zero, as if it were not there.
        bound = math.sqrt(6 / math.prod(step.weight_shape[1:])) if step.op != "bias" else 0.0
        with torch.no_grad():
            self.weight.uniform_(-bound, bound, generator=generator)
        self.draw_scores(generator)

    def draw_scores(self, generator: torch.Generator) -> None:
        """Start the scores anew. Only their magnitude ever counts, so they are kept as such: none is negative."""
        bound = 1 / math.sqrt(math.prod(self.scores.shape[1:] or self.scores.shape))
        fresh = torch.empty(self.scores.shape).uniform_(0, bound, generator=generator)
        with torch.no_grad():
            self.scores.copy_(fresh)

    def aim_at(self, mask: Tensor) -> None:
        """Rearrange the scores so that they select `mask`."""
        with torch.no_grad():
            self.scores.copy_(reselect(self.scores, mask))

    def freeze(self) -> None:
        """Take the claimed weights out of reach before a task is learned."""
        self._frozen = self.weight.detach().clone()
        self.free = (~self.claimed).float() if bool(self.claimed.any()) else None
        names = ("mask", "effective", "weight gradient", "scores gradient")
        self._scratch = {name: torch.zeros_like(self._frozen) for name in names}
        self._scratch["effective"].requires_grad_()

    def thaw(self) -> None:
        """Put the claimed weights back as they were at `freeze`, whatever an optimizer did to them since."""
        with torch.no_grad():
            self.weight.copy_(torch.where(self.claimed, self._frozen, self.weight))
        self.free, self._scratch = None, {}
        self.weight.grad = self.scores.grad = None  # no step of the next task may be taken along these

    def settle(self) -> Tensor:
        """Fix the mask of the task that was just learned, use it from now on, and give it."""
        self.thaw()
        self.mask = keep_top(self.scores, self.density)
        return self.mask

    def claim(self, mask: Tensor) -> None:
        """Make the weights of a finished task its own for ever (M_t of the paper)."""
        self.claimed = union((self.claimed, mask))

    def forget_gradients(self) -> None:
        """Before a backward pass: leave nothing of the one before."""
        self.weight.grad = self.scores.grad = self.used.grad = None

    def decay(self, share: float) -> None:
        """Add `share` of each weight to its gradient, as weight decay does, but of no claimed one."""
        assert self.weight.grad is not None
        if self.free is None:
            self.weight.grad.add_(self.weight.detach(), alpha=share)
        else:
            self.weight.grad.addcmul_(self.weight.detach(), self.free, value=share)

    def effective_weight(self) -> Tensor:
        """`W * m`: the weight the selected task sees."""
        if self.mask is not None:
            return torch.where(self.mask, self.weight, 0)
        mask, effective = self._scratch["mask"], self._scratch["effective"]
        if self.borrowed is None:
            self._choose(self.scores.detach(), out=mask)
        else:
            mask.copy_(self.borrowed)
        torch.mul(self.weight.detach(), mask, out=effective.data)
        return effective

    @property
    def used(self) -> Tensor:
        """The weight the layer was last used with, whose gradient a backward pass gives."""
        return self._scratch["effective"]

    @torch.no_grad()
    def spread(self) -> None:
        """After a backward pass: the gradients of weight and scores (Eq. nws1, nws2)."""
        gradient = self.used.grad
        assert gradient is not None
        of_weight = torch.mul(gradient, self._scratch["mask"], out=self._scratch["weight gradient"])
        if self.free is not None:
            of_weight.mul_(self.free)
        self.weight.grad = of_weight
        self.scores.grad = self.to_scores(gradient, out=self._scratch["scores gradient"])

    @torch.no_grad()
    def to_scores(self, gradient: Tensor, out: Tensor | None = None) -> Tensor:
        """`dL/ds = dL/dm = dL/d(W * m) * W`, from the gradient of the weight in use."""
        return torch.mul(gradient, self.weight, out=out)

    @torch.no_grad()
    def reflect(self) -> None:
        """After a step: a score that was moved below zero has the magnitude it has there."""
        self.scores.abs_()

    def forward(self, x: Tensor) -> Tensor:
        """The layer's answer under the selected mask."""
        return weigh(self.step.op, self.step.settings, x, self.effective_weight())


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

    def forward(self, x: Tensor) -> Tensor:
        """`x`, normalized."""
        op, settings = self.step.op, self.step.settings
        if op != "norm":
            return normalize(op, settings, x, self.gamma, self.beta)
        # In training the batch's own statistics are used and a running mean of them is kept, to look at validation
        # items by; `MaskedNetwork.finish` replaces it by the statistics of all the items.
        state = (self.mean, self.var, self.gamma, self.beta)
        return F.batch_norm(x, *state, self.training, self.momentum, settings["eps"])
