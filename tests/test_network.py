from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from factories import make_tasks, same_tensors, small, stop_at, weights_of
from torch import Tensor
from torch.nn import functional as F

from etcl_deploy.config import Learning, Similarity, Transfer
from etcl_deploy.core.plan import Step
from etcl_deploy.core.task import Task
from etcl_deploy.errors import LearningError, UnknownTaskError
from etcl_deploy.learn.events import EpochDone, Event, StepDone, TaskDone
from etcl_deploy.learn.trainer import learn_sequence, predict
from etcl_deploy.network.layers import MaskedLayer
from etcl_deploy.network.masked_network import MaskedNetwork
from etcl_deploy.network.masks import density, keep_top

PLAIN = Learning(epochs=2, batch_size=16, weight_decay=0.1, validation_share=0, transfer=Transfer(backward="off"))
OPTIMIZERS = [
    replace(PLAIN, optimizer="sgd", momentum=0.9, learning_rate=0.05),
    replace(PLAIN, optimizer="adam", learning_rate=0.01),
    replace(PLAIN, optimizer="adam", learning_rate=0.01, scores="fresh"),
    *(
        replace(
            PLAIN,
            optimizer=optimizer,
            learning_rate=0.01,
            similarity=Similarity(similar="all"),
            transfer=Transfer(alignment=alignment, backward="off", warm_rate=1.0),  # so that a warm mask changes too
        )
        for optimizer in ("adam", "sgd")
        for alignment in ("once", "every_step", "warm_start")
    ),
]


ADAM = OPTIMIZERS[1]


@pytest.fixture(scope="module")
def three() -> tuple[MaskedNetwork, list[Task]]:
    """A network that has learned three tasks, for tests that change nothing of it."""
    network, tasks = small("resnet18"), make_tasks(3)
    learn_sequence(network, tasks, ADAM)
    return network, tasks


@pytest.mark.parametrize("options", OPTIMIZERS, ids=lambda o: f"{o.optimizer}-{o.scores}-{o.transfer.alignment}")
@pytest.mark.parametrize("backbone", ["fcn3", "resnet18"])
def test_claimed_weights_and_old_answers_keep_their_bits(backbone: str, options: Learning) -> None:
    """At every step, and after every task, each weight an earlier task claimed has the very same bytes.

    After every task so have the logits of all tasks before it.
    """
    network, tasks = small(backbone), make_tasks(5)
    claimed: list[dict[str, tuple[Tensor, Tensor]]] = []  # after each task: what is claimed, and those weights
    logits: dict[str, Tensor] = {}

    def check(event: Event) -> None:
        layers = network.masked_layers
        if isinstance(event, StepDone | TaskDone):  # at a step: before anything is put back
            for step, (mask, values) in ((s, kept) for before in claimed for s, kept in before.items()):
                assert torch.equal(layers[step].weight.detach()[mask], values)
        if isinstance(event, TaskDone):
            claimed.append({n: (m.claimed.clone(), m.weight.detach()[m.claimed]) for n, m in layers.items()})
            assert all(torch.equal(predict(network, name, tasks[0].test_x), value) for name, value in logits.items())
            logits[event.task] = predict(network, event.task, tasks[0].test_x)

    learn_sequence(network, tasks, options, check)
    assert len(logits) == 5
    assert network.claimed() > density(mask for mask, _ in claimed[0].values()), "later tasks claimed weights, too"


def test_unclaimed_weights_do_move() -> None:
    """The test above would pass on a network that learns nothing."""
    network = small("resnet18")
    before = weights_of(network)
    learn_sequence(network, make_tasks(2), ADAM)
    assert all(not torch.equal(before[step], layer.weight) for step, layer in network.masked_layers.items())


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_masks_have_exactly_their_density(share: float) -> None:
    """The mask of every layer and task selects `round(density * n)` weights."""
    network = small("resnet18", density=share)
    learn_sequence(network, make_tasks(2), ADAM)
    for state in network.finished.values():
        for mask in state.masks.values():
            assert int(mask.sum()) == round(share * mask.numel())


