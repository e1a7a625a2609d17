"""Checks around learning: of tasks before it, of numbers after it, of equality across processes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from etcl_deploy.config import Learning
from etcl_deploy.core.task import Items, Task, load
from etcl_deploy.errors import DataError, LearningError
from etcl_deploy.learn.methods.method import Method
from etcl_deploy.learn.metrics import shortage
from etcl_deploy.network.masked_network import MaskedNetwork

CHECKED = 256  # items whose answers must be finite once a task is learned


def check_tasks(network: MaskedNetwork, tasks: Sequence[Task], options: Learning) -> None:
    """Refuse, before anything is learned, tasks that cannot be."""
    names = list(network.finished)
    for task in tasks:
        where = f"task {task.name!r}"
        if task.name in names:
            raise DataError(f"{where} is there twice; every task needs a name of its own")
        names.append(task.name)
        if len(task.classes) < 2 or len(set(task.classes)) != len(task.classes):
            raise DataError(f"{where} needs at least two different classes, not {list(task.classes)[:5]}")
        if len(task.training) - task.training.held_back(options.validation_share) < 2:
            raise DataError(f"{where} has {len(task.training)} training items; two to learn from are the least")
        for part, items in (("training", task.training), ("test", task.test)):
            if len(items) == 0 or len(items.images) != len(items):
                raise DataError(f"{where} has {len(items.images)} {part} images and {len(items)} labels")
            if items.images.shape[1:] != network.preprocessing.shape or items.images.dtype != torch.uint8:
                got = f"{items.images.dtype} {list(items.images.shape[1:])}"
                raise DataError(f"{where}: {part} images are {got}; {list(network.preprocessing.shape)} uint8 is right")
            low, high = int(items.labels.min()), int(items.labels.max())
            if low < 0 or high >= len(task.classes):
                wrong = low if low < 0 else high
                raise DataError(f"{where} has the {part} label {wrong}, but only {len(task.classes)} classes (from 0)")


def warnings_for(method: Method, training: Items, validation: Items) -> list[str]:
    """Warnings about a task that is about to be learned."""
    network, options = method.network, method.options
    warnings = []
    if len(training) < options.batch_size:
        warnings.append(f"only {len(training)} items to learn from, fewer than a batch of {options.batch_size}")
    short = shortage(network.claimed())
    if short and short not in method.said:
        method.said.add(short)  # once is enough: a hundred tasks may follow
        warnings.append(short)
    if not len(validation) and (options.patience or options.keep == "best"):
        warnings.append("no items are held back for validation: patience and keep = best have nothing to go by")
    if not len(validation) and method.improves_heads and options.transfer.backward == "replay":
        warnings.append("no items are held back for validation to check old heads by: none is improved")
    return warnings


def check_finite(network: MaskedNetwork, training: Items, options: Learning, task: Task) -> None:
    """Refuse weights or answers that are not finite: the last step may have broken what the loss did not yet show."""
    with torch.no_grad(), network.viewing():
        answers = network(load(training.images, torch.arange(len(training))[:CHECKED]).to(network.device))
    if not all(bool(values.isfinite().all()) for values in (answers, *network.parameters())):
        raise diverged(task.name, options, "its weights or answers are not finite")


def diverged(task: str, options: Learning, what: str) -> LearningError:
    """The error for a task whose numbers ran away."""
    hint = f"a learning_rate below {options.learning_rate} may help"
    return LearningError(f"task {task!r} could not be learned: {what}; {hint}")


def fingerprint(network: MaskedNetwork, name: str) -> str:
    """A digest of the network after a task: backbone, scores, claimed weights; the task's mask, norms and all heads."""
    state = network.finished[name]
    digest = hashlib.sha256()
    for layer in network.masked_layers.values():
        for tensor in (layer.weight.detach(), layer.scores.detach(), layer.claimed):
            digest.update(tensor.cpu().contiguous().numpy().data)
    norms = [value for norm in state.norms.values() for value in (norm.gamma, norm.beta, norm.mean, norm.var)]
    heads = [value for finished in network.finished.values() for value in finished.head.values()]
    for tensor in (*state.masks.values(), *norms, *heads):
        digest.update(tensor.cpu().contiguous().numpy().data)
    return digest.hexdigest()
