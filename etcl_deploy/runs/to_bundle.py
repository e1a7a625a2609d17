"""From a run to a bundle, and to its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from etcl_deploy.bundle.bundle import Bundle, BundledTask, save
from etcl_deploy.bundle.layout import Layout, join
from etcl_deploy.bundle.precision import reduced_head, reduced_weights
from etcl_deploy.core.atomic import check_replaceable
from etcl_deploy.core.task import Items, parts, percent_right
from etcl_deploy.errors import ExportError
from etcl_deploy.network import masks
from etcl_deploy.network.masked_network import MaskedNetwork
from etcl_deploy.network.state import TaskState
from etcl_deploy.runs.store import StoredRun
from etcl_deploy.runtime.predictor import Predictor

BATCH_SIZE = 1024  # items that are answered together


def bundle_of(
    network: MaskedNetwork,
    backbone: str,
    accuracies: Mapping[str, float | None],
    about: Mapping[str, Any],
    precision: str = "fp32",
) -> Bundle:
    """The bundle of every finished task, not yet in a file; `about` says where it comes from."""
    states = list(network.finished.values())
    alone = [state.name for state in states if state.weights]
    if alone:
        raise ExportError(f"task {alone[0]!r} has a whole network of its own (method one): there is nothing to share")
    plan = network.plan.without(network.plan.dropouts)
    layout = Layout(plan)
    weights = {
        # What no task selects is noise: zero, so that it neither tells anything nor changes the file.
        step: torch.where(masks.union(state.masks[step] for state in states), layer.weight.detach(), 0).cpu()
        for step, layer in network.masked_layers.items()
    }
    bits = [torch.cat([state.masks[step].flatten().cpu() for step in layout.weights]) for state in states]
    stored, scale = reduced_weights(join(weights, layout.weights), precision, bits, layout)
    tasks = {state.name: _bundled(layout, state, accuracies.get(state.name), precision) for state in states}
    return Bundle(backbone, plan, network.preprocessing, stored, scale, tasks, bits, about)


def _bundled(layout: Layout, state: TaskState, accuracy: float | None, precision: str) -> BundledTask:
    norms = {step.name: state.norms[step.name].as_affine(step.settings["eps"]).cpu() for step in layout.plan.norms}
    head = {key: value.detach().cpu() for key, value in state.head.items()}
    density = masks.density(state.masks.values())
    norm = join(norms, layout.norms)
    return BundledTask(state.name, state.classes, density, accuracy, accuracy, norm, reduced_head(head, precision))


def bundle_run(
    stored: StoredRun,
    path: Path,
    encoding: str = "coded",
    precision: str = "fp32",
    tests: Mapping[str, Items] | None = None,
) -> None:
    """Write everything needed to predict the run's tasks to `path`.

    In fewer bits than were learned, the accuracy of each task is measured anew on `tests`, by name, as far as they are
    there.
    """
    check_replaceable(path)
    run, config, summary = stored.run, stored.config, stored.summary()
    accuracies = dict(zip(run.tasks, run.matrix[-1], strict=True))
    about = {
        **{key: getattr(summary, key) for key in ("method", "recipe", "seed", "matrix", "acc", "bwt")},
        "config": config.as_json(),
        "versions": dict(run.versions),
    }
    bundle = bundle_of(run.network, config.network.backbone, accuracies, about, precision)
    if precision != "fp32":
        predictor = Predictor(bundle)
        known = [(name, items) for name, items in (tests or {}).items() if name in bundle.tasks]
        measured = {name: _accuracy(predictor, name, items) for name, items in known}
        tasks = {name: replace(task, accuracy=measured.get(name)) for name, task in bundle.tasks.items()}
        bundle = replace(bundle, tasks=tasks)
    save(path, bundle.to_bytes(encoding))


def _accuracy(predictor: Predictor, name: str, items: Items) -> float:
    """The share of items, in percent, that a task gets right."""
    batches = zip(parts(items.images, BATCH_SIZE), parts(items.labels, BATCH_SIZE), strict=True)
    return percent_right((predictor.logits(name, images), labels) for images, labels in batches)
