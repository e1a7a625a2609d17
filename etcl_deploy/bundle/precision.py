"""Numbers in fewer bits: float32 as it is, float16, or int8 with one scale a row. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

from etcl_deploy.errors import BundleError

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.int8}
LARGEST = 127


def reduce(values: Tensor, precision: str, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Flat float32 values in a precision, and for int8 the scale of every row; `rows` says how long each is."""
    if precision != "int8":
        reduced = values.to(PRECISIONS[precision])
        if not reduced.isfinite().all():
            raise BundleError(f"a weight of {values.abs().max():.3g} does not fit {precision}; fp32 holds it")
        return reduced, None
    row = torch.repeat_interleave(torch.arange(len(rows)), rows)
    largest = torch.zeros(len(rows)).scatter_reduce(0, row, values.abs(), "amax")
    scale = torch.where(largest > 0, largest / LARGEST, 1)
    return (values / scale[row]).round().clamp(-LARGEST, LARGEST).to(torch.int8), scale


def expand(values: Tensor, scale: Tensor | None, rows: Tensor) -> Tensor:
    """The float32 values that reduced ones stand for; what is in float32 already is not copied."""
    if scale is None:
        return values.float()
    return values.float() * torch.repeat_interleave(scale, rows)
