from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from etcl_deploy.config import Config, Learning, Similarity, Transfer
from etcl_deploy.core.plan import Step
from etcl_deploy.core.task import Task
from etcl_deploy.errors import LearningError, UnknownTaskError
from etcl_deploy.learn.events import EpochDone, Event, StepDone, TaskDone
from etcl_deploy.learn.trainer import learn_sequence, predict
from etcl_deploy.network.layers import MaskedLayer
from etcl_deploy.network.masked_network import MaskedNetwork
from etcl_deploy.network.masks import density, keep_top
from etcl_deploy.runs.build import build_network


def make_tasks(count: int, items: int = 33, size: int = 16) -> list[Task]:
    """Random images with labels a network can tell apart by brightness; an odd number, so batches are uneven."""
    generator = torch.Generator().manual_seed(1)
    tasks = []
    for number in range(count):
        labels = torch.arange(items) % 3
        noise = torch.randint(0, 90, (items, size, size, 1), generator=generator)
        images = (noise + 60 * labels.view(-1, 1, 1, 1)).to(torch.uint8)
        tasks.append(Task(f"t{number}", ("a", "b", "c"), images, labels, images[:9], labels[:9]))
    return tasks


def small(backbone: str, **values: object) -> MaskedNetwork:
    settings = {"backbone": backbone, "size": 16, "channels": 1, "width": 6, "density": 0.3, **values}
    return build_network(Config().with_values(settings))


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


@pytest.mark.parametrize("options", OPTIMIZERS, ids=lambda o: f"{o.optimizer}-{o.scores}-{o.transfer.alignment}")
@pytest.mark.parametrize("backbone", ["fcn3", "resnet18"])
def test_claimed_weights_and_old_answers_keep_their_bits(backbone: str, options: Learning) -> None:
    """After five tasks, and at every step of the way, every weight an earlier task claimed has the very same bytes.

    And after every task so have task 1's logits.
    """
    network, tasks = small(backbone), make_tasks(5)
    claimed: list[dict[str, tuple[Tensor, bytes]]] = []
    logits: list[bytes] = []

    def remember(event: Event) -> None:
        layers = network.masked_layers
        if isinstance(event, StepDone):  # before anything is put back
            for checkpoint in claimed:
                assert all(owned(layers[name], mask) == data for name, (mask, data) in checkpoint.items())
        if not isinstance(event, TaskDone):
            return
        claimed.append({n: (layer.claimed.clone(), owned(layer, layer.claimed)) for n, layer in layers.items()})
        logits.append(predict(network, "t0", tasks[0].test_x).numpy().tobytes())

    def owned(layer: MaskedLayer, mask: Tensor) -> bytes:
        return layer.weight.detach()[mask].numpy().tobytes()

    learn_sequence(network, tasks, options, remember)
    for checkpoint in claimed:
        for name, (mask, data) in checkpoint.items():
            assert owned(network.masked_layers[name], mask) == data
    assert len(logits) == 5
    assert set(logits) == {logits[0]}
    first = density(mask for mask, _ in claimed[0].values())
    assert network.claimed() > first, "later tasks claimed weights of their own"


def test_unclaimed_weights_do_move() -> None:
    """The test above would pass on a network that learns nothing: this one would not."""
    network = small("resnet18")
    before = {name: layer.weight.detach().clone() for name, layer in network.masked_layers.items()}
    learn_sequence(network, make_tasks(2), OPTIMIZERS[1])
    assert all(not torch.equal(before[name], layer.weight) for name, layer in network.masked_layers.items())


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_masks_have_exactly_their_density(share: float) -> None:
    """Every layer's mask of every task selects round(density * n) weights."""
    network = small("resnet18", density=share)
    learn_sequence(network, make_tasks(2), OPTIMIZERS[1])
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
    network, tasks = small("resnet18"), make_tasks(1)
    learn_sequence(network, tasks, OPTIMIZERS[1])
    network.eval()
    frozen = network(tasks[0].train_x)
    network.train()
    torch.testing.assert_close(frozen, network(tasks[0].train_x), rtol=1e-3, atol=1e-3)


def test_normalization_does_not_depend_on_the_order_of_items() -> None:
    """Items that come class by class, more of each than fit a batch, give the statistics of the whole."""
    task = make_tasks(1, items=960)[0]
    order = task.train_y.argsort(stable=True)
    ordered = Task(task.name, task.classes, task.train_x[order], task.train_y[order], task.test_x, task.test_y)
    network = small("resnet18")
    learn_sequence(network, [ordered], Learning(epochs=1, batch_size=64))
    found = network.finished[task.name].norms
    network.train()
    network.estimate_norms([ordered.train_x])
    for step, norm in network.norm_layers.items():
        spread = norm.var.sqrt()
        assert ((found[step].mean - norm.mean).abs() <= 0.35 * spread + 0.05).all(), step
        assert ((found[step].var.sqrt() - spread).abs() <= 0.35 * spread + 0.05).all(), step


