"""The laws of transfer: what may change when similar tasks help each other, and what never does."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from factories import context_of, make_tasks, small, varied
from torch import Tensor
from torch.nn import functional as F

from etcl_deploy.config import Learning, Similarity, Transfer
from etcl_deploy.core.task import Items, Task
from etcl_deploy.learn.events import Event, TaskDone
from etcl_deploy.learn.forward import align, guide
from etcl_deploy.learn.methods.etcl import Etcl
from etcl_deploy.learn.run import Run
from etcl_deploy.learn.signature import TaskSignature
from etcl_deploy.learn.trainer import accuracy, learn_sequence, predict
from etcl_deploy.network.distributed import Batch
from etcl_deploy.network.masked_network import MaskedNetwork
from etcl_deploy.network.masks import keep_top
from etcl_deploy.network.state import TaskState

ALL_SIMILAR = Learning(epochs=3, batch_size=16, learning_rate=0.01, similarity=Similarity(similar="all"))


def learn(network: MaskedNetwork, tasks: list[Task], options: Learning) -> tuple[Run, list[dict[str, Tensor]]]:
    """The run, and after every task the features and heads of all tasks so far."""
    seen: list[dict[str, Tensor]] = []

    def remember(event: Event) -> None:
        if isinstance(event, TaskDone):
            state = {f"features {n}": network.embed(tasks[0].test_x, n) for n in network.finished}
            state |= {f"head {n}": s.head["weight"].clone() for n, s in network.finished.items()}
            seen.append(state)

    return learn_sequence(network, tasks, options, remember), seen


@pytest.mark.parametrize("backbone", ["fcn3", "resnet18"])
def test_with_backward_on_only_declared_heads_change(backbone: str) -> None:
    """Features keep their bits; a head changes exactly if the run says that a later task changed it."""
    tasks = make_tasks(4, items=120)
    run, seen = learn(small(backbone), tasks, ALL_SIMILAR)
    changed = 0
    for number, (before, after) in enumerate(pairwise(seen), start=1):
        declared = {change.task for change in run.records[tasks[number].name].changes if change.kept}
        for name, value in before.items():
            kind, _, task = name.partition(" ")
            assert torch.equal(value, after[name]) == (kind == "features" or task not in declared), name
        changed += len(declared)
    assert changed, "no head was improved: this would prove nothing"


def test_a_head_in_the_loop_answers_as_before_inside_its_own_space() -> None:
    """The paper's way: on every vector of the space of its own data the change is below 1e-5 of the head's size."""
    network, tasks = small("resnet18"), make_tasks(3)
    run, seen = learn(network, tasks, varied(ALL_SIMILAR, backward="in_loop"))
    changed = {change.task for known in run.records.values() for change in known.changes if change.kept}
    assert changed
    for name in changed:
        space = TaskSignature.of(run.records[name].memory).inputs.space
        first = next(state[f"head {name}"] for state in seen if f"head {name}" in state)
        change = network.finished[name].head["weight"] - first
        assert change.norm() > 1e-4 * first.norm()
        assert (change @ space.T).abs().max() < 1e-5 * first.norm()


def test_heads_of_other_classes_are_not_touched() -> None:
    """Similar features may guide the mask; a head means what its classes mean."""
    first, second = make_tasks(2)
    other = replace(second, classes=("x", "y", "z"))
    network = small("fcn3")
    run, seen = learn(network, [first, other], ALL_SIMILAR)
    assert run.records["t1"].similar == ("t0",)
    assert run.records["t1"].changes == ()
    assert torch.equal(seen[0]["head t0"], seen[1]["head t0"])


@pytest.mark.parametrize(("model", "expected"), [("latest", "t1"), ("most_similar", "t0")])
def test_a_task_is_modelled_on_the_one_that_was_asked_for(model: str, expected: str) -> None:
    """Learned at a rate of nearly nothing, a task ends with the mask it began with."""
    network, tasks = small("fcn3"), make_tasks(2)
    tasks[1] = replace(tasks[1], train_x=255 - tasks[1].train_x)
    run = learn_sequence(network, tasks, ALL_SIMILAR)
    options = varied(replace(ALL_SIMILAR, learning_rate=1e-30), model=model)
    again = replace(tasks[0], name="again")
    gaps = {c.task: c.gap for c in learn_sequence(network, [again], options, before=run).records["again"].comparisons}
    assert gaps["t0"] > gaps["t1"]
    masks = {name: state.masks for name, state in network.finished.items()}
    assert all(torch.equal(mask, masks[expected][step]) for step, mask in masks["again"].items())
    assert any(not torch.equal(mask, masks["t0"][step]) for step, mask in masks["t1"].items())


@pytest.mark.parametrize("backbone", ["fcn3", "resnet18"])
def test_a_warm_start_begins_as_the_similar_task(backbone: str) -> None:
    """Before its first step the new task answers as the old one, for equal classes; with others, head apart."""
    network, tasks = small(backbone), make_tasks(1)
    learn_sequence(network, tasks, ALL_SIMILAR)
    start = network.finished["t0"]
    images = tasks[0].test_x
    logits, features = predict(network, "t0", images), network.embed(images, "t0")
    for layer in network.masked_layers.values():  # as a task learned in between would leave them
        layer.draw_scores(torch.Generator().manual_seed(9))
    network.begin("new", start.classes, torch.Generator(), start=start, with_head=True)
    torch.testing.assert_close(network.answer(network.embed(images)), logits)
    network.begin("other", ("a", "b"), torch.Generator(), start=start)
    torch.testing.assert_close(network.embed(images), features)
    assert network.head["weight"].shape[0] == 2


def score_gradient(network: MaskedNetwork, state: TaskState | None, images: Tensor, labels: Tensor) -> Tensor:
    """The gradient of the first layer's scores, by autograd, through the task's own mask or through another's."""
    layer = network.masked_layers["fc1"]
    mask = keep_top(layer.scores, network.density) if state is None else state.masks["fc1"]
    other = network.masked_layers["fc2"]
    second = keep_top(other.scores, network.density) if state is None else state.masks["fc2"]
    chosen = mask.float().requires_grad_()
    hidden = F.relu(F.linear(network.preprocessing.normalize(images).flatten(1), layer.weight.detach() * chosen))
    features = F.relu(F.linear(hidden, other.weight.detach() * second))
    loss = F.cross_entropy(network.answer(features), labels)
    return torch.autograd.grad(loss, chosen)[0]


