"""Several processes that learn one run together, started by a real torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from etcl_deploy.network.distributed import Distributed
from etcl_deploy.runs.store import StoredRun, load_run
from etcl_deploy.serve.process import still_running


def start(processes: int, *words: object) -> subprocess.Popen[str]:
    """`etcl` in so many processes; in one, without torchrun.

    The two dashes keep torchrun from taking `--run` for a short form of an option of its own.
    """
    together = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", "--"]
    command = [sys.executable, *(together if processes > 1 else ["-m"]), "etcl_deploy", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out


def masks_that_agree(one: StoredRun, other: StoredRun) -> float:
    """The share of mask bits that are the same in both runs."""
    same = total = 0
    for name, state in one.run.network.finished.items():
        for step, mask in state.masks.items():
            same += int((mask == other.run.network.finished[name].masks[step]).sum())
            total += mask.numel()
    return same / total


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 2, 6, 64])
def test_every_item_of_a_batch_is_looked_at_by_one_process(size: int, count: int) -> None:
    """The spans of all processes are the batch, in order, and none is larger than another by more than one."""
    spans = [Distributed(rank, size).span(count) for rank in range(size)]
    assert [place for span in spans for place in range(count)[span]] == list(range(count))
    lengths = [span.stop - span.start for span in spans]
    assert max(lengths) - min(lengths) <= 1


def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    """The same batches, statistics and random numbers: what comes out differs by rounding.

    alexnet has batch statistics and dropout; images are moved; the second task is aligned to the first.
    """
    settings = {"width": 4, "size": 32, "rotation": 15, "alignment": "once", "similar": "all"}
    settings |= {"optimizer": "sgd", "learning_rate": 0.01}  # Adam makes much of little where gradients vanish
    words = ["digits", "--backbone", "alexnet", "--tasks", "2", "--epochs", "1", "--device", "cpu", "--json"]
    words += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    printed = [finish(start(count, "train", *words, "--run", tmp_path / str(count))) for count in (1, 2)]
    one, two = load_run(tmp_path / "1"), load_run(tmp_path / "2")
    for step, layer in one.run.network.masked_layers.items():
        torch.testing.assert_close(two.run.network.masked_layers[step].weight, layer.weight, rtol=0, atol=1e-5)
    assert masks_that_agree(one, two) > 0.999
    accuracies = [json.loads(text)["acc"] for text in printed]  # one document each: only the first process prints
    assert abs(accuracies[0] - accuracies[1]) <= 0.6  # an item of one task


def test_more_processes_than_items_in_a_batch(tmp_path: Path) -> None:
    """A process without an item of its own takes part all the same; the last batch is uneven, too."""
    chance = np.random.default_rng(0)
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for name in "ab":
        images, labels = chance.integers(0, 255, (11, 8, 8), dtype=np.uint8), np.arange(11) % 2
        np.savez(tasks / f"{name}.npz", train_x=images, train_y=labels, test_x=images, test_y=labels)
    settings = ["--backbone", "resnet18", "--epochs", "1", "--device", "cpu"]
    for key, value in {"width": 4, "size": 8, "channels": 1, "batch_size": 2, "validation_share": 0}.items():
        settings += ["--set", f"{key}={value}"]
    finish(start(3, "train", "--data", tasks, "--run", tmp_path / "three", *settings))
    finish(start(1, "train", "--data", tasks, "--run", tmp_path / "one", *settings))
    assert masks_that_agree(load_run(tmp_path / "one"), load_run(tmp_path / "three")) > 0.97


def test_a_process_that_dies_ends_the_others_and_all_of_it_goes_on(tmp_path: Path) -> None:
    """kill -9 of one: no process stays behind, and resumed by two it ends with the bits of a run nobody disturbed."""
    words = ["--tasks", "2", "--epochs", "2", "--device", "cpu", "--backbone", "fcn3", "--set", "width=20"]
    finish(start(2, "train", "digits", "--run", tmp_path / "whole", *words))
    run = tmp_path / "run"
    process = start(2, "train", "digits", "--run", run, *words, "--set", "checkpoint_seconds=0")
    while not list(run.glob("checkpoint-*")):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    learning = psutil.Process(process.pid).children()
    assert len(learning) == 2
    learning[1].send_signal(signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "another process of this run has ended; start all of them again with --resume" in err
    assert not still_running(learning, 10)

    finish(start(2, "train", "--run", run, "--resume", "--device", "cpu"))
    assert load_run(run).digest == load_run(tmp_path / "whole").digest

    process = start(2, "train", "digits", "--run", run, *words)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert f"error (process 1): {run} already holds a run" in err.replace("\n", "")
