"""Training images moved a little, so that a few hundred items teach more than their exact pixels. Pure."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def moved(images: Tensor, rotation: float, zoom: float, shift: float, drawn: Tensor) -> Tensor:
    """Each image turned by up to `rotation` degrees, scaled by up to `zoom` and moved by up to `shift` of its size.

    Images are `[batch, height, width, channels]` from 0 to 255; float32 comes back. What comes in from outside repeats
    the border. `drawn`, four numbers from 0 to 1 for each image, `[4, batch]`, says how much.
    """
    turn, scale, right, down = 2 * drawn - 1
    angle, scale = turn * math.radians(rotation), 1 + scale * zoom
    cos, sin = angle.cos() * scale, angle.sin() * scale
    # Coordinates run from -1 to 1, so a whole side is 2.
    rows = (torch.stack([cos, -sin, 2 * shift * right], 1), torch.stack([sin, cos, 2 * shift * down], 1))
    transform = torch.stack(rows, 1).to(images.device)
    pixels = images.permute(0, 3, 1, 2).float()
    grid = F.affine_grid(transform, list(pixels.shape), align_corners=False)
    sampled = F.grid_sample(pixels, grid, padding_mode="border", align_corners=False)
    return sampled.permute(0, 2, 3, 1).contiguous()
