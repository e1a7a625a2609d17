"""A task that is interrupted at any step and taken up again ends with the same bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from factories import context_of, make_tasks, same_tensors, small, varied, with_dropout
from torch import Tensor

from etcl_deploy.config import Learning, Similarity
from etcl_deploy.core.task import Task
from etcl_deploy.errors import LearningError
from etcl_deploy.learn.events import EpochDone, Event, StepDone
from etcl_deploy.learn.methods import METHODS
from etcl_deploy.learn.methods.etcl import Etcl
from etcl_deploy.learn.run import Run
from etcl_deploy.learn.task_training import Checkpoint
from etcl_deploy.learn.trainer import learn_sequence
from etcl_deploy.network.masked_network import MaskedNetwork

BASE = Learning(epochs=4, batch_size=8, learning_rate=0.01, similarity=Similarity(similar="all"))
OPTIONS = {
    "adam": BASE,
    "sgd": replace(BASE, optimizer="sgd", weight_decay=0.01, momentum=0.9),
    "augmented": replace(BASE, rotation=20.0, zoom=0.2, shift=0.1),
    "best": replace(BASE, keep="best", validation_share=0.3, patience=2),
    "once": varied(BASE, alignment="once"),
    "once with sgd": varied(replace(BASE, optimizer="sgd"), alignment="once"),
    "every step": varied(BASE, alignment="every_step"),
    "probed": replace(BASE, epochs=10, validation_share=0.3),
    "bfloat16": replace(BASE, precision="bfloat16"),
}


def everything(network: MaskedNetwork) -> list[bytes]:
    """All that was learned, as bytes."""
    tensors = [t for layer in network.masked_layers.values() for t in (layer.weight, layer.scores, layer.claimed)]
    for state in network.finished.values():
        tensors += [*state.masks.values(), *state.head.values()]
        tensors += [t for norm in state.norms.values() for t in (norm.gamma, norm.beta, norm.mean, norm.var)]
    return [t.detach().numpy().tobytes() for t in tensors]


def resumed(tasks: list[Task], options: Learning, step: int) -> Run:
    """The run after its second task was interrupted at some step and taken up again by another network."""
    checkpoints: list[Checkpoint] = []

    def stop(event: Event) -> None:
        if isinstance(event, StepDone):
            checkpoints.append(event.checkpoint())
            if len(checkpoints) == step:
                raise KeyboardInterrupt

    first = learn_sequence(with_dropout(), tasks[:1], options)
    with pytest.raises(KeyboardInterrupt):
        learn_sequence(first.network, tasks[1:], options, stop, before=first, earlier=tasks[:1])
    again = learn_sequence(with_dropout(), tasks[:1], options)
    last = {"before": again, "earlier": tasks[:1], "checkpoint": checkpoints[-1]}
    return learn_sequence(again.network, tasks[1:], options, **last)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(OPTIONS))
@pytest.mark.parametrize("step", [1, 3, 5, 8])
def test_taken_up_at_any_step_it_ends_the_same(name: str, step: int) -> None:
    """In the middle of an epoch, at its end, in the last one: what was learned, and what the method remembers."""
    options, tasks = OPTIONS[name], make_tasks(2)
    whole, again = learn_sequence(with_dropout(), tasks, options), resumed(tasks, options, step)
    assert everything(again.network) == everything(whole.network)
    assert again.matrix == whole.matrix


@pytest.mark.parametrize("method", METHODS)
def test_every_method_taken_up_again_ends_the_same(method: str) -> None:
    """What a method remembers of this task and of earlier ones survives the interruption, too."""
    options, tasks = replace(BASE, method=method), make_tasks(2)  # type: ignore[arg-type]
    whole, again = learn_sequence(with_dropout(), tasks, options), resumed(tasks, options, 5)
    assert everything(again.network) == everything(whole.network)
    assert same_tensors(again.memory, whole.memory)


def test_left_on_another_device_it_says_so() -> None:
    """Random numbers and sums differ between kinds of devices, so the end would be another."""
    network, (task,) = with_dropout(), make_tasks(1)
    progress = Etcl(network, BASE).begin(context_of(task))
    with pytest.raises(LearningError, match="was left while it was learned on cuda; go on with --device cuda"):
        progress.restore(replace(progress.checkpoint(), device="cuda"))


def test_time_spent_before_an_interruption_counts() -> None:
    """The seconds of a run include those before it was left."""
    network, (task,) = with_dropout(), make_tasks(1)
    left = Etcl(network, BASE).begin(context_of(task)).checkpoint()
    assert (left.numbers["seconds"] or 0) > 0
    later = replace(left, numbers={**left.numbers, "seconds": 1000.0})
    run = learn_sequence(with_dropout(), [task], BASE, checkpoint=later)
    assert run.seconds > 1000


def epochs_of(options: Learning) -> list[EpochDone]:
    """The epochs a task takes."""
    events: list[Event] = []
    learn_sequence(small("resnet18"), make_tasks(1, items=60), options, events.append)
    return [event for event in events if isinstance(event, EpochDone)]


def test_early_stopping_ends_a_task_that_no_longer_improves() -> None:
    """After `patience` epochs without a better validation accuracy; without patience all epochs are done."""
    options = Learning(epochs=40, batch_size=16, validation_share=0.3, learning_rate=0.01)
    stopped = epochs_of(replace(options, patience=3))
    assert len(stopped) < 40
    best = max(range(len(stopped)), key=lambda i: (stopped[i].validation or 0, -i))
    assert len(stopped) - 1 - best == 3
    assert len(epochs_of(replace(options, epochs=6))) == 6


def test_the_best_state_is_kept_if_asked_for() -> None:
    """With `keep = best` what is fixed is the state of the epoch with the best validation accuracy."""
    options = Learning(epochs=12, batch_size=16, validation_share=0.3, learning_rate=0.05, schedule="constant")
    final = {}
    for keep in ("last", "best"):
        network = small("resnet18")
        scores = network.masked_layers["stem_conv"].scores.detach()
        states: list[tuple[float, bytes]] = []  # after every epoch: validation accuracy and scores

        def remember(event: Event, scores: Tensor = scores, states: list[tuple[float, bytes]] = states) -> None:
            if isinstance(event, EpochDone):
                states.append((event.validation or 0.0, scores.numpy().tobytes()))

        learn_sequence(network, make_tasks(1, items=60), replace(options, keep=keep), remember)  # type: ignore[arg-type]
        final[keep] = scores.numpy().tobytes()
        best = max(states, key=lambda state: state[0])  # the first of equal ones
        assert final[keep] == (states[-1] if keep == "last" else best)[1]
    assert final["last"] != final["best"]
