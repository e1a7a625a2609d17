"""Every method, checked by what defines it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from factories import context_of, make_tasks, same_tensors, small, weights_of
from safetensors.torch import save_file
from test_transfer import learn

from etcl_deploy.bundle.bundle import load_bundle
from etcl_deploy.config import Config, Learning, Similarity, Transfer
from etcl_deploy.core.task import Task
from etcl_deploy.errors import ConfigError, ExportError
from etcl_deploy.export.to_onnx import export_task
from etcl_deploy.learn.methods import METHODS
from etcl_deploy.learn.methods.dense import Ewc
from etcl_deploy.learn.methods.hat import masks_of, unit_chains
from etcl_deploy.learn.trainer import learn_sequence, predict
from etcl_deploy.runs.build import build_network
from etcl_deploy.runs.store import StoredRun, load_run, save
from etcl_deploy.runs.to_bundle import bundle_run
from etcl_deploy.runtime.predictor import Predictor

BASE = Learning(
    epochs=3,
    batch_size=16,
    learning_rate=0.01,
    similarity=Similarity(similar="all"),
    transfer=Transfer(backward="off"),
)
KEEP = [name for name, method in METHODS.items() if not method.forgets]
NETWORKS = ["fcn3", "resnet18", "lenet5"]


def options(method: str, **changes: object) -> Learning:
    return replace(BASE, method=method, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backbone", NETWORKS)
def test_every_method_learns(method: str, backbone: str) -> None:
    """Two easy tasks on every kind of network, each far above chance when it is learned."""
    run = learn_sequence(
        small(backbone, width=16), make_tasks(2, items=90), options(method, epochs=15, learning_rate=0.003)
    )
    assert min(row[-1] or 0 for row in run.matrix) > 60


@pytest.mark.parametrize("method", KEEP)
@pytest.mark.parametrize("backbone", NETWORKS)
def test_masks_do_not_forget(method: str, backbone: str) -> None:
    """Features and heads of finished tasks keep their bits."""
    _, seen = learn(small(backbone), make_tasks(3), options(method))
    for before, after in pairwise(seen):
        assert same_tensors(before, {name: after[name] for name in before})


def contradicting(count: int) -> list[Task]:
    """Tasks whose images are alike and whose labels are not: the class depends on another part of the image."""
    generator = torch.Generator().manual_seed(3)
    tasks = []
    for number in range(count):
        images = torch.randint(0, 256, (90, 16, 16, 1), generator=generator).to(torch.uint8)
        corners = torch.randint(0, 2, (90, count), generator=generator)
        for place in range(count):
            images[:, 4 * place : 4 * place + 4] = (200 * corners[:, place]).view(-1, 1, 1, 1).to(torch.uint8)
        labels = corners[:, number]
        tasks.append(Task(f"t{number}", ("a", "b"), images[:60], labels[:60], images[60:], labels[60:]))
    return tasks


def test_fine_tuning_forgets_and_masks_do_not() -> None:
    """The same tasks: what naive loses of the first one, wsn keeps."""
    final = {}
    for method in ("naive", "wsn"):
        run = learn_sequence(small("fcn3", width=16), contradicting(3), options(method, epochs=15, learning_rate=0.003))
        final[method] = (run.matrix[0][0], run.matrix[-1][0])
    assert final["naive"][0] == 100 and (final["naive"][1] or 0) < 90
    assert final["wsn"][0] == final["wsn"][1] == 100


@pytest.mark.parametrize("method", METHODS)
def test_a_finished_task_is_kept_in_a_directory(method: str, tmp_path: Path) -> None:
    """Saved and loaded again it answers the same, and all that the method remembers is there."""
    tasks = make_tasks(2)
    run = learn_sequence(small("resnet18"), tasks, options(method))
    save(StoredRun(run, Config(), ()), tmp_path)
    loaded = load_run(tmp_path).run
    assert same_tensors(loaded.memory, run.memory)
    for task in tasks:
        assert same_tensors(loaded.records[task.name].memory, run.records[task.name].memory)
        expected = predict(run.network, task.name, task.test_x)
        assert torch.equal(predict(loaded.network, task.name, task.test_x), expected)


@pytest.mark.parametrize("method", METHODS)
def test_it_bundles_and_exports_like_etcl(method: str, tmp_path: Path) -> None:
    """Predictor and onnxruntime answer as the network does; networks of their own do not fit into one bundle."""
    config = Config().with_values({"backbone": "lenet5", "size": 16, "channels": 1, "width": 6, "epochs": 1})
    tasks = make_tasks(3)
    run = learn_sequence(build_network(config), tasks, options(method))
    stored, path = StoredRun(run, config, ()), tmp_path / "x.etcl"
    if method == "one":
        with pytest.raises(ExportError, match="'t0' has a whole network of its own"):
            bundle_run(stored, path)
        assert not path.exists()
        return
    bundle_run(stored, path)
    predictor = Predictor(load_bundle(path))
    for task in tasks:
        expected = predict(run.network, task.name, task.test_x).softmax(1)
        answers = predictor.predict(list(task.test_x), [task.name] * len(task.test_x))
        scores = torch.tensor([list(answer.scores.values()) for answer in answers])
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-4)
    report = export_task(load_bundle(path), "t2", tmp_path / "t.onnx", tasks[2].test_x)
    assert report.parity.same_class == len(tasks[2].test_x)


def test_supsup_never_changes_a_weight() -> None:
    """Only masks are learned, and each task has its own."""
    network, tasks = small("resnet18"), make_tasks(2)
    drawn = weights_of(network)
    run = learn_sequence(network, tasks[:1], options("supsup"))
    before = weights_of(network)
    learn_sequence(network, tasks[1:], options("supsup"), before=run)
    assert same_tensors(weights_of(network), before)
    for step, value in before.items():
        assert torch.equal(value.sign(), drawn[step].sign())
        assert len(value.abs().unique()) == 1, "in a layer they differ by their sign"
    first, second = network.finished.values()
    assert any(not torch.equal(first.masks[step], second.masks[step]) for step in before)


def test_piggyback_learns_weights_once() -> None:
    """With the first task, all of them; after that only masks of the stated density."""
    network, tasks = small("resnet18", density=0.25), make_tasks(3)
    run = learn_sequence(network, tasks[:1], options("piggyback"))
    before = weights_of(network)
    learn_sequence(network, tasks[1:], options("piggyback"), before=run)
    assert same_tensors(weights_of(network), before)
    assert all(bool(mask.all()) for mask in network.finished["t0"].masks.values())
    for mask in network.finished["t2"].masks.values():
        assert int(mask.sum()) == round(0.25 * mask.numel())


def test_weights_come_from_a_file(tmp_path: Path) -> None:
    """The backbone file of a run will do; a file that does not fit is refused with the reason."""
    config = Config().with_values({"backbone": "fcn3", "width": 12, "size": 16, "channels": 1})
    path = tmp_path / "backbone.safetensors"
    given = {step: value + 1 for step, value in weights_of(build_network(config)).items()}
    save_file({f"{step}/weight": value for step, value in given.items()}, path)
    filled = build_network(config.with_values({"weights": str(path)}))
    learn_sequence(filled, make_tasks(2), options("piggyback", weights=str(path)))
    assert same_tensors(weights_of(filled), given)
    assert not all(bool(mask.all()) for mask in filled.finished["t0"].masks.values())
    with pytest.raises(ConfigError, match=r"weights: .* has shape .* is right"):
        build_network(config.with_values({"weights": str(path), "width": 7}))
    with pytest.raises(ConfigError, match="weights: cannot read"):
        build_network(config.with_values({"weights": str(tmp_path / "none")}))


def test_one_knows_nothing_of_other_tasks() -> None:
    """The second task comes out the same whatever the first one was."""
    first, other, second = make_tasks(3)
    networks = small("resnet18"), small("resnet18")
    for network, before in zip(networks, (first, other), strict=True):
        learn_sequence(network, [before, second], options("one"))
    answers = [predict(network, second.name, second.test_x) for network in networks]
    assert torch.equal(*answers)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("backbone", NETWORKS)
def test_gpm_moves_orthogonally_to_what_it_remembers(backbone: str, optimizer: str) -> None:
    """The whole change of every layer during the second task, whatever the optimizer, is outside the stored space."""
    network, tasks = small(backbone), make_tasks(2)
    settings = options("gpm", optimizer=optimizer)
    run = learn_sequence(network, tasks[:1], settings)
    before, spaces = weights_of(network), run.memory
    later = learn_sequence(network, tasks[1:], settings, before=run)
    moved = 0.0
    for step, layer in network.masked_layers.items():
        space = spaces[step]
        assert torch.allclose(space @ space.T, torch.eye(len(space)), atol=1e-4)
        change = (layer.weight.detach() - before[step]).view(len(layer.weight), -1)
        assert float((change @ space.T).norm()) <= 1e-4 * max(float(layer.weight.detach().norm()), 1.0)
        moved += float(change.norm())
        grown = later.memory[step]
        assert float((space - (space @ grown.T) @ grown).norm()) < 1e-3 * len(space)  # what was held still is
    assert moved > 0.01, "nothing moved: this would prove nothing"


def test_ewc_holds_on_to_what_matters() -> None:
    """Its penalty is the parabola its paper states; a strong one leaves important weights where they were."""
    network, tasks = small("fcn3"), make_tasks(2)
    run = learn_sequence(network, tasks[:1], options("ewc"))
    before, memory = weights_of(network), run.memory
    method = Ewc(network, options("ewc"))
    method.memory = memory
    method.begin(context_of(tasks[1]))
    network.train()
    network(tasks[1].train_x[:4])
    penalty = method.penalty()
    assert penalty is not None and float(penalty.detach()) == 0  # at the centre
    with torch.no_grad():
        for work in network.work.values():
            work.weight.add_(0.1)
    network(tasks[1].train_x[:4])
    penalty = method.penalty()
    importance = torch.cat([memory[f"{step}/importance"].flatten() for step in before])
    assert penalty is not None
    assert float(penalty.detach()) == pytest.approx(100 / 2 * 0.01 * float(importance.sum()), rel=1e-3)

    def drift(strength: float) -> float:
        other = small("fcn3")
        settings = options("ewc", others=replace(BASE.others, ewc_strength=strength))
        first = learn_sequence(other, tasks[:1], settings)
        start = weights_of(other)
        learn_sequence(other, contradicting(2)[1:], settings, before=first)
        moved = {step: weight - start[step] for step, weight in weights_of(other).items()}
        return sum(float((first.memory[f"{s}/importance"] * m.square()).sum()) for s, m in moved.items())

    assert drift(1e6) < 0.1 * drift(0.0)


def test_hat_turns_its_gates_into_masks() -> None:
    """A weight is a task's if the units at both ends are; closed units give nothing, so masks say it all."""
    network, tasks = small("resnet18", width=8), make_tasks(2)
    first = learn_sequence(network, tasks[:1], options("hat", epochs=6))
    run = learn_sequence(network, tasks[1:], options("hat", epochs=6), before=first)
    for state in network.finished.values():
        for step, mask in state.masks.items():
            rows = mask.flatten(1).any(1)
            columns = mask.transpose(0, 1).flatten(1).any(1)
            outer = rows.view(-1, 1) & columns
            assert torch.equal(mask, outer.view(*outer.shape, *([1] * (mask.ndim - 2))).expand_as(mask)), step
    used = run.memory
    assert all(bool((used[step] >= gate).all()) for step, gate in first.memory.items())
    claimed = masks_of(network.plan, unit_chains(network.plan), used)
    assert all(torch.equal(layer.claimed, claimed[step]) for step, layer in network.masked_layers.items())
    assert 0 < network.claimed() < 1


def test_hat_learns_its_gates() -> None:
    """A higher price leaves fewer units in use; with one batch an epoch gates still harden."""
    used = []
    for thrift in (0.0, 20.0):
        settings = options("hat", epochs=10, others=replace(BASE.others, hat_thrift=thrift))
        run = learn_sequence(small("fcn3", width=32), make_tasks(1, items=90), settings)
        used.append(sum(int(units.sum()) for units in run.memory.values()))
    assert used[1] < 0.8 * used[0]
    settings = options("hat", epochs=20, batch_size=128)
    run = learn_sequence(small("fcn3", width=32), make_tasks(1, items=90), settings)
    assert (run.matrix[0][0] or 0) > 60


def test_the_names_of_methods() -> None:
    """Settings know the methods there are, and no others."""
    assert list(METHODS) == list(get_args(get_type_hints(Learning)["method"]))
