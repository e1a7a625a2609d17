"""A warm start is tried against a cold one, on validation items; what learned more goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from factories import make_tasks, small, stop_at, varied
from test_session import CPU, interrupt, learn

from etcl_deploy.config import Learning, Similarity, Transfer
from etcl_deploy.core.task import Task
from etcl_deploy.learn.events import Compared, EpochDone, Event, ProbeStepDone, StepDone
from etcl_deploy.learn.similarity import Comparison
from etcl_deploy.learn.trainer import accuracy, learn_sequence, predict
from etcl_deploy.runs.session import resume

OPTIONS = Learning(epochs=20, batch_size=16, validation_share=0.3, similarity=Similarity(similar="all"))


def heard(tasks: list[Task], options: Learning) -> list[Event]:
    """What was reported of the last of the tasks."""
    events: list[Event] = []
    learn_sequence(small("fcn3", width=20), tasks, options, events.append)
    last = tasks[-1].name
    return [event for event in events if getattr(event, "task", None) == last]


def started(events: list[Event]) -> Comparison:
    """The only comparison of a task."""
    ((comparison,),) = [event.comparisons for event in events if isinstance(event, Compared)]
    return comparison


def test_both_starts_are_tried_for_as_long_and_one_goes_on() -> None:
    """Two epochs from nothing, two as the earlier task; then the other eighteen of the better one."""
    events = heard(make_tasks(2, items=60), OPTIONS)
    probed = [(event.start, event.epoch) for event in events if isinstance(event, ProbeStepDone)]
    steps = len(probed) // 4
    assert probed == [(start, epoch) for start in (None, "t0") for epoch in (1, 2) for _ in range(steps)]
    assert sum(isinstance(event, StepDone) for event in events) == 18 * steps
    assert [event.epoch for event in events if isinstance(event, EpochDone)] == list(range(1, 21))
    assert "a start from it has" in started(events).reason


@pytest.mark.parametrize("worth", [True, False])
def test_the_start_that_learns_more_is_taken(worth: bool) -> None:
    """After a task of the same kind it starts warm; after one whose every label is another, cold, though "similar"."""
    first, second = make_tasks(2, items=120)
    shifted = replace(second, train_y=(second.train_y + 1) % 3, test_y=(second.test_y + 1) % 3)
    options = replace(OPTIONS, learning_rate=0.001, transfer=Transfer(pull=0.0, backward="off", advice=0.0))
    comparison = started(heard([first, second if worth else shifted], options))
    assert comparison.similar
    assert comparison.started == worth, comparison.reason


def test_a_probe_leaves_nothing_behind() -> None:
    """With the cold start taken, every bit is that of a run which never tried another."""
    first, second = make_tasks(2, items=120)
    shifted = replace(second, train_y=(second.train_y + 1) % 3, test_y=(second.test_y + 1) % 3)
    alone = replace(OPTIONS, learning_rate=0.001, transfer=Transfer(pull=0.0, backward="off", advice=0.0))
    images = first.test_x
    answers = []
    for options in (alone, varied(alone, alignment="off")):
        run = learn_sequence(small("fcn3", width=20), [first, shifted], options)
        answers.append([predict(run.network, name, images) for name in run.tasks])
        assert accuracy(run.network, first.test, "t0") == run.matrix[0][0]
    assert all(torch.equal(one, other) for one, other in zip(*answers, strict=True))


@pytest.mark.parametrize("options", [replace(OPTIONS, epochs=9), varied(OPTIONS, probe_epochs=0)])
def test_where_there_is_no_time_nothing_is_tried(options: Learning) -> None:
    """A probe takes a tenth of the epochs at most; without one a similar task is started from."""
    events = heard(make_tasks(2), options)
    assert not any(isinstance(event, ProbeStepDone) for event in events)
    assert started(events).started


@pytest.mark.parametrize("kind", [ProbeStepDone, StepDone])
def test_left_in_a_probe_or_after_it_a_run_ends_with_the_same_bytes(photos: Path, tmp_path: Path, kind: type) -> None:
    """A probe that was cut off is done again; one that is over is remembered."""
    values = {"epochs": 10, "validation_share": 0.3}
    whole = learn(photos, tmp_path / "whole", **values)
    run = interrupt(photos, tmp_path / "run", stop_at(kind, "b"), **values)
    assert resume(run, session=CPU).digest == whole.digest


def test_a_start_that_runs_away_is_the_worse_one() -> None:
    """Its loss is no number any more: the task goes on from the other start."""
    first, second = make_tasks(2, items=60)
    network = small("fcn3", width=20)
    run = learn_sequence(network, [first], OPTIONS)
    start = network.finished["t0"]
    network.change_head("t0", {key: torch.full_like(value, 1e38) for key, value in start.head.items()})
    events: list[Event] = []
    options = varied(OPTIONS, pull=0.0, backward="off", advice=0.0)
    learn_sequence(network, [second], options, events.append, before=run)
    assert not started(events).started
    assert "has 0.0 %" in started(events).reason
