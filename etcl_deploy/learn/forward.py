"""Forward transfer by score gradients: a new task is drawn towards the weights similar tasks selected (Eq. G-Align)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from etcl_deploy.core.task import Items
from etcl_deploy.network.masked_network import MaskedNetwork
from etcl_deploy.network.state import TaskState

SHARE = 0.1  # of the gradients that `guide` adds, as in the authors' code


def align(network: MaskedNetwork, items: Items, size: int, state: TaskState) -> None:
    """Set the gradients of the scores to the sum of those through the task's own mask and through `state`'s.

    Both are means over all items, looked at in batches of `size`.
    """
    scores = [layer.scores for layer in network.masked_layers.values()]
    total = [torch.zeros_like(score) for score in scores]
    batches = items.batches(size)
    shares = [batch[network.ranks.span(len(batch))] for batch in batches]
    for batch, (images, labels) in zip(batches, items.read(shares, network.device), strict=True):
        with network.sharing(len(batch)):
            own = _score_gradients(network, images, labels)
            with network.borrowing(state):
                theirs = _score_gradients(network, images, labels)
        for gradient, mine, other in zip(total, own, theirs, strict=True):
            gradient += (mine + other) * len(batch)
    for score, gradient in zip(scores, total, strict=True):
        score.grad = gradient / len(items)


def guide(network: MaskedNetwork, images: Tensor, labels: Tensor, states: Sequence[TaskState]) -> None:
    """Add a tenth of the negative score gradients through every similar task's mask to those of the step at hand."""
    scores = [layer.scores for layer in network.masked_layers.values()]
    for state in states:
        with network.borrowing(state):
            gradients = _score_gradients(network, images, labels)
        for score, gradient in zip(scores, gradients, strict=True):
            assert score.grad is not None
            score.grad.add_(gradient.clamp_max(0), alpha=SHARE)


def _score_gradients(network: MaskedNetwork, images: Tensor, labels: Tensor) -> Sequence[Tensor]:
    return network.score_gradients(network.mean_loss(network(images), labels))
