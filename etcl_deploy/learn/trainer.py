"""The loop that every method shares: learn tasks one after another over one masked backbone, and measure them all."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from etcl_deploy.config import Learning
from etcl_deploy.core.task import Images, Items, Task, load, percent_right
from etcl_deploy.errors import DataError, LearningError
from etcl_deploy.learn.augment import moved
from etcl_deploy.learn.events import EpochDone, Report, StepDone, TaskDone, TaskStarted, Warned
from etcl_deploy.learn.methods import METHODS, Method, TaskContext
from etcl_deploy.learn.metrics import AccuracyRow, shortage
from etcl_deploy.learn.run import Run
from etcl_deploy.learn.task_record import TaskRecord
from etcl_deploy.learn.task_training import Checkpoint, TaskTraining, seeded
from etcl_deploy.network.masked_network import EVALUATION_BATCH, MaskedNetwork

CHECKED = 256  # items whose answers must be finite once a task is learned


def learn_sequence(
    network: MaskedNetwork,
    tasks: Sequence[Task],
    options: Learning,
    report: Report = lambda event: None,
    *,
    before: Run | None = None,
    earlier: Sequence[Task] = (),
    checkpoint: Checkpoint | None = None,
) -> Run:
    """Learn every task in order; after each, measure all tasks known so far.

    `before` is a run to go on from and `earlier` those of its tasks whose test items are at hand; `checkpoint` is where
    the first of `tasks` was left.
    """
    check_tasks(network, tasks, options)
    run = before or Run(network)
    known = {task.name: task for task in earlier}
    method = METHODS[options.method](network, options)
    method.memory = run.memory
    total = len(run.tasks) + len(tasks)
    for task in tasks:
        started = time.monotonic() - (checkpoint.seconds if checkpoint else 0)
        report(TaskStarted(task.name, len(run.tasks) + 1, total))
        learned = learn_task(method, task, run.records, report, checkpoint)
        if network.distributed.size > 1:
            network.distributed.same(fingerprint(network, task.name), f"what was learned of task {task.name!r}")
        known[task.name] = task
        run = replace(
            run,
            records={**run.records, task.name: learned},
            memory=method.memory,
            matrix=(*run.matrix, _measure(method, known, run, task, learned)),
            seconds=run.seconds + time.monotonic() - started,
        )
        report(TaskDone(task.name, run))
        checkpoint = None
    return run


def learn_task(
    method: Method, task: Task, past: Mapping[str, TaskRecord], report: Report, checkpoint: Checkpoint | None = None
) -> TaskRecord:
    """Learn one task and fix it for ever."""
    network, options = method.network, method.options
    generator = seeded(options.seed, len(network.finished) + 1, 0)
    training, validation = (
        part.to(network.device) for part in task.training.split(options.validation_share, generator)
    )
    for warning in _warnings(method, training, validation):
        report(Warned(task.name, warning))
    context = TaskContext(task, training, validation, past, generator, report)
    progress = method.begin(context)
    network.train()
    if checkpoint:
        progress.restore(checkpoint)
    else:
        method.first_step(progress, training)
    _learn(progress, method, training, validation, report)
    _check_finite(network, training, options, task)
    return method.finish(context)


def _learn(progress: TaskTraining, method: Method, training: Items, validation: Items, report: Report) -> None:
    """All epochs of a task."""
    network, options = progress.network, progress.options
    distributed = network.distributed
    autocast = torch.autocast(network.device.type, torch.bfloat16, enabled=options.precision == "bfloat16")
    moving = (options.rotation, options.zoom, options.shift)
    while not progress.is_over:
        batches = progress.start_epoch(training)
        left = batches[progress.step :]
        own = [batch[distributed.span(len(batch))] for batch in left]
        for batch, (images, labels) in zip(left, training.read(own, network.device), strict=True):
            if any(moving):
                drawn = torch.rand(4, len(batch), generator=progress.generator)
                images = moved(images, *moving, drawn[:, distributed.span(len(batch))])
            method.before_batch(_share(progress, len(batches)))
            with network.sharing(len(batch)):
                with autocast:
                    logits = network(images)
                loss = network.mean_loss(logits.float(), labels)
                penalty = method.penalty()
                if penalty is not None:
                    loss = loss + penalty / distributed.size
                total = progress.descend(loss, partial(method.add_gradients, images, labels))
            method.after_step()
            progress.loss += total * len(batch)
            progress.step += 1
            place = (progress.epoch + 1, options.epochs, progress.step, len(batches))
            report(StepDone(progress.task, *place, progress.checkpoint))
        mean = float(progress.loss) / len(training)
        if not math.isfinite(mean):
            raise diverged(progress.task, options, f"its loss is {mean} after epoch {progress.epoch + 1}")
        method.before_batch(1.0)
        if options.patience or options.keep == "best":  # much hangs on this accuracy: no running mean will do
            seen = training.read(training.batches(EVALUATION_BATCH), network.device)
            network.estimate_norms(images for images, _ in seen)
        held = accuracy(network, validation) if len(validation) else None
        network.train()
        progress.end_epoch(held)
        report(EpochDone(progress.task, progress.epoch, options.epochs, mean, held))
    progress.use_best()
    method.before_batch(1.0)


def _share(progress: TaskTraining, batches: int) -> float:
    """How far an epoch has come with this batch, from 0 with its first to 1 with its last; with one batch an epoch, how
    far the task has."""
    done, last = (progress.step, batches - 1) if batches > 1 else (progress.epoch, progress.options.epochs - 1)
    return done / last if last else 1.0


def accuracy(network: MaskedNetwork, items: Items, name: str | None = None) -> float:
    """The share of items, in percent, that a finished task (None: the one being learned) gets right."""
    if name is not None:
        network.select(name)
    batches = items.read(items.batches(EVALUATION_BATCH), network.device)
    with torch.no_grad():
        return percent_right((network.answer(network.embed(images)), labels) for images, labels in batches)


@torch.no_grad()
def predict(network: MaskedNetwork, name: str, images: Images) -> Tensor:
    """Logits of a finished task for any number of images, on the CPU."""
    features = network.embed(images, name)
    return network.answer(features).cpu()


def fingerprint(network: MaskedNetwork, name: str) -> str:
    """A digest of all that a task left in the network: backbone, scores, claimed weights; its mask, norms and head."""
    state = network.finished[name]
    found = hashlib.sha256()
    for layer in network.masked_layers.values():
        for tensor in (layer.weight.detach(), layer.scores.detach(), layer.claimed):
            found.update(tensor.cpu().contiguous().numpy().data)
    norms = [value for norm in state.norms.values() for value in (norm.gamma, norm.beta, norm.mean, norm.var)]
    heads = [value for finished in network.finished.values() for value in finished.head.values()]
    for tensor in (*state.masks.values(), *norms, *heads):
        found.update(tensor.cpu().contiguous().numpy().data)
    return found.hexdigest()


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
                found = f"{items.images.dtype} {list(items.images.shape[1:])}"
                raise DataError(
                    f"{where}: {part} images are {found}; {list(network.preprocessing.shape)} uint8 is right"
                )
            low, high = int(items.labels.min()), int(items.labels.max())
            if low < 0 or high >= len(task.classes):
                wrong = low if low < 0 else high
                raise DataError(f"{where} has the {part} label {wrong}, but only {len(task.classes)} classes (from 0)")


def _warnings(method: Method, training: Items, validation: Items) -> list[str]:
    network, options = method.network, method.options
    found = []
    if len(training) < options.batch_size:
        found.append(f"only {len(training)} items to learn from, fewer than a batch of {options.batch_size}")
    short = shortage(network.claimed())
    if short and short not in method.said:
        method.said.add(short)  # once is enough: a hundred tasks may follow
        found.append(short)
    if not len(validation) and (options.patience or options.keep == "best"):
        found.append("no items are held back for validation: patience and keep = best have nothing to go by")
    if not len(validation) and method.improves_heads and options.transfer.backward == "projected":
        found.append("no items are held back for validation to check old heads by: none is improved")
    return found


def _check_finite(network: MaskedNetwork, training: Items, options: Learning, task: Task) -> None:
    """The last step may have broken what the loss did not yet show."""
    with torch.no_grad():
        answers = network(load(training.images, torch.arange(len(training))[:CHECKED]).to(network.device))
    if not all(bool(values.isfinite().all()) for values in (answers, *network.parameters())):
        raise diverged(task.name, options, "its weights or answers are not finite")


def diverged(task: str, options: Learning, what: str) -> LearningError:
    """The error for a task whose numbers ran away."""
    hint = f"a learning_rate below {options.learning_rate} may help"
    return LearningError(f"task {task!r} could not be learned: {what}; {hint}")


def _measure(method: Method, known: Mapping[str, Task], run: Run, task: Task, learned: TaskRecord) -> AccuracyRow:
    """Test accuracy of every task so far, in percent; None where it may have changed and there are no test items.

    A task whose head was not touched answers as it did, bit by bit: what was measured then still holds.
    """
    changed = {change.task for change in learned.changes if change.kept} | {task.name}
    row: list[float | None] = []
    for index, name in enumerate((*run.tasks, task.name)):
        value = None if name in changed or method.forgets else run.matrix[-1][index]
        if value is None and name in known:
            value = accuracy(method.network, known[name].test, name)
        row.append(value)
    return tuple(row)