def test_alignment_follows_its_equations() -> None:
    """once: the sum of both gradients over all items (Eq. G-Align); every step: a tenth of the negative part."""
    network, tasks = small("fcn3"), make_tasks(2)
    learn_sequence(network, tasks[:1], ALL_SIMILAR)
    state = network.finished["t0"]
    options = replace(ALL_SIMILAR, batch_size=20, scores="fresh")
    progress = Etcl(network, options).begin(context_of(tasks[1], seed=5))
    images, labels = tasks[1].train_x, tasks[1].train_y
    own, theirs = (score_gradient(network, s, images, labels) for s in (None, state))
    assert not torch.allclose(own, theirs)
    scores = network.masked_layers["fc1"].scores
    align(progress, Items(images, labels), state)
    assert scores.grad is not None
    torch.testing.assert_close(scores.grad, own + theirs, rtol=1e-4, atol=1e-6)
    progress.forget_gradients()
    F.cross_entropy(network(images), labels).backward()
    for work in network.work.values():
        work.spread_gradient()
    gradients = [layer.weight.grad for layer in network.masked_layers.values()]
    before = [gradient.clone() for gradient in gradients if gradient is not None]
    guide(network, Batch(images, labels, len(labels), torch.Generator()), [state, state])
    torch.testing.assert_close(scores.grad, own + 2 * 0.1 * theirs.clamp_max(0), rtol=1e-4, atol=1e-6)
    after = [layer.weight.grad for layer in network.masked_layers.values()]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True)), "another mask leaves weights alone"


def test_similar_tasks_are_found_and_others_are_not() -> None:
    """Two halves of one kind of image are similar; stripes after spots are not."""
    generator = torch.Generator().manual_seed(3)

    def task(name: str, turned: bool) -> Task:
        labels = torch.arange(240) % 3
        images = torch.randint(0, 40, (240, 16, 16, 1), generator=generator)
        for index, label in enumerate(labels.tolist()):
            images[index, 2 + 4 * label : 6 + 4 * label] += 150
        pixels = (images.transpose(1, 2) if turned else images).to(torch.uint8)
        return Task(name, ("a", "b", "c"), pixels[60:], labels[60:], pixels[:60], labels[:60])

    network = small("resnet18", width=8)
    options = Learning(epochs=4, batch_size=32)
    run = learn_sequence(network, [task("rows", False), task("more-rows", False), task("columns", True)], options)
    assert run.records["more-rows"].similar == ("rows",)
    assert run.records["columns"].similar == ()


def test_a_task_that_starts_warm_learns_at_its_own_rate() -> None:
    """`warm_rate` slows it down; a task that starts cold does not know of it."""

    def second_head(alignment: str, warm_rate: float) -> Tensor:
        network = small("fcn3")
        options = varied(ALL_SIMILAR, alignment=alignment, warm_rate=warm_rate, backward="off")
        learn_sequence(network, make_tasks(2), options)
        return network.finished["t1"].head["weight"] - network.finished["t0"].head["weight"]

    slow, fast = (second_head("warm_start", rate).norm() for rate in (1e-6, 1.0))
    assert 0 < slow < 1e-3 * fast
    assert torch.equal(second_head("off", 1e-6), second_head("off", 1.0))


