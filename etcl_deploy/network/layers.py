"""A layer of the backbone that many tasks share: `y = layer(x; W * m)`, one weight W, one mask m a task."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from etcl_deploy.core.operations import apply_weight
from etcl_deploy.core.plan import Step
from etcl_deploy.network.mask_training import MaskTraining
from etcl_deploy.network.masks import keep_top, reselect, union


class MaskedLayer(nn.Module):
    """A convolution, linear layer or bias whose weight a mask thins out.

    While a task is learned (`begin` to `end`) the mask follows the scores; otherwise `mask` is set, and used.
    `claimed` marks the weights of finished tasks, which never change again.
    """

    weight: nn.Parameter
    scores: nn.Parameter
    claimed: Tensor

    def __init__(self, step: Step, generator: torch.Generator) -> None:
        super().__init__()
        assert step.weight_shape is not None
        self.step = step
        self.mask: Tensor | None = None
        self.private_weight: Tensor | None = None  # the weight of a task that does not use the shared one
        self.work: MaskTraining | None = None
        bound = math.sqrt(6 / math.prod(step.weight_shape[1:])) if step.op != "bias" else 0.0  # as if it were not there
        self.weight = nn.Parameter(torch.empty(step.weight_shape).uniform_(-bound, bound, generator=generator))
        self.scores = nn.Parameter(torch.empty(step.weight_shape))
        self.register_buffer("claimed", torch.zeros(step.weight_shape, dtype=torch.bool))
        self.draw_scores(generator)

    def draw_scores(self, generator: torch.Generator) -> None:
        """Start the scores anew. Only their magnitude ever counts, so they are kept as such: none is negative."""
        bound = 1 / math.sqrt(math.prod(self.scores.shape[1:] or self.scores.shape))
        fresh = torch.empty(self.scores.shape).uniform_(0, bound, generator=generator)
        with torch.no_grad():
            self.scores.copy_(fresh)

    def select_mask(self, mask: Tensor) -> None:
        """Rearrange the scores so that they select `mask`."""
        with torch.no_grad():
            self.scores.copy_(reselect(self.scores, mask))

    def begin(self, density: float) -> None:
        """Learn a task from here on: the mask is the share `density` of the largest scores, and follows them."""
        self.mask = self.private_weight = None
        self.work = MaskTraining(self.weight, self.scores, self.claimed, density)

    def end(self) -> None:
        """Learn no further; every claimed weight is as it was at `begin`."""
        assert self.work is not None
        self.work.put_back()
        self.work = None

    def freeze(self, mask: Tensor | None = None) -> Tensor:
        """End the task that was learned, fix its mask (None: that of its scores), use it from now on, and give it."""
        assert self.work is not None
        density = self.work.mask.density
        self.end()
        self.mask = keep_top(self.scores, density) if mask is None else mask
        return self.mask

    def claim(self, mask: Tensor) -> None:
        """Make the weights of a finished task its own for ever (M_t of the paper)."""
        self.claimed = union((self.claimed, mask))

    def effective_weight(self) -> Tensor:
        """`W * m`: the weight the task at hand sees."""
        if self.mask is not None:
            # Selected, not multiplied: what is not the task's own cannot reach its answer, be it infinite.
            return torch.where(self.mask, self.weight if self.private_weight is None else self.private_weight, 0)
        assert self.work is not None, "select or begin a task first"
        return self.work.masked_weight()

    def forward(self, x: Tensor) -> Tensor:
        """The layer's answer under the mask at hand."""
        if x.ndim == 4:  # the order in which a processor's convolutions are quickest, forwards and backwards
            x = x.contiguous(memory_format=torch.channels_last)
        return apply_weight(self.step.op, self.step.settings, x, self.effective_weight())
