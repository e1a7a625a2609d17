"""A learned network to the bytes of a bundle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from etcl_deploy.bundle import bundle
from etcl_deploy.bundle.codec import pack
from etcl_deploy.errors import ExportError
from etcl_deploy.learn import masks
from etcl_deploy.learn.network import MaskedNetwork, TaskState
from etcl_deploy.plan import Plan


def bundle_bytes(
    network: MaskedNetwork,
    backbone: str,
    accuracies: Mapping[str, float | None],
    about: Mapping[str, Any],
) -> bytes:
    """The bundle of every finished task; `about` says where it comes from. Same network, same bytes."""
    states = list(network.finished.values())
    alone = [state.name for state in states if state.weights]
    if alone:
        raise ExportError(f"task {alone[0]!r} has a whole network of its own (method one): there is nothing to share")
    weights = {
        # What no task selects is noise: zero, so that it neither tells anything nor changes the file.
        step: torch.where(masks.union(state.masks[step] for state in states), layer.weight.detach(), 0)
        for step, layer in network.masked_layers.items()
    }
    plan = network.plan.without(network.plan.dropouts)
    tasks = {name: _bundled(plan, state, accuracies.get(name)) for name, state in network.finished.items()}
    return bundle.to_bytes(backbone, plan, network.preprocessing, weights, tasks, about)


def _bundled(plan: Plan, state: TaskState, accuracy: float | None) -> bundle.BundledTask:
    return bundle.BundledTask(
        state.name,
        state.classes,
        masks.density(state.masks.values()),
        accuracy,
        {step: pack(mask) for step, mask in state.masks.items()},
        {step.name: state.norms[step.name].as_affine(step.settings["eps"]) for step in plan.norms},
        state.head,
    )