def test_a_task_that_is_not_finished_leaves_no_trace() -> None:
    """Interrupted in the middle, with weight decay pulling at everything: the finished task answers as before."""
    network, tasks = small("fcn3"), make_tasks(3)
    learn_sequence(network, tasks[:1], OPTIMIZERS[0])
    before = predict(network, "t0", tasks[0].test_x)

    def interrupt(event: Event) -> None:
        if isinstance(event, EpochDone):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn_sequence(network, tasks[1:2], OPTIMIZERS[0], interrupt)
    assert torch.equal(predict(network, "t0", tasks[0].test_x), before)
    with pytest.raises(KeyboardInterrupt):
        learn_sequence(network, tasks[1:2], OPTIMIZERS[0], interrupt)
    learn_sequence(network, tasks[2:], OPTIMIZERS[0])
    assert torch.equal(predict(network, "t0", tasks[0].test_x), before)


def test_an_interruption_while_finishing_claims_nothing() -> None:
    """The mask is chosen, the statistics are not there yet: the task does not exist, and can be learned again."""
    network, tasks = small("resnet18"), make_tasks(2)
    learn_sequence(network, tasks[:1], OPTIMIZERS[1])
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
    learn_sequence(network, tasks[1:], OPTIMIZERS[1])
    assert list(network.finished) == ["t0", "t1"]


def test_an_answer_does_not_depend_on_its_batch() -> None:
    """The same item alone and among others: the same logits."""
    network, tasks = small("resnet18"), make_tasks(2)
    learn_sequence(network, tasks, OPTIMIZERS[1])
    together = predict(network, "t0", tasks[0].test_x)
    alone = torch.cat([predict(network, "t0", image.unsqueeze(0)) for image in tasks[0].test_x])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_selecting_binds_mask_norm_and_head_together() -> None:
    """Going to another task and back gives the same bytes."""
    network, tasks = small("resnet18"), make_tasks(3)
    learn_sequence(network, tasks, OPTIMIZERS[1])
    answers = [predict(network, task.name, tasks[0].test_x) for task in tasks]
    assert not torch.equal(answers[0], answers[1])
    for task, answer in zip(tasks, answers, strict=True):
        assert torch.equal(predict(network, task.name, tasks[0].test_x), answer)


def test_same_seed_same_bytes() -> None:
    """Two runs with one seed are equal; another seed differs."""

    def weights(seed: int) -> bytes:
        network = small("resnet18", seed=seed)
        options = Learning(epochs=1, batch_size=16, seed=seed)
        learn_sequence(network, make_tasks(2), options)
        return b"".join(layer.weight.detach().numpy().tobytes() for layer in network.masked_layers.values())

    assert weights(1) == weights(1)
    assert weights(1) != weights(2)


def test_unknown_task_names_the_known_ones() -> None:
    """Selecting a task nobody learned says which there are."""
    network = small("fcn3")
    learn_sequence(network, make_tasks(1), OPTIMIZERS[1])
    with pytest.raises(UnknownTaskError, match="unknown task 'dogs'; this run holds: t0"):
        network.select("dogs")


def test_a_loss_that_is_not_finite_ends_training_with_a_reason() -> None:
    """A learning rate far too high is reported, not trained through; also when only the last step breaks it."""
    for options in (
        Learning(epochs=6, batch_size=16, optimizer="sgd", learning_rate=1e30),
        Learning(epochs=1, batch_size=64, optimizer="sgd", learning_rate=1e38),
    ):
        network = small("fcn3")
        with pytest.raises(LearningError, match="a learning_rate below"):
            learn_sequence(network, make_tasks(1), options)
        assert not network.finished
        assert network.claimed() == 0


def test_a_warm_task_that_diverges_is_told_the_setting_to_lower() -> None:
    """It learns at a share of the rate; the hint names the rate a person can set."""
    options = replace(PLAIN, optimizer="sgd", similarity=Similarity(similar="all"))
    run = learn_sequence(small("fcn3"), make_tasks(1), options)
    with pytest.raises(LearningError, match=r"'t1' .* a learning_rate below 1e\+30"):
        learn_sequence(run.network, make_tasks(2)[1:], replace(options, learning_rate=1e30), before=run)