def test_a_head_that_was_not_given_learns_at_the_full_rate() -> None:
    """A task with other classes starts with a warm backbone and a head from nothing."""
    first, second = make_tasks(2, items=90)
    other = replace(second, name="t1", classes=("x", "y", "z"))
    options = replace(ALL_SIMILAR, epochs=20, transfer=Transfer(warm_rate=1e-6))
    network = small("fcn3", width=30)
    learn_sequence(network, [first, other], options)
    for step, mask in network.finished["t1"].masks.items():
        assert torch.equal(mask, network.finished["t0"].masks[step])
    assert (predict(network, "t1", other.train_x).argmax(1) == other.train_y).float().mean() > 0.8


@pytest.mark.parametrize(("backward", "kept"), [("replay", []), ("in_loop", [1.0])])
def test_without_validation_items_only_the_unchecked_way_improves_heads(backward: str, kept: list[float]) -> None:
    """The paper checks nothing, so it needs none; what it keeps is recorded without an accuracy."""
    options = varied(replace(ALL_SIMILAR, validation_share=0), backward=backward)
    changes = learn_sequence(small("fcn3"), make_tasks(2), options).records["t1"].changes
    assert [(change.kept, change.before, change.after) for change in changes] == [(share, None, None) for share in kept]


def test_advice_is_taken_only_of_classes_an_adviser_knows_as_such() -> None:
    """Two of forty classes are swapped, too few items to prove it: their labels stay, and they are learned."""
    chance = torch.Generator().manual_seed(4)
    labels = torch.arange(1200) % 40
    images = torch.randint(0, 60, (2400, 16, 16, 1), generator=chance)
    for label in range(40):
        images[labels.repeat(2) == label, label // 3 : label // 3 + 3, 5 * (label % 3) : 5 * (label % 3) + 6] += 150
    images = images.to(torch.uint8)
    names = tuple(str(number) for number in range(40))
    swapped = torch.cat([torch.tensor([1, 0]), torch.arange(2, 40)])[labels]
    first = Task("first", names, images[:1200], labels, images[:400], labels[:400])
    second = Task("second", names, images[1200:], swapped, images[1200:1600], swapped[:400])
    options = Learning(epochs=9, batch_size=32, learning_rate=0.01, similarity=Similarity(margin=0.0))
    run = learn_sequence(small("fcn3", width=60, density=0.5), [first, second], options)
    assert run.records["second"].similar == ("first",)
    answers = predict(run.network, "second", second.test_x).argmax(1)
    exchanged = second.test_y < 2
    assert (answers[exchanged] == second.test_y[exchanged]).float().mean() > 0.9
    assert (answers == second.test_y).float().mean() > 0.9


def test_of_many_tasks_the_nearest_are_compared() -> None:
    """As many as the setting says, in the order they were learned; the twin of an earlier task finds that one."""
    chance = torch.Generator().manual_seed(3)
    permuted = []
    for task in make_tasks(4):
        images = task.train_x.flatten(1)[:, torch.randperm(256, generator=chance)].view_as(task.train_x)
        permuted.append(replace(task, train_x=images, test_x=images[: len(task.test_y)]))
    twin = replace(permuted[1], name="twin")
    options = Learning(epochs=1, batch_size=16, similarity=Similarity(candidates=2))
    run = learn_sequence(small("fcn3"), [*permuted, twin], options)
    compared = [[comparison.task for comparison in known.comparisons] for known in run.records.values()]
    assert [len(names) for names in compared] == [0, 1, 2, 2, 2]
    assert permuted[1].name in compared[-1]
    assert compared[-1] == sorted(compared[-1], key=run.tasks.index)


def test_what_did_not_change_is_not_measured_again() -> None:
    """Accuracies of tasks whose heads stayed are carried over; all of them are what measuring them again gives."""
    tasks = make_tasks(3)
    run, _ = learn(small("resnet18"), tasks, ALL_SIMILAR)
    for number, (before, after) in enumerate(pairwise(run.matrix), start=1):
        declared = {change.task for change in run.records[tasks[number].name].changes if change.kept}
        same = [name for name in run.tasks[:number] if name not in declared]
        assert all(after[run.tasks.index(name)] == before[run.tasks.index(name)] for name in same)
    assert run.matrix[-1] == tuple(accuracy(run.network, task.test, task.name) for task in tasks)
