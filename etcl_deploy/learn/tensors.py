"""A run as named tensors, and back: what `directory.py` writes to its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from etcl_deploy.bundle.codec import pack, unpack
from etcl_deploy.learn.knowledge import HeadInputs, Knowledge
from etcl_deploy.learn.network import Head, MaskedNetwork, TaskState
from etcl_deploy.learn.norms import Norm
from etcl_deploy.learn.similarity import Signature

Tensors = Mapping[str, Tensor]
Whole = TypeVar("Whole", Norm, Signature, HeadInputs)


def backbone_tensors(network: MaskedNetwork) -> Tensors:
    """Weights, scores and claimed bits."""
    found = {}
    for step, layer in network.masked_layers.items():
        found[f"{step}/weight"] = layer.weight.detach()
        found[f"{step}/scores"] = layer.scores.detach()
        found[f"{step}/claimed"] = pack(layer.claimed)
    return found


def restore_backbone(network: MaskedNetwork, tensors: Tensors) -> None:
    """Put the tensors back where `backbone_tensors` took them."""
    with torch.no_grad():
        for step, layer in network.masked_layers.items():
            layer.weight.copy_(tensors[f"{step}/weight"])
            layer.scores.copy_(tensors[f"{step}/scores"])
            layer.claimed.copy_(unpack(tensors[f"{step}/claimed"], tuple(layer.weight.shape)))


def task_tensors(state: TaskState, known: Knowledge, heads: Mapping[int, Head]) -> Tensors:
    """A finished task, what is known of it, and the heads of earlier tasks (by number) as it left them."""
    found = {f"mask/{step}": pack(mask) for step, mask in state.masks.items()}
    for step, norm in state.norms.items():
        found |= _parts(f"norm/{step}", norm)
    found |= {f"head/{key}": value for key, value in state.head.items()}
    for number, head in heads.items():
        found |= {f"head_of/{number}/{key}": value for key, value in head.items()}
    for part in ("original", "learned", "inputs"):
        found |= _parts(f"knowledge/{part}", getattr(known, part))
    return found


def task_from(tensors: Tensors, network: MaskedNetwork, name: str, classes: tuple[str, ...]) -> TaskState:
    """The finished task that `task_tensors` took apart."""
    steps = {step.name: step.weight_shape or () for step in network.plan.masked}
    return TaskState(
        name,
        classes,
        {step: unpack(tensors[f"mask/{step}"], shape) for step, shape in steps.items()},
        {step: _whole(Norm, f"norm/{step}", tensors) for step in network.norm_layers},
        head_from(tensors, "head"),
    )


def head_from(tensors: Tensors, prefix: str) -> Head:
    """The head under a prefix."""
    return {key.removeprefix(f"{prefix}/"): value for key, value in tensors.items() if key.startswith(f"{prefix}/")}


def knowledge_from(tensors: Tensors) -> tuple[Signature, Signature, HeadInputs]:
    """Both signatures and the head inputs of a task."""
    on_the_cpu = {name: tensor.cpu() for name, tensor in tensors.items()}  # where signatures are compared
    return (
        _whole(Signature, "knowledge/original", on_the_cpu),
        _whole(Signature, "knowledge/learned", on_the_cpu),
        _whole(HeadInputs, "knowledge/inputs", tensors),
    )


def _parts(prefix: str, value: Any) -> dict[str, Tensor]:
    return {f"{prefix}/{part.name}": getattr(value, part.name) for part in fields(value)}


def _whole(kind: type[Whole], prefix: str, tensors: Tensors) -> Whole:
    return kind(*(tensors[f"{prefix}/{part.name}"] for part in fields(kind)))
