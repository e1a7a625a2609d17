"""A task that is interrupted at any step and taken up again ends with the same bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_network import make_tasks, small
from torch import Tensor, nn

from etcl_deploy import mask_network
from etcl_deploy.config import Learning, Similarity
from etcl_deploy.core.task import Task
from etcl_deploy.errors import LearningError
from etcl_deploy.learn.events import EpochDone, Event, StepDone
from etcl_deploy.learn.methods import TaskContext
from etcl_deploy.learn.methods.etcl import Etcl
from etcl_deploy.learn.task_training import Checkpoint
from etcl_deploy.learn.trainer import learn_sequence
from etcl_deploy.network.masked_network import MaskedNetwork

BASE = Learning(epochs=4, batch_size=8, learning_rate=0.01, similarity=Similarity(similar="all"))
OPTIONS = {
    "adam": BASE,
    "sgd": replace(BASE, optimizer="sgd", weight_decay=0.01, momentum=0.9),
    "augmented": replace(BASE, rotation=20.0, zoom=0.2, shift=0.1),
    "best": replace(BASE, keep="best", validation_share=0.3, patience=2),
    "once": replace(BASE, transfer=replace(BASE.transfer, alignment="once")),
    "once with sgd": replace(BASE, optimizer="sgd", transfer=replace(BASE.transfer, alignment="once")),
    "every step": replace(BASE, transfer=replace(BASE.transfer, alignment="every_step")),
    "bfloat16": replace(BASE, precision="bfloat16"),
}


def with_dropout() -> MaskedNetwork:
    """A small network of the user's with every kind of randomness in it."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.LazyLinear(12)
    )
    module(torch.zeros(2, 1, 16, 16))
    return mask_network(nn.Sequential(module, nn.Linear(12, 3)), (1, 16, 16), density=0.4)


def everything(network: MaskedNetwork) -> list[bytes]:
    """All that was learned, as bytes."""
    tensors = [t for layer in network.masked_layers.values() for t in (layer.weight, layer.scores, layer.claimed)]
    for state in network.finished.values():
        tensors += [*state.masks.values(), *state.head.values()]
        tensors += [t for norm in state.norms.values() for t in (norm.gamma, norm.beta, norm.mean, norm.var)]
    return [t.detach().numpy().tobytes() for t in tensors]


class StopError(Exception):
    """What interrupts a run in these tests."""


@pytest.mark.parametrize("name", sorted(OPTIONS))
@pytest.mark.parametrize("step", [1, 3, 5, 8])
def test_taken_up_at_any_step_it_ends_the_same(name: str, step: int) -> None:
    """In the middle of an epoch, at its end, in the last one: weights, scores, masks, norms and heads of both tasks."""
    options, tasks = OPTIONS[name], make_tasks(2)
    whole = with_dropout()
    learn_sequence(whole, tasks, options)
    assert everything(resumed(tasks, options, step)) == everything(whole)


def resumed(tasks: list[Task], options: Learning, stop_at: int) -> MaskedNetwork:
    """The network after the second task was interrupted and taken up again by another network."""
    taken: list[Checkpoint] = []
    first = with_dropout()
    before = learn_sequence(first, tasks[:1], options)

    def stop(event: Event) -> None:
        if isinstance(event, StepDone):
            count.append(event)
            if len(count) == stop_at:
                taken.append(event.checkpoint())
                raise StopError

    count: list[Event] = []
    with pytest.raises(StopError):
        learn_sequence(first, tasks[1:], options, stop, before=before, earlier=tasks[:1])
    second = with_dropout()
    again = learn_sequence(second, tasks[:1], options)
    learn_sequence(second, tasks[1:], options, before=again, earlier=tasks[:1], checkpoint=taken[0])
    return second


def context_of(task: Task) -> TaskContext:
    return TaskContext(task, task.training, task.training, {}, torch.Generator(), lambda event: None)


def test_left_on_another_device_it_says_so() -> None:
    """Random numbers and sums differ between kinds of devices: going on would give something nobody asked for."""
    network, (task,) = with_dropout(), make_tasks(1)
    progress = Etcl(network, BASE).begin(context_of(task))
    with pytest.raises(LearningError, match="was left while it was learned on cuda; go on with --device cuda"):
        progress.restore(replace(progress.checkpoint(), device="cuda"))


def test_time_spent_before_an_interruption_counts() -> None:
    """What a run says it took includes what it took before it was left."""
    network, (task,) = with_dropout(), make_tasks(1)
    left = Etcl(network, BASE).begin(context_of(task)).checkpoint()
    assert (left.numbers["seconds"] or 0) > 0
    later = replace(left, numbers={**left.numbers, "seconds": 1000.0})
    run = learn_sequence(with_dropout(), [task], BASE, checkpoint=later)
    assert run.seconds > 1000


def epochs_done(options: Learning) -> list[EpochDone]:
    seen: list[EpochDone] = []

    def remember(event: Event) -> None:
        if isinstance(event, EpochDone):
            seen.append(event)

    network = small("resnet18")
    learn_sequence(network, make_tasks(1, items=60), options, remember)
    return seen


def test_early_stopping_ends_a_task_that_no_longer_improves() -> None:
    """After `patience` epochs without a better validation accuracy; without patience all epochs are done."""
    options = Learning(epochs=40, batch_size=16, validation_share=0.3, learning_rate=0.01)
    stopped = epochs_done(replace(options, patience=3))
    assert len(stopped) < 40
    best = max(range(len(stopped)), key=lambda i: (stopped[i].validation or 0, -i))
    assert len(stopped) - 1 - best == 3
    assert len(epochs_done(replace(options, epochs=6))) == 6


def test_the_best_state_is_kept_if_asked_for() -> None:
    """With `keep = best` what is fixed is the state of the epoch with the best validation accuracy."""
    options = Learning(epochs=12, batch_size=16, validation_share=0.3, learning_rate=0.05, schedule="constant")
    tasks = make_tasks(1, items=60)
    found = {}
    for keep in ("last", "best"):
        network = small("resnet18")
        scores, states = network.masked_layers["stem_conv"].scores, []

        def remember(event: Event, scores: Tensor = scores, states: list[tuple[float, bytes]] = states) -> None:
            if isinstance(event, EpochDone):
                states.append((event.validation or 0.0, scores.detach().numpy().tobytes()))

        learn_sequence(network, tasks, replace(options, keep=keep), remember)  # type: ignore[arg-type]
        found[keep] = scores.detach().numpy().tobytes()
        best = max(states, key=lambda state: state[0])  # the first of equal ones
        assert found[keep] == (states[-1] if keep == "last" else best)[1]
    assert found["last"] != found["best"]
