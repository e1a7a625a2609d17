"""A run: what a sequence left behind, in memory and as a directory.

    run.json                 settings, tasks, accuracy matrix, and the name and digest of the state file
    state-DIGEST.safetensors weights, scores, claimed bits, and every task's mask, normalization and head

The state file is named by its content and `run.json`, which names it, is replaced last: a crash at any moment leaves
the previous run or the new one.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from etcl_deploy import __version__, atomic
from etcl_deploy.bundle.codec import pack, unpack
from etcl_deploy.config import Config, config_from
from etcl_deploy.errors import RunError
from etcl_deploy.learn import metrics
from etcl_deploy.learn.layers import Norm
from etcl_deploy.learn.network import MaskedNetwork, TaskState
from etcl_deploy.plan import Plan, PlanError
from etcl_deploy.preprocessing import Preprocessing

FORMAT = 1
RECORD = "run.json"
METHOD = "wsn"  # masks without transfer between tasks


def current_versions() -> dict[str, str]:
    """The versions that decide what training gives."""
    return {
        "etcl_deploy": __version__,
        "python": platform.python_version(),
        "torch": version("torch"),
    }


@dataclass(frozen=True)
class Run:
    """A network with its finished tasks, the accuracy matrix in percent, and the time it took."""

    network: MaskedNetwork
    matrix: tuple[tuple[float, ...], ...]
    seconds: float
    versions: Mapping[str, str] = field(default_factory=current_versions)  # what it was learned with

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks learned, in order."""
        return tuple(self.network.finished)

    def summary(self, config: Config) -> dict[str, Any]:
        """What `etcl train` and `etcl eval` report."""
        return {
            "method": METHOD,
            "recipe": config.recipe,
            "seed": config.learning.seed,
            "tasks": list(self.tasks),
            "matrix": [list(row) for row in self.matrix],
            "acc": metrics.average_accuracy(self.matrix),
            "bwt": metrics.backward_transfer(self.matrix),
            "fwt": None,
            "claimed": self.network.claimed(),
            "similar": {},
            "seconds": self.seconds,
        }


def check_free(directory: Path) -> None:
    """Refuse a directory that already holds something."""
    if (directory / RECORD).exists():
        raise RunError(f"{directory} already holds a run; name another directory")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise RunError(f"{directory} is not an empty directory; a run starts in a new or empty one")
    nearest = next(parent for parent in (directory, *directory.absolute().parents) if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise RunError(f"{directory} cannot be made: {nearest} is not a directory one can write to")


def save(run: Run, config: Config, directory: Path) -> None:
    """Write the run; the previous state stays valid until the new one is complete."""
    network = run.network
    state = tensors_to_bytes(_state(network))
    digest = hashlib.sha256(state).hexdigest()
    name = f"state-{digest[:16]}.safetensors"
    record = {
        "format": FORMAT,
        "config": config.as_json(),
        "backbone": network.plan.as_json(),
        "preprocessing": network.preprocessing.as_json(),
        "density": network.density,
        "tasks": [{"name": t.name, "classes": list(t.classes)} for t in network.finished.values()],
        "matrix": [list(row) for row in run.matrix],
        "seconds": run.seconds,
        "versions": dict(run.versions),
        "state": {"file": name, "sha256": digest},
    }
    atomic.write_bytes(directory / name, state)
    atomic.write_bytes(directory / RECORD, json.dumps(record, indent=1, sort_keys=True).encode())
    for old in directory.glob("state-*.safetensors"):
        if old.name != name:
            old.unlink()


def load(directory: Path) -> tuple[Run, Config]:
    """The run in a directory, checked against its digest."""
    path = directory / RECORD
    try:
        record = json.loads(path.read_text("utf-8"))
        if record["format"] != FORMAT:
            raise RunError(f"{path} has format {record['format']}; this etcl_deploy reads format {FORMAT}")
        state = (directory / record["state"]["file"]).read_bytes()
        if hashlib.sha256(state).hexdigest() != record["state"]["sha256"]:
            raise RunError(f"{directory / record['state']['file']} is damaged: its digest differs")
        return _restored(record, tensors_from_bytes(state))
    except FileNotFoundError as error:
        raise RunError(f"{directory} holds no run: {error.filename} is missing") from None
    except OSError as error:
        raise RunError(f"cannot read the run in {directory}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError, PlanError) as error:
        raise RunError(f"{path} is damaged: {error!r}") from None


def _state(network: MaskedNetwork) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for step, layer in network.masked_layers.items():
        tensors[f"backbone/{step}/weight"] = layer.weight.detach()
        tensors[f"backbone/{step}/scores"] = layer.scores.detach()
        tensors[f"backbone/{step}/claimed"] = pack(layer.claimed)
    for index, task in enumerate(network.finished.values()):
        for step, mask in task.masks.items():
            tensors[f"task/{index}/mask/{step}"] = pack(mask)
        for step, norm in task.norms.items():
            for part in fields(Norm):
                tensors[f"task/{index}/norm/{step}/{part.name}"] = getattr(norm, part.name)
        for key, value in task.head.items():
            tensors[f"task/{index}/head/{key}"] = value
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def _restored(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[Run, Config]:
    network = MaskedNetwork(
        Plan.from_json(record["backbone"]),
        Preprocessing(**record["preprocessing"]),
        record["density"],
        torch.Generator(),
    )
    shapes = {step.name: step.weight_shape or () for step in network.plan.masked}
    with torch.no_grad():
        for step, layer in network.masked_layers.items():
            layer.weight.copy_(tensors[f"backbone/{step}/weight"])
            layer.scores.copy_(tensors[f"backbone/{step}/scores"])
            layer.claimed.copy_(unpack(tensors[f"backbone/{step}/claimed"], shapes[step]))
    for index, task in enumerate(record["tasks"]):
        prefix = f"task/{index}"
        keys = ("weight", "bias") if network.plan.head_bias else ("weight",)
        network.restore(
            TaskState(
                task["name"],
                tuple(task["classes"]),
                {s: unpack(tensors[f"{prefix}/mask/{s}"], shapes[s]) for s in shapes},
                {
                    step: Norm(*(tensors[f"{prefix}/norm/{step}/{f.name}"] for f in fields(Norm)))
                    for step in network.norm_layers
                },
                {key: tensors[f"{prefix}/head/{key}"] for key in keys},
            )
        )
    matrix = tuple(tuple(float(value) for value in row) for row in record["matrix"])
    if [len(row) for row in matrix] != list(range(1, len(record["tasks"]) + 1)) or not matrix:
        raise ValueError("the accuracy matrix does not fit the tasks")
    run = Run(network, matrix, record["seconds"], record["versions"])
    return run, config_from(record["config"])
