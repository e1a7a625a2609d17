"""Forward transfer by score gradients: a new task is drawn towards the weights similar tasks selected (Eq. G-Align)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from etcl_deploy.learn.network import MaskedNetwork, TaskState
from etcl_deploy.learn.task import Items

SHARE = 0.1  # of the gradients that `guide` adds, as in the authors' code


def align(network: MaskedNetwork, batches: Sequence[Items], state: TaskState) -> None:
    """Set the gradients of the scores to the sum of those through the task's own mask and through `state`'s."""
    scores = [layer.scores for layer in network.masked_layers.values()]
    total = [torch.zeros_like(score) for score in scores]
    for batch in batches:
        images, labels = batch.images.to(network.device), batch.labels.to(network.device)
        own = _score_gradients(network, images, labels)
        with network.borrowing(state):
            theirs = _score_gradients(network, images, labels)
        for gradient, mine, other in zip(total, own, theirs, strict=True):
            gradient += (mine + other) * len(batch)
    items = sum(len(batch) for batch in batches)
    for score, gradient in zip(scores, total, strict=True):
        score.grad = gradient / items


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
    return network.score_gradients(F.cross_entropy(network(images), labels))