def test_gradients_follow_the_equations() -> None:
    """Scores get dL/dm straight through; weights only where selected and unclaimed."""
    layer = MaskedLayer(Step("fc", "linear", ("image",), {"in": 4, "out": 3}), torch.Generator().manual_seed(0))
    layer.claimed = torch.rand(3, 4, generator=torch.Generator().manual_seed(3)) < 0.4
    layer.begin(0.5)
    assert layer.work is not None
    x = torch.randn(5, 4)
    layer(x).square().sum().backward()
    layer.work.spread_gradient()
    mask = keep_top(layer.scores, 0.5)
    effective = torch.where(mask, layer.weight.detach(), 0).requires_grad_()
    F.linear(x, effective).square().sum().backward()
    assert effective.grad is not None and layer.weight.grad is not None and layer.scores.grad is not None
    torch.testing.assert_close(layer.weight.grad, effective.grad * mask * ~layer.claimed)
    torch.testing.assert_close(layer.scores.grad, effective.grad * layer.weight.detach())


def test_a_set_mask_hides_even_what_is_not_a_number() -> None:
    """An infinite weight outside the mask does not reach the answer: selecting, not multiplying by zero."""
    layer = MaskedLayer(Step("fc", "linear", ("image",), {"in": 2, "out": 1}), torch.Generator())
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[2.0, float("inf")]]))
    layer.mask = torch.tensor([[True, False]])
    assert layer(torch.tensor([[3.0, 1.0]])).item() == 6.0


def test_normalization_is_that_of_the_training_data() -> None:
    """With all items in one batch, answers with the frozen statistics equal answers with the batch's own."""
    network, (task,) = small("resnet18"), make_tasks(1)
    learn_sequence(network, [task], ADAM)
    frozen = network.eval()(task.train_x)
    torch.testing.assert_close(frozen, network.train()(task.train_x), rtol=1e-3, atol=1e-3)


def test_normalization_does_not_depend_on_the_order_of_items() -> None:
    """Items that come class by class, more of each than fit a batch, give the statistics of the whole."""
    network, (task,) = small("resnet18"), make_tasks(1, items=960)
    order = task.train_y.argsort(stable=True)
    ordered = replace(task, train_x=task.train_x[order], train_y=task.train_y[order])
    learn_sequence(network, [ordered], Learning(epochs=1, batch_size=64))
    network.estimate_norms([ordered.train_x])
    for step, norm in network.norm_layers.items():
        kept, spread = network.finished[task.name].norms[step], norm.var.sqrt()
        assert ((kept.mean - norm.mean).abs() <= 0.35 * spread + 0.05).all(), step
        assert ((kept.var.sqrt() - spread).abs() <= 0.35 * spread + 0.05).all(), step


def test_a_task_that_is_not_finished_leaves_no_trace() -> None:
    """Interrupted in the middle, with weight decay pulling at everything: the finished task answers as before."""
    network, tasks = small("fcn3"), make_tasks(3)
    learn_sequence(network, tasks[:1], OPTIMIZERS[0])
    before = predict(network, "t0", tasks[0].test_x)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            learn_sequence(network, tasks[1:2], OPTIMIZERS[0], stop_at(EpochDone))
        assert torch.equal(predict(network, "t0", tasks[0].test_x), before)
    learn_sequence(network, tasks[2:], OPTIMIZERS[0])
    assert torch.equal(predict(network, "t0", tasks[0].test_x), before)


