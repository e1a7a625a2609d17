"""A run as named tensors, and back: what `store.py` writes to its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import torch
from torch import Tensor

from etcl_deploy.bundle.bits import pack, unpack
from etcl_deploy.learn.task_record import TaskRecord
from etcl_deploy.network.masked_network import MaskedNetwork
from etcl_deploy.network.norms import Norm
from etcl_deploy.network.state import Head, TaskState

Tensors = Mapping[str, Tensor]


def backbone_tensors(network: MaskedNetwork, memory: Tensors) -> Tensors:
    """Weights, scores and claimed bits, and what a method remembers."""
    tensors = {f"memory/{key}": value for key, value in memory.items()}
    for step, layer in network.masked_layers.items():
        tensors[f"{step}/weight"] = layer.weight.detach()
        tensors[f"{step}/scores"] = layer.scores.detach()
        tensors[f"{step}/claimed"] = pack(layer.claimed)
    return tensors


def restore_backbone(network: MaskedNetwork, tensors: Tensors) -> Tensors:
    """Put the tensors back where `backbone_tensors` took them, and give what a method remembers."""
    with torch.no_grad():
        for step, layer in network.masked_layers.items():
            layer.weight.copy_(tensors[f"{step}/weight"])
            layer.scores.copy_(tensors[f"{step}/scores"])
            layer.claimed.copy_(unpack(tensors[f"{step}/claimed"], tuple(layer.weight.shape)))
    return under(tensors, "memory")


def task_tensors(state: TaskState, known: TaskRecord, heads: Mapping[int, Head]) -> Tensors:
    """A finished task, what is known of it, and the heads of earlier tasks (by number) as it left them."""
    tensors = {f"mask/{step}": pack(mask) for step, mask in state.masks.items()}
    for step, norm in state.norms.items():
        tensors |= {f"norm/{step}/{part.name}": getattr(norm, part.name) for part in fields(norm)}
    tensors |= {f"head/{key}": value for key, value in state.head.items()}
    tensors |= {f"weight/{step}": value for step, value in (state.weights or {}).items()}
    for number, head in heads.items():
        tensors |= {f"head_of/{number}/{key}": value for key, value in head.items()}
    return tensors | {f"record/{key}": value for key, value in known.memory.items()}


def task_from(tensors: Tensors, network: MaskedNetwork, name: str, classes: tuple[str, ...]) -> TaskState:
    """The finished task that `task_tensors` took apart."""
    steps = {step.name: step.weight_shape or () for step in network.plan.masked}
    return TaskState(
        name,
        classes,
        {step: unpack(tensors[f"mask/{step}"], shape) for step, shape in steps.items()},
        {step: Norm(*(tensors[f"norm/{step}/{part.name}"] for part in fields(Norm))) for step in network.norm_layers},
        under(tensors, "head"),
        under(tensors, "weight") or None,
    )


def under(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    """The tensors under a prefix, by the rest of their names."""
    return {key.removeprefix(f"{prefix}/"): value for key, value in tensors.items() if key.startswith(f"{prefix}/")}
