"""One masked layer while a task is learned: the mask it is looked through, and where its gradients go.

The gradient of a mask passes straight through to its scores. That is done by hand and in place here, not by autograd:
these are the largest tensors there are, and each is touched at every step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from etcl_deploy.network.masks import TopKMask


class MaskTraining:
    """Made when a task begins, dropped when it ends.

    Weights that earlier tasks claimed get no gradient (Eq. nws1), so that no optimizer moves them; and whatever may
    have happened, `put_back` restores them, bit by bit. With `borrowed` set, the layer is looked through that mask
    instead of the one its scores choose, while gradients still reach the scores.
    """

    def __init__(self, weight: nn.Parameter, scores: nn.Parameter, claimed: Tensor, density: float) -> None:
        self.weight = weight
        self.scores = scores
        self.borrowed: Tensor | None = None
        # The weight in use; a backward pass gives its gradient.
        self.used = torch.zeros_like(weight, requires_grad=True)
        self._room = torch.empty_like(weight, requires_grad=False)  # its numbers; after that, the weight's gradient
        self._claimed = claimed
        self._frozen = weight.detach().clone()
        self._free = (~claimed).float() if bool(claimed.any()) else None  # None: every weight may change
        self.mask = TopKMask(density)

    def masked_weight(self) -> Tensor:
        """`W * m`: the weight as the task sees it at this step."""
        if self.borrowed is None:
            self.mask.follow(self.scores.detach())
            room = self._room
        else:  # while a step is under way, whose gradient is in the usual place
            self.mask.show(self.borrowed)
            room = torch.empty_like(self._room)
        self.used = self.mask.select(self.weight.detach(), room).detach().requires_grad_()
        return self.used

    def forget_gradients(self) -> None:
        """Before a backward pass: leave nothing of the one before."""
        self.weight.grad = self.scores.grad = self.used.grad = None

    @torch.no_grad()
    def spread_gradient(self) -> None:
        """After a backward pass: give weight and scores their gradients (Eq. nws1, nws2), in the place of its own."""
        gradient = self.used.grad
        assert gradient is not None
        self.weight.grad = self.mask.select(gradient, self._room)
        if self._free is not None:
            self.weight.grad.mul_(self._free)
        self.scores.grad, self.used.grad = self.to_scores(gradient), None

    @torch.no_grad()
    def to_scores(self, gradient: Tensor) -> Tensor:
        """`dL/ds = dL/dm = dL/d(W * m) * W`, in the place of the gradient of the weight in use."""
        return gradient.mul_(self.weight)

    @torch.no_grad()
    def decay(self, share: float) -> None:
        """Add `share` of each weight to its gradient, as weight decay does, but of no claimed one."""
        assert self.weight.grad is not None
        if self._free is None:
            self.weight.grad.add_(self.weight, alpha=share)
        else:
            self.weight.grad.addcmul_(self.weight, self._free, value=share)

    @torch.no_grad()
    def reflect(self) -> None:
        """After a step: a score that was moved below zero has the magnitude it has there."""
        self.scores.abs_()

    @torch.no_grad()
    def put_back(self) -> None:
        """Restore the claimed weights, whatever an optimizer did to them, and leave no gradient behind."""
        self.weight.copy_(torch.where(self._claimed, self._frozen, self.weight))
        self.forget_gradients()