def test_an_interruption_while_finishing_claims_nothing() -> None:
    """The mask is chosen, the statistics are not there yet: the task does not exist, and can be learned again."""
    network, tasks = small("resnet18"), make_tasks(2)
    learn_sequence(network, tasks[:1], ADAM)
    claimed, before = network.claimed(), predict(network, "t0", tasks[0].test_x)

    def batches() -> Iterator[Tensor]:
        yield tasks[1].train_x
        raise KeyboardInterrupt

    network.begin("t1", tasks[1].classes, torch.Generator())
    with pytest.raises(KeyboardInterrupt):
        network.finish(batches())
    assert network.claimed() == claimed
    assert torch.equal(predict(network, "t0", tasks[0].test_x), before)
    assert not any(norm._forward_pre_hooks for norm in network.norm_layers.values())
    learn_sequence(network, tasks[1:], ADAM)
    assert list(network.finished) == ["t0", "t1"]


def test_an_answer_does_not_depend_on_its_batch(three: tuple[MaskedNetwork, list[Task]]) -> None:
    """The same item alone and among others: the same logits."""
    network, (task, *_) = three
    together = predict(network, "t0", task.test_x)
    alone = torch.cat([predict(network, "t0", image.unsqueeze(0)) for image in task.test_x])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_selecting_binds_mask_norm_and_head_together(three: tuple[MaskedNetwork, list[Task]]) -> None:
    """Another task has other answers; going to it and back gives the same bytes."""
    network, (task, *_) = three
    answers = {name: predict(network, name, task.test_x) for name in network.finished}
    assert not torch.equal(answers["t0"], answers["t1"])
    for name, answer in answers.items():
        network.select(name)
        assert torch.equal(network(task.test_x), answer)


def test_a_look_at_a_finished_task_leaves_the_one_being_learned(three: tuple[MaskedNetwork, list[Task]]) -> None:
    """Masks, normalization, head and mode are back afterwards."""
    network, (task, *_) = three
    expected = predict(network, "t0", task.test_x)
    network.begin("new", ("a", "b"), torch.Generator().manual_seed(0))
    network.train()
    before = network.embed(task.test_x)
    assert torch.equal(predict(network, "t0", task.test_x), expected)
    assert network.training and len(network.head["weight"]) == 2
    assert torch.equal(network.embed(task.test_x), before)
    network.select("t0")


def test_same_seed_same_bytes() -> None:
    """Two runs with one seed are equal; another seed differs."""

    def learned(seed: int) -> dict[str, Tensor]:
        network = small("resnet18", seed=seed)
        learn_sequence(network, make_tasks(2), Learning(epochs=1, batch_size=16, seed=seed))
        return weights_of(network)

    assert same_tensors(learned(1), learned(1))
    assert not same_tensors(learned(1), learned(2))


def test_unknown_task_names_the_known_ones(three: tuple[MaskedNetwork, list[Task]]) -> None:
    """Selecting a task nobody learned says which there are."""
    with pytest.raises(UnknownTaskError, match="unknown task 'dogs'; this run holds: t0, t1, t2"):
        three[0].select("dogs")


@pytest.mark.parametrize(("epochs", "batch_size", "rate"), [(6, 16, 1e30), (1, 64, 1e38)])
def test_a_loss_that_is_not_finite_ends_training_with_a_reason(epochs: int, batch_size: int, rate: float) -> None:
    """A learning rate far too high is reported, not trained through; also when only the last step breaks it."""
    network = small("fcn3")
    options = Learning(epochs=epochs, batch_size=batch_size, optimizer="sgd", learning_rate=rate)
    with pytest.raises(LearningError, match="a learning_rate below"):
        learn_sequence(network, make_tasks(1), options)
    assert not network.finished and network.claimed() == 0


def test_a_warm_task_that_diverges_is_told_the_setting_to_lower() -> None:
    """It learns at a share of the rate; the hint names the rate a person can set."""
    options = replace(PLAIN, optimizer="sgd", similarity=Similarity(similar="all"))
    run = learn_sequence(small("fcn3"), make_tasks(1), options)
    with pytest.raises(LearningError, match=r"'t1' .* a learning_rate below 1e\+30"):
        learn_sequence(run.network, make_tasks(2)[1:], replace(options, learning_rate=1e30), before=run)
