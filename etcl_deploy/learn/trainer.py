"""The algorithm: learn tasks one after another over one masked backbone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from etcl_deploy.config import Learning
from etcl_deploy.errors import LearningError
from etcl_deploy.learn.network import MaskedNetwork
from etcl_deploy.learn.run import Run
from etcl_deploy.learn.task import Task

EVALUATION_BATCH = 256


@dataclass(frozen=True)
class TaskStarted:
    """A task is about to be learned; `position` counts from 1."""

    task: str
    position: int
    total: int


@dataclass(frozen=True)
class EpochDone:
    """One pass over a task's training data, with its mean loss."""

    task: str
    epoch: int
    epochs: int
    loss: float


@dataclass(frozen=True)
class TaskDone:
    """A task is learned for good; `run` holds it and all before it."""

    task: str
    run: Run


Event = TaskStarted | EpochDone | TaskDone
Report = Callable[[Event], None]


def learn_sequence(
    network: MaskedNetwork,
    tasks: Sequence[Task],
    options: Learning,
    report: Report = lambda event: None,
) -> Run:
    """Learn every task in order; after each, measure all tasks learned so far."""
    started = time.monotonic()
    rows: list[tuple[float, ...]] = []
    run = Run(network, (), 0.0)
    for position, task in enumerate(tasks, start=1):
        report(TaskStarted(task.name, position, len(tasks)))
        learn_task(network, task, options, position, report)
        rows.append(tuple(accuracy(network, seen) for seen in tasks[:position]))
        run = Run(network, tuple(rows), time.monotonic() - started)
        report(TaskDone(task.name, run))
    return run


def learn_task(network: MaskedNetwork, task: Task, options: Learning, position: int, report: Report) -> None:
    """Learn one task: weights and scores together (Eq. nws1, nws2), then fix its mask for ever."""
    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + position)
    network.begin(task.name, task.classes, generator, fresh_scores=options.scores == "fresh")
    optimizer = _optimizer(network, options)
    images, labels = task.train_x.to(network.device), task.train_y.to(network.device)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_rate, options))
    network.train()
    for epoch in range(1, options.epochs + 1):
        total = torch.zeros((), device=network.device)
        for batch in _batches(len(labels), options.batch_size, generator):
            batch = batch.to(network.device)
            loss = F.cross_entropy(network(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.detach() * len(batch)
        schedule.step()
        mean = float(total) / len(labels)
        if not math.isfinite(mean):
            raise _diverged(task, options, f"its loss is {mean} after epoch {epoch}")
        report(EpochDone(task.name, epoch, options.epochs, mean))
    with torch.no_grad():
        answers = network(images[:EVALUATION_BATCH])  # the last step may have broken what the loss did not yet show
    if not all(bool(values.isfinite().all()) for values in (answers, *network.parameters())):
        raise _diverged(task, options, "its weights or answers are not finite")
    # Shuffled: items often come class by class, and a batch of one class has the statistics of no other.
    network.finish(images[b] for b in _batches(len(labels), EVALUATION_BATCH, generator))


def _diverged(task: Task, options: Learning, what: str) -> LearningError:
    hint = f"a learning_rate below {options.learning_rate} may help"
    return LearningError(f"task {task.name!r} could not be learned: {what}; {hint}")


@torch.no_grad()
def accuracy(network: MaskedNetwork, task: Task) -> float:
    """Test accuracy of a finished task, in percent."""
    right = predict(network, task.name, task.test_x).argmax(1) == task.test_y
    return 100 * int(right.sum()) / len(right)


@torch.no_grad()
def predict(network: MaskedNetwork, name: str, images: Tensor) -> Tensor:
    """Logits of a finished task for any number of images, on the CPU."""
    network.select(name)
    parts = _batches(len(images), EVALUATION_BATCH)
    return torch.cat([network(images[part].to(network.device)).cpu() for part in parts])


def _optimizer(network: MaskedNetwork, options: Learning) -> torch.optim.Optimizer:
    layers = network.masked_layers.values()
    groups = [
        {
            "params": [layer.weight for layer in layers] + list(network.head.values()),
            "weight_decay": options.weight_decay,
        },
        {
            "params": [layer.scores for layer in layers] + list(network.norms.parameters()),
            "weight_decay": 0.0,
        },
    ]
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=options.learning_rate, momentum=options.momentum, fused=True)
    return torch.optim.Adam(groups, lr=options.learning_rate, fused=True)


def _rate(options: Learning, epoch: int) -> float:
    """What the learning rate is multiplied by in an epoch, counted from 0."""
    if options.schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * epoch / options.epochs))


def _batches(items: int, size: int, generator: torch.Generator | None = None) -> list[Tensor]:
    """Indices in batches, shuffled by the generator if there is one; none of a single item if that can be helped.

    Batch normalization cannot learn from one item, so a single one left over joins the batch before it.
    """
    order = torch.arange(items) if generator is None else torch.randperm(items, generator=generator)
    parts = list(torch.split(order, size))
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts
