"""Transfer between similar tasks, forwards and backwards.

Forwards, a new task is drawn towards the weights similar tasks selected (Eq. G-Align). Backwards, its data improves
the heads of similar ones (Eq. Lsim; GPM). An old task's sub-network is frozen, so the features of the new data under it
are constants: computed once a task. Its head learns from them outside the space of its own data's features, so that its
answers there stay what they were; and an update is kept only as far as it does no harm that can be seen without old
data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan

import torch
from torch import Tensor
from torch.nn import functional as F

from etcl_deploy.config import Transfer
from etcl_deploy.core.task import Items, percent_right
from etcl_deploy.learn.projection import outside
from etcl_deploy.learn.signature import HeadInputs, Seen, TaskSignature, seen_by_head
from etcl_deploy.learn.task_record import HeadChange, TaskRecord
from etcl_deploy.learn.task_training import TaskTraining
from etcl_deploy.network.distributed import Batch
from etcl_deploy.network.masked_network import MaskedNetwork
from etcl_deploy.network.state import Head, TaskState

SHARE = 0.1  # of the gradients that `guide` adds, as in the authors' code
BATCH = 64
DRAWS = 20  # a class, to hold an old head against its own answers
SHARES = (1.0, 0.5, 0.25, 0.125)  # of an update that are tried, until one does no harm


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


def pull_target(states: Sequence[TaskState]) -> Tensor | None:
    """The mean direction of the tasks' heads; None of no task."""
    if not states:
        return None
    total = torch.zeros_like(states[0].head["weight"])
    for state in states:
        total += state.head["weight"] / torch.linalg.vector_norm(state.head["weight"])
    return total / len(states)


def pull(target: Tensor, weight: Tensor) -> Tensor:
    """The mean over the tasks behind `target` of `1 - cos(their head, weight)`: the second part of Eq. Lsim."""
    distance: Tensor = 1 - (target * weight).sum() / torch.linalg.vector_norm(weight).clamp_min(
        torch.finfo(weight.dtype).tiny
    )
    return distance


def improve_heads(
    network: MaskedNetwork,
    name: str,
    similar: Sequence[TaskState],
    training: Items,
    validation: Items,
    records: Mapping[str, TaskRecord],
    settings: Transfer,
    generator: torch.Generator,
) -> tuple[HeadChange, ...]:
    """Train the head of every similar task on the new task's items, and report each attempt.

    Without validation items there is nothing to check an update by, so none is tried where it has to be checked.
    """
    if not len(validation) and settings.backward != "unchecked":
        return ()
    target = pull_target([network.finished[name]])
    changes = []
    for state in similar:
        known = records[state.name]
        seen, held = (seen_by_head(network, items, state.name) for items in (training, validation))
        inputs = TaskSignature.of(known.memory).inputs
        trained = _train(state.head, seen, inputs.space, target, settings, generator)
        head, change = _without_harm(state, trained, held, inputs, known.head, settings, generator)
        if change.kept:
            network.change_head(state.name, head)
        changes.append(change)
    return tuple(changes)


def _train(
    head: Head,
    seen: Seen,
    space: Tensor,
    target: Tensor | None,
    settings: Transfer,
    generator: torch.Generator,
) -> Head:
    """The head after learning from features, moved only outside `space`."""
    # Not the gradient is projected but the whole update: an optimizer that scales its parts would turn it back inside.
    step = torch.zeros_like(head["weight"]).requires_grad_()
    optimizer = torch.optim.Adam([step], lr=settings.head_rate)
    for _ in range(settings.head_epochs):
        for batch in Items(seen.features, seen.labels).batches(BATCH, generator):
            weight = head["weight"] + outside(step, space)
            loss = F.cross_entropy(F.linear(seen.features[batch], weight, head.get("bias")), seen.labels[batch])
            if settings.pull and target is not None:
                loss = loss + settings.pull * pull(target, weight)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return {**head, "weight": head["weight"] + outside(step.detach(), space)}


@torch.no_grad()
def _without_harm(
    state: TaskState,
    trained: Head,
    held: Seen,
    inputs: HeadInputs,
    first: Head,
    settings: Transfer,
    generator: torch.Generator,
) -> tuple[Head, HeadChange]:
    """The largest step towards `trained` that does no visible harm; perhaps none.

    Harm is a higher loss on the new task's held-back items, or answers to draws from the task's own head inputs that
    differ from those of the head the task was finished with.
    """
    drawn = inputs.draw(DRAWS, generator)
    answers = _logits(first, drawn).argmax(1)
    before = _score(state.head, held)
    length = state.head["weight"].norm()

    def agreement_of(head: Head) -> float:
        return float((_logits(head, drawn).argmax(1) == answers).float().mean())

    for share in SHARES:
        head = {key: torch.lerp(value, trained[key], share) for key, value in state.head.items()}
        agreement, after = agreement_of(head), _score(head, held)
        if settings.backward == "unchecked" or (after[0] <= before[0] and agreement >= settings.head_agreement):
            moved = float((head["weight"] - state.head["weight"]).norm() / length)
            return head, HeadChange(state.name, share, moved, before[1], after[1], 100 * agreement)
    return state.head, HeadChange(state.name, 0.0, 0.0, before[1], before[1], 100 * agreement_of(state.head))


def _logits(head: Head, features: Tensor) -> Tensor:
    return F.linear(features, head["weight"], head.get("bias"))


def _score(head: Head, seen: Seen) -> tuple[float, float | None]:
    """Mean loss, and accuracy in percent; of no items neither."""
    if not len(seen.labels):
        return nan, None
    logits = _logits(head, seen.features)
    return float(F.cross_entropy(logits, seen.labels)), percent_right([(logits, seen.labels)])
