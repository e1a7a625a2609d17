"""Bundles made up from random numbers: nothing is learned, everything is there. And files, taken apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from etcl_deploy.bundle import format
from etcl_deploy.bundle.bundle import Bundle, BundledTask
from etcl_deploy.bundle.layout import Layout
from etcl_deploy.bundle.precision import reduced_head, reduced_weights
from etcl_deploy.core.preprocessing import Preprocessing
from etcl_deploy.network.backbones import BACKBONES


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
