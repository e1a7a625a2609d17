"""Settings and tasks that make no sense: a clear error before anything is learned, or a clear warning."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from factories import make_tasks, small

from etcl_deploy.config import Learning, Similarity, Transfer
from etcl_deploy.errors import ConfigError, DataError, NetworkError
from etcl_deploy.learn.events import Event, Warned
from etcl_deploy.learn.trainer import learn_sequence


@pytest.mark.parametrize(
    ("section", "values", "reason"),
    [
        (Learning, {"epochs": 0}, "epochs must be at least 1, not 0"),
        (Learning, {"epochs": 2.5}, "epochs must be int, not 2.5"),
        (Learning, {"keep": "first"}, "keep must be one of last, best, not 'first'"),
        (Learning, {"validation_share": 0, "patience": 3}, "validation_share must be above 0"),
        (Learning, {"validation_share": 0, "keep": "best"}, "validation_share must be above 0"),
        (Similarity, {"margin": 2}, "margin must be 0 to 1"),
        (Transfer, {"alignment": "sometimes"}, "alignment must be one of"),
    ],
)
def test_settings_made_in_python_are_checked(section: type, values: dict[str, object], reason: str) -> None:
    """As those from a file are; settings that could do nothing are not taken in silence."""
    with pytest.raises(ConfigError, match=reason):
        section(**values)


@pytest.mark.parametrize("density", [0.0, -0.5, 1.5])
def test_a_density_out_of_range_is_refused(density: float) -> None:
    """Nothing, or more than everything, cannot be selected."""
    with pytest.raises(ConfigError, match="density must be above 0, at most 1"):
        small("fcn3", density=density)


def test_a_layer_that_would_have_no_weight_is_refused() -> None:
    """By its name, before anything is learned."""
    with pytest.raises(NetworkError, match=r"density 0\.005 leaves layer 'stem_conv' no weight"):
        small("resnet18", density=0.005)


def test_tasks_that_cannot_be_learned_are_refused_before_any_is() -> None:
    """Labels without a class, images of another size, no items, one class, a name that is there twice."""
    first, second = make_tasks(2)
    many = torch.full_like(second.train_y, 7)
    cases = [
        (replace(second, train_y=many), "task 't1' has the training label 7, but only 3 classes"),
        (replace(second, test_y=second.test_y - 1), "has the test label -1"),
        (replace(second, train_x=second.train_x[:, :8]), r"training images are torch.uint8 \[8, 16, 1\]"),
        (replace(second, train_x=second.train_x.float()), "training images are torch.float32"),
        (replace(second, test_x=second.test_x[:0], test_y=second.test_y[:0]), "has 0 test images and 0 labels"),
        (replace(second, train_x=second.train_x[:1], train_y=second.train_y[:1]), "has 1 training items; two"),
        (replace(second, classes=("a",)), "at least two different classes"),
        (replace(second, name="t0"), "task 't0' is there twice"),
    ]
    for wrong, reason in cases:
        network = small("fcn3")
        with pytest.raises(DataError, match=reason):
            learn_sequence(network, [first, wrong], Learning(epochs=1))
        assert not network.finished


def warnings_of(network_values: dict[str, object], tasks: int, options: Learning) -> list[str]:
    heard: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, Warned):
            heard.append(f"{event.task}: {event.message}")

    learn_sequence(small("fcn3", **network_values), make_tasks(tasks), options, listen)
    return heard


def test_few_items_and_no_free_weights_are_said() -> None:
    """Both are learned all the same, and the user hears why the result may be poor."""
    few = warnings_of({}, 1, Learning(epochs=1, batch_size=64))
    assert few == ["t0: only 30 items to learn from, fewer than a batch of 64"]
    full = warnings_of({"density": 1.0}, 4, Learning(epochs=1, batch_size=16))
    assert len(full) == 1, "said once, not with every further task"
    assert full[0].startswith("t1: every weight is claimed")
    assert "a lower --density, a wider network (--set width=N) or --set scores=fresh" in full[0]
    nearly = warnings_of({"density": 0.97}, 2, Learning(epochs=1, batch_size=16))
    assert nearly[0].startswith("t1: nearly every weight is claimed")
    assert not warnings_of({}, 2, Learning(epochs=1, batch_size=16))
    unchecked = warnings_of({}, 1, Learning(epochs=1, batch_size=16, validation_share=0))
    blind = warnings_of({}, 1, Learning(epochs=1, batch_size=16, validation_share=0.01, keep="best"))
    assert blind[0] == "t0: no items are held back for validation: patience and keep = best have nothing to go by"
    assert unchecked == ["t0: no items are held back for validation to check old heads by: none is improved"]
