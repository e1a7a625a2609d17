"""Small things tests are made of: bundles of random numbers, tasks, networks, interruptions; files taken apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from etcl_deploy.bundle import format
from etcl_deploy.bundle.bundle import Bundle, BundledTask
from etcl_deploy.bundle.layout import Layout
from etcl_deploy.bundle.precision import reduced_head, reduced_weights
from etcl_deploy.config import Config, Learning
from etcl_deploy.core.preprocessing import Preprocessing
from etcl_deploy.core.task import Task
from etcl_deploy.learn.events import Event, Report
from etcl_deploy.learn.methods import TaskContext
from etcl_deploy.network.backbones import BACKBONES
from etcl_deploy.network.masked_network import MaskedNetwork
from etcl_deploy.network.tracing.trace import mask_network
from etcl_deploy.runs.build import build_network


def made_bundle(
    tasks: int,
    backbone: str = "fcn3",
    width: int = 5,
    side: int = 4,
    density: float = 0.4,
    precision: str = "fp32",
    seed: int = 0,
) -> Bundle:
    """Tasks whose masks each differ a little from the one before; fewer of them are the first of more."""
    chance = torch.Generator().manual_seed(seed)
    preprocessing = Preprocessing(side, side, 1)
    plan = BACKBONES[backbone]((1, side, side), width)
    plan = plan.without(plan.dropouts)
    layout = Layout(plan)
    weights = torch.randn(layout.weight_count, generator=chance) / 4
    masks: list[torch.Tensor] = []
    made = {}
    for number in range(tasks):
        mask = torch.rand(layout.weight_count, generator=chance) < density
        if masks:
            mask = torch.where(torch.rand(layout.weight_count, generator=chance) < 0.2, mask, masks[-1])
        masks.append(mask)
        name, classes = f"täsk {number}", tuple(f"class {n}" for n in range(2 + number % 3))
        head = {key: torch.randn(shape, generator=chance) for key, shape in plan.head_shapes(len(classes)).items()}
        norm = torch.rand(layout.norm_count, generator=chance)
        share = float(mask.float().mean())
        reduced = reduced_head(head, precision)
        made[name] = BundledTask(name, classes, share, 50.0 + number % 49, 51.0 + number % 49, norm, reduced)
    stored, scale = reduced_weights(torch.where(torch.stack(masks).any(0), weights, 0), precision, masks, layout)
    return Bundle(backbone, plan, preprocessing, stored, scale, made, masks, {"recipe": "made up"})


def parts_of(path: Path, key: str = format.BUNDLE) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The manifest and sections of a file, to be changed and given to `format.to_bytes` again."""
    manifest, sections, _ = format.from_bytes(path.read_bytes(), key)
    del manifest["sections"]
    return manifest, {name: tensor.clone() for name, tensor in sections.items()}


def make_tasks(count: int, items: int = 33, size: int = 16) -> list[Task]:
    """Random images with labels a network can tell apart by brightness; an odd number, so batches are uneven."""
    generator = torch.Generator().manual_seed(1)
    tasks = []
    for number in range(count):
        labels = torch.arange(items) % 3
        noise = torch.randint(0, 90, (items, size, size, 1), generator=generator)
        images = (noise + 60 * labels.view(-1, 1, 1, 1)).to(torch.uint8)
        tasks.append(Task(f"t{number}", ("a", "b", "c"), images, labels, images[:9], labels[:9]))
    return tasks


def small(backbone: str, **values: object) -> MaskedNetwork:
    """A narrow network for the images of `make_tasks`."""
    settings = {"backbone": backbone, "size": 16, "channels": 1, "width": 6, "density": 0.3, **values}
    return build_network(Config().with_values(settings))


def with_dropout() -> MaskedNetwork:
    """A small network of the user's with every kind of randomness in it."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.LazyLinear(12)
    )
    module(torch.zeros(2, 1, 16, 16))
    return mask_network(nn.Sequential(module, nn.Linear(12, 3)), (1, 16, 16), density=0.4)


def varied(options: Learning, **transfer: object) -> Learning:
    """The same options with other settings of transfer."""
    return replace(options, transfer=replace(options.transfer, **transfer))  # type: ignore[arg-type]


def context_of(task: Task, seed: int = 0) -> TaskContext:
    """A task to be learned by a method that is called by hand."""
    generator = torch.Generator().manual_seed(seed)
    return TaskContext(task, task.training, task.training, {}, generator, lambda event: None)


def stop_at(kind: type[Event], task: str | None = None) -> Report:
    """Interrupts, as Ctrl-C does, at the first event of a kind; with `task`, the first one of that task."""

    def hear(event: Event) -> None:
        if isinstance(event, kind) and task in (None, event.task):  # type: ignore[union-attr]
            raise KeyboardInterrupt

    return hear


def weights_of(network: MaskedNetwork) -> dict[str, Tensor]:
    """A copy of the weights of every masked layer."""
    return {step: layer.weight.detach().clone() for step, layer in network.masked_layers.items()}


def same_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """True for equal names with equal bits."""
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


# Settings for the tasks of the fixture `photos`.
PHOTO_SETTINGS: dict[str, object] = {
    **{"width": 4, "size": 12, "channels": 1},
    **{"epochs": 2, "batch_size": 8, "similar": "all"},
}
