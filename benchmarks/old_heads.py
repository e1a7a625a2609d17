"""What decided how old heads are improved: backward transfer of finished F-EMNIST-1 runs, replayed with other settings.

    python benchmarks/old_heads.py runs/femnist1/full-0 runs/femnist1/full-1 runs/femnist1/full-2

The sub-networks are as they were learned, only what happens to their heads is repeated. A head is measured on the
validation items of its own task, which no head and no weight of that task has seen; test items are not looked at.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from record import in_words, measure_once, measured, spread, write_result
from torch import Tensor

from etcl_deploy.config import Transfer
from etcl_deploy.core.task import Items
from etcl_deploy.learn.run import Run
from etcl_deploy.learn.signature import Seen, TaskSignature, describe_inputs
from etcl_deploy.learn.task_training import seeded
from etcl_deploy.learn.trainer import accuracy
from etcl_deploy.learn.transfer import improve_heads
from etcl_deploy.network.masked_network import MaskedNetwork
from etcl_deploy.runs.store import load
from etcl_deploy.runs.task_loading import find_tasks
from etcl_deploy.settings import load_recipe

SETTINGS: dict[str, dict[str, Any]] = {
    **{f"head_energy={energy}": {"head_energy": energy} for energy in (0.999, 0.99, 0.95, 0.9, 0.8)},
    "head_rate=0.003": {"head_rate": 0.003},
    "pull=0": {"pull": 0.0},
    "backward=unchecked": {"backward": "unchecked"},
}


def remember_features(network: MaskedNetwork) -> None:
    """Sub-networks are frozen: what they make of the same images need not be computed for every setting."""
    embed, known = network.embed, dict[tuple[int, str | None], Tensor]()

    def remembered(images: Tensor, name: str | None = None) -> Tensor:
        key = (images.data_ptr(), name)
        if key not in known:
            known[key] = embed(images, name)
        elif name is not None:
            network.select(name)
        return known[key]

    network.embed = remembered  # type: ignore[method-assign]


def replay(run: Run, parts: dict[str, tuple[Items, Items]], transfer: Transfer, seed: int) -> tuple[float, float]:
    """Mean validation accuracy of all tasks as they were learned, and after all that was done to their heads."""
    network, records = run.network, {}
    for name, known in run.records.items():
        network.change_head(name, known.head)
        training, _ = parts[name]
        features, classes = network.embed(training.images, name), len(network.finished[name].classes)
        inputs = describe_inputs(Seen(features, training.labels), classes, transfer.head_energy)
        records[name] = replace(known, memory=replace(TaskSignature.of(known.memory), inputs=inputs).tensors())
    learned = [accuracy(network, parts[name][1], name) for name in run.tasks]
    for position, name in enumerate(run.tasks, start=1):
        similar = [network.finished[earlier] for earlier in records[name].similar]
        improve_heads(network, name, similar, *parts[name], records, transfer, seeded(seed, position, 0))
    return fmean(learned), fmean(accuracy(network, parts[name][1], name) for name in run.tasks)


def measure(directory: Path) -> dict[str, Any]:
    """Mean validation accuracy of a run's tasks, by setting."""
    stored = load(directory)
    options = stored.config.learning
    parts = {
        task.name: task.training.split(options.validation_share, seeded(options.seed, position, 0))
        for position, task in enumerate(find_tasks(stored.config, None).tasks, start=1)
    }
    remember_features(stored.run.network)
    found: dict[str, float] = {}
    for name, changed in SETTINGS.items():
        transfer = replace(load_recipe("femnist1").learning.transfer, **changed)
        found["as learned"], found[name] = replay(stored.run, parts, transfer, options.seed)
    return {"validation": found, "learned_with": stored.config.as_json()}


def main(say: Callable[[str], None]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    recipe = load_recipe("femnist1").as_json()
    for directory in arguments.runs:
        measure_once(partial(measure, directory), "old_heads", directory.name, recipe)
    runs = measured("old_heads", lambda name: recipe).values()
    table = {name: spread([run["validation"][name] for run in runs]) for name in ("as learned", *SETTINGS)}
    for name, row in table.items():
        say(f"{name:20s} validation accuracy {in_words(row)}")
    write_result("old_heads", [], table, recipe)


if __name__ == "__main__":
    main(partial(print, flush=True))
