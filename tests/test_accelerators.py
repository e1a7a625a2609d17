"""The same on every device there is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import DEVICES
from factories import make_tasks, small

from etcl_deploy.config import Learning, Similarity
from etcl_deploy.errors import ConfigError
from etcl_deploy.learn.events import Event, TaskDone
from etcl_deploy.learn.trainer import learn_sequence, predict
from etcl_deploy.runs.build import choose_device
from etcl_deploy.runs.session import Session, resume, train
from etcl_deploy.runs.store import load_run
from etcl_deploy.settings import load_recipe

OPTIONS = Learning(epochs=2, batch_size=16, learning_rate=0.01, similarity=Similarity(similar="all"), rotation=5.0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_tasks_are_learned_on_it_and_old_features_keep_their_bits(device: str, precision: str) -> None:
    """In either precision; what is claimed is claimed."""
    network, tasks = small("resnet18").to(device), make_tasks(2)
    options = replace(OPTIONS, precision=precision)  # type: ignore[arg-type]
    run = learn_sequence(network, tasks[:1], options)
    before = network.embed(tasks[0].test_x, "t0")
    learn_sequence(network, tasks[1:], options, before=run, earlier=tasks[:1])
    assert before.device.type == device
    assert torch.equal(network.embed(tasks[0].test_x, "t0"), before)


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_goes_on_where_it_is_loaded(device: str, tmp_path: Path) -> None:
    """Saved from one device, loaded and resumed on it; the CPU reads it too."""
    config = load_recipe("digits").with_values({"width": 4, "size": 8, "tasks": 2, "epochs": 1})

    def stop(event: Event) -> None:
        if isinstance(event, TaskDone):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", session=Session(device, report=stop))
    again = resume(tmp_path / "run", session=Session(device)).run
    assert again.tasks == ("upright-a", "upright-b")
    image = torch.zeros(1, 8, 8, 1, dtype=torch.uint8)
    here, there = (predict(r.network, "upright-a", image) for r in (again, load_run(tmp_path / "run").run))
    torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-3)


def test_bfloat16_is_really_used() -> None:
    """The same task in both precisions is not learned to the same bits."""
    found = []
    for precision in ("float32", "bfloat16"):
        network = small("fcn3")
        learn_sequence(network, make_tasks(1), replace(OPTIONS, precision=precision))  # type: ignore[arg-type]
        found.append(network.masked_layers["fc1"].weight.detach().clone())
    assert not torch.equal(*found)


def test_auto_takes_the_gpu_if_there_is_one() -> None:
    """And asking for one where there is none is an error, not a slow surprise."""
    assert choose_device("auto").type == DEVICES[-1]
    if "cuda" not in DEVICES:
        with pytest.raises(ConfigError, match="no CUDA device is available here; use --device cpu or auto"):
            choose_device("cuda")
