"""Forward transfer: what a new task gets from similar ones while it is learned.

It may start as one of them (`MaskedNetwork.begin`), draw its head to theirs (Eq. Lsim), and follow the gradients of its
scores through their masks (Eq. G-Align).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from etcl_deploy.core.task import Items
from etcl_deploy.learn.task_training import TaskTraining
from etcl_deploy.network.distributed import Batch
from etcl_deploy.network.masked_network import MaskedNetwork
from etcl_deploy.network.state import TaskState

SHARE = 0.1  # of the gradients that `guide` adds, as in the authors' code


def align(progress: TaskTraining, items: Items, state: TaskState) -> None:
    """Set the gradients of the scores to the sum of those through the task's own mask and through `state`'s.

    Both are means over all items. Nothing else gets a gradient.
    """
    network = progress.network
    progress.forget_gradients()
    scores = [layer.scores for layer in network.masked_layers.values()]
    total = [torch.zeros_like(score) for score in scores]
    for batch in progress.read(items, items.batches(progress.options.batch_size)):
        own = _score_gradients(network, batch)
        with network.borrowing(state):
            theirs = _score_gradients(network, batch)
        for gradient, mine, other in zip(total, own, theirs, strict=True):
            gradient += (mine + other) * batch.count
    for score, gradient in zip(scores, total, strict=True):
        score.grad = gradient / len(items)


def guide(network: MaskedNetwork, batch: Batch, states: Sequence[TaskState]) -> None:
    """Add a tenth of the negative score gradients through every similar task's mask to those of the step at hand."""
    scores = [layer.scores for layer in network.masked_layers.values()]
    for state in states:
        with network.borrowing(state):
            gradients = _score_gradients(network, batch)
        for score, gradient in zip(scores, gradients, strict=True):
            assert score.grad is not None
            score.grad.add_(gradient.clamp_max(0), alpha=SHARE)


def _score_gradients(network: MaskedNetwork, batch: Batch) -> list[Tensor]:
    """The gradients of all scores, apart from those a step is taken by, summed over the processes."""
    loss = batch.mean_loss(network(batch.images, batch))
    gradients = torch.autograd.grad(loss, [work.used for work in network.work.values()])
    batch.group.add_up(gradients)
    return [work.to_scores(gradient) for work, gradient in zip(network.work.values(), gradients, strict=True)]


def pull_target(weights: Sequence[Tensor]) -> Tensor:
    """The mean direction of heads."""
    return torch.stack([weight / torch.linalg.vector_norm(weight) for weight in weights]).mean(0)


def pull(target: Tensor, weight: Tensor) -> Tensor:
    """The mean over the tasks behind `target` of `1 - cos(their head, weight)`: the second part of Eq. Lsim."""
    distance: Tensor = 1 - (target * weight).sum() / torch.linalg.vector_norm(weight).clamp_min(
        torch.finfo(weight.dtype).tiny
    )
    return distance
