"""The loop that every method shares: learn tasks one after another over one masked backbone, and measure them all.

`training_step` is a whole step from top to bottom. What a mask does to a weight and to its gradient is in
`network/mask_training.py`; what a method adds is in `learn/methods/`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from etcl_deploy.config import Learning
from etcl_deploy.core.task import Images, Items, Task, percent_right
from etcl_deploy.errors import LearningError
from etcl_deploy.learn.augment import moved
from etcl_deploy.learn.checks import check_finite, check_tasks, diverged, fingerprint, warnings_for
from etcl_deploy.learn.events import (
    AccuracyFell,
    EpochDone,
    Event,
    ProbeStepDone,
    Report,
    StepDone,
    TaskDone,
    TaskStarted,
    Warned,
)
from etcl_deploy.learn.methods import METHODS, HeldBack, Method, TaskContext
from etcl_deploy.learn.metrics import AccuracyRow, falls
from etcl_deploy.learn.run import Run
from etcl_deploy.learn.task_record import TaskRecord
from etcl_deploy.learn.task_training import Checkpoint, TaskTraining, seeded
from etcl_deploy.network.distributed import ALONE, Batch, Distributed
from etcl_deploy.network.masked_network import EVALUATION_BATCH, MaskedNetwork

PROBE_ITEMS = 1000  # training items, in random order, from which a probe estimates normalization


def learn_sequence(
    network: MaskedNetwork,
    tasks: Sequence[Task],
    options: Learning,
    report: Report = lambda event: None,
    *,
    before: Run | None = None,
    earlier: Sequence[Task] = (),
    checkpoint: Checkpoint | None = None,
    distributed: Distributed = ALONE,
) -> Run:
    """Learn every task in order; after each, measure all tasks known so far.

    `before` is a run to go on from and `earlier` those of its tasks whose test items are at hand; `checkpoint` is where
    the first of `tasks` was left; `distributed` are the processes that learn the same run together.
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
        learned = learn_task(
            method, task, run.records, report, checkpoint, distributed, _held_back(known, run, options)
        )
        if distributed.size > 1:
            distributed.same(fingerprint(network, task.name), f"what was learned of task {task.name!r}")
        known[task.name] = task
        run = replace(
            run,
            records={**run.records, task.name: learned},
            memory=method.memory,
            matrix=(*run.matrix, _measure(method, known, run, task, learned)),
            seconds=run.seconds + time.monotonic() - started,
        )
        report(TaskDone(task.name, run))
        for fall in () if method.forgets else falls(run.tasks, run.matrix):
            report(AccuracyFell(task.name, *fall))
        checkpoint = None
    return run


def learn_task(
    method: Method,
    task: Task,
    past: Mapping[str, TaskRecord],
    report: Report,
    checkpoint: Checkpoint | None = None,
    distributed: Distributed = ALONE,
    held: HeldBack = lambda name: None,
) -> TaskRecord:
    """Learn one task and fix it for ever; `held` gives validation items of earlier ones."""
    network, options = method.network, method.options
    generator = seeded(options.seed, len(network.finished) + 1, 0)
    training, validation = (
        part.to(network.device) for part in task.training.split(options.validation_share, generator)
    )
    for warning in warnings_for(method, training, validation):
        report(Warned(task.name, warning))
    context = TaskContext(task, training, validation, past, generator, report, distributed, held)
    starts = method.starts(context)
    progress = _begin(method, context, starts, checkpoint)
    while not progress.is_over:
        _learn_epoch(method, progress, context, report)
    progress.use_best()
    method.before_batch(1.0)
    check_finite(network, training, options, task)
    return method.finish(context)


def _held_back(known: Mapping[str, Task], run: Run, options: Learning) -> HeldBack:
    """The validation items of a finished task that is known, as they were held back when it was learned."""

    def held(name: str) -> Items | None:
        if name not in known:
            return None
        position = run.tasks.index(name) + 1
        return known[name].training.validation(options.validation_share, seeded(options.seed, position, 0))

    return held


def _begin(
    method: Method, context: TaskContext, starts: Sequence[str | None], checkpoint: Checkpoint | None
) -> TaskTraining:
    """Begin a task from the start that learns most, or take it up where it was left."""
    random_state = context.generator.get_state()  # whatever was probed, the task goes on with the same random numbers

    def begin(start: str | None) -> TaskTraining:
        context.generator.set_state(random_state)
        progress = method.begin(replace(context, start=start))
        method.network.train()
        return progress

    if checkpoint:
        progress = begin(method.choose_start(context, starts, checkpoint.probed))
        progress.restore(checkpoint)
        return progress
    if len(starts) == 1:
        progress = begin(method.choose_start(context, starts, ()))
        method.first_step(progress, context.training)
        return progress
    untouched = {key: value.clone() for key, value in method.network.shared_tensors().items()}
    probes = []
    for start in starts:
        for key, value in method.network.shared_tensors().items():
            value.copy_(untouched[key])
        probes.append(_probe(method, replace(context, start=start), begin(start)))
    probed = [probe.accuracy for probe in probes]
    start = method.choose_start(context, starts, probed)
    context.group.same(str(start), "the start")
    progress, best = begin(start), probes[starts.index(start)]
    progress.restore(best.checkpoint)  # its epochs are not learned again
    progress.probed = probed
    for event in best.epochs:
        context.report(event)
    return progress


@dataclass(frozen=True)
class _Probe:
    """A start that was probed: how far it came, and how well it did."""

    checkpoint: Checkpoint
    accuracy: float
    epochs: Sequence[EpochDone]


def _probe(method: Method, context: TaskContext, progress: TaskTraining) -> _Probe:
    """Learn a task for a few epochs from `context.start`. Its checkpoint has the normalization that is learned with."""
    epochs: list[EpochDone] = []

    def hear(event: Event) -> None:
        if isinstance(event, EpochDone):
            epochs.append(event)
        elif isinstance(event, StepDone):
            place = (event.epoch, method.probe_epochs, event.step, event.steps)
            context.report(ProbeStepDone(event.task, context.start, *place))

    method.first_step(progress, context.training)
    try:
        for _ in range(method.probe_epochs):
            _learn_epoch(method, progress, context, hear)
    except LearningError:  # its numbers ran away: if another start does better, that is no fault of the task
        return _Probe(progress.checkpoint(), 0.0, epochs)
    checkpoint = progress.checkpoint()
    method.before_batch(1.0)
    _estimate_norms(method.network, context.training.at_most(PROBE_ITEMS))
    return _Probe(checkpoint, accuracy(method.network, context.validation), epochs)


def _estimate_norms(network: MaskedNetwork, training: Items) -> None:
    """Set the normalization to what the training items have under the mask at hand."""
    seen = training.read(training.batches(EVALUATION_BATCH), network.device)
    network.estimate_norms(images for images, _ in seen)


def _learn_epoch(method: Method, progress: TaskTraining, context: TaskContext, report: Report) -> None:
    """One pass over the training items, from the step where it stands; then a look at the validation items."""
    network, options, validation = method.network, method.options, context.validation
    training = method.lessons(context, progress.epoch / options.epochs)
    batches = progress.start_epoch(training)
    for batch in progress.read(training, batches[progress.step :]):
        mean_loss = training_step(method, progress, batch, _share(progress, len(batches)))
        progress.loss += mean_loss * batch.count
        progress.step += 1
        place = (progress.epoch + 1, options.epochs, progress.step, len(batches))
        report(StepDone(progress.task, *place, progress.checkpoint))
    mean = float(progress.loss) / len(training)
    if not math.isfinite(mean):
        raise diverged(progress.task, options, f"its loss is {mean} after epoch {progress.epoch + 1}")
    method.before_batch(1.0)
    if options.patience or options.keep == "best":  # much hangs on this accuracy: no running mean will do
        _estimate_norms(network, training)
    held = accuracy(network, validation) if len(validation) else None
    progress.end_epoch(held)
    report(EpochDone(progress.task, progress.epoch, options.epochs, mean, held))


def training_step(method: Method, progress: TaskTraining, batch: Batch, share: float) -> Tensor:
    """One step of the optimizer along a batch, `share` of the epoch being over; gives the batch's mean loss.

    Several processes each have a part of the batch. They step along the sum of their gradients, and get the sum of
    their losses.
    """
    network, options = method.network, method.options
    images = batch.images
    if options.augments:
        drawn = torch.rand(4, batch.count, generator=progress.generator)
        images = moved(images, options.rotation, options.zoom, options.shift, drawn[:, batch.span])
    method.before_batch(share)
    with torch.autocast(network.device.type, torch.bfloat16, enabled=options.precision == "bfloat16"):
        logits = network(images, batch)  # every layer computes with W * m, the mask being that of its scores
    loss = batch.mean_loss(logits.float())
    penalty = method.penalty()
    if penalty is not None:
        loss = loss + penalty / batch.group.size
    progress.forget_gradients()
    loss.backward()  # type: ignore[no-untyped-call]
    for work in network.work.values():
        work.spread_gradient()  # to free weights (Eq. nws1) and, straight through the mask, to scores (Eq. nws2)
    total = loss.detach().clone()
    batch.group.add_up([total, *progress.gradients()])
    method.add_gradients(replace(batch, images=images))
    if options.weight_decay:
        for work in network.work.values():
            work.decay(options.weight_decay)
    progress.follow_gradients()
    method.after_step()
    return total


def _share(progress: TaskTraining, batches: int) -> float:
    """The progress of an epoch, 0 at its first batch and 1 at its last; with one batch an epoch, that of the task."""
    done, last = (progress.step, batches - 1) if batches > 1 else (progress.epoch, progress.options.epochs - 1)
    return done / last if last else 1.0


@torch.no_grad()
def accuracy(network: MaskedNetwork, items: Items, name: str | None = None) -> float:
    """The share of items, in percent, that a finished task (None: the one being learned) gets right."""
    batches = items.read(items.batches(EVALUATION_BATCH), network.device)
    with network.viewing(name):
        return percent_right((network.answer(network.embed(images)), labels) for images, labels in batches)


@torch.no_grad()
def predict(network: MaskedNetwork, name: str, images: Images) -> Tensor:
    """Logits of a finished task for any number of images, on the CPU."""
    with network.viewing(name):
        return network.answer(network.embed(images)).cpu()


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
