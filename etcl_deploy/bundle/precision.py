"""Numbers in fewer bits: float32 as it is, float16, or int8 with one scale a row. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from etcl_deploy.bundle.bits import first_owner
from etcl_deploy.bundle.layout import Layout
from etcl_deploy.errors import BundleError

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "int8": torch.int8}
LARGEST = 127


def reduce(values: Tensor, precision: str, row: Tensor, rows: int) -> tuple[Tensor, Tensor | None]:
    """float32 values in a precision, and for int8 the scale of every row; `row` is the row of each value."""
    if not values.isfinite().all():
        raise BundleError("a weight is not finite: the run has learned nothing that could be bundled")
    if precision != "int8":
        reduced = values.to(PRECISIONS[precision])
        if not reduced.isfinite().all():
            raise BundleError(f"a weight of {values.abs().max():.3g} does not fit {precision}; fp32 holds it")
        return reduced, None
    largest = torch.zeros(rows).scatter_reduce(0, row.flatten(), values.abs().flatten(), "amax")
    # A row of numbers too small for a scale gets the scale 1 and becomes 0, so that no scale is 0.
    scale = torch.where(largest > 1e-30, largest / LARGEST, 1)
    return (values / scale[row]).round().clamp(-LARGEST, LARGEST).to(torch.int8), scale


def expand(values: Tensor, scale: Tensor | None) -> Tensor:
    """float32 values from reduced ones and the scale of each; values that are float32 already are not copied."""
    return values.float() if scale is None else values.float().mul_(scale)


def reduced_weights(
    weights: Tensor, precision: str, masks: Sequence[Tensor], layout: Layout
) -> tuple[Tensor, Tensor | None]:
    """The weights of a backbone in a precision; for int8 also the scales [tasks, channels]."""
    owner = first_owner(masks, len(masks), len(weights))
    row = layout.scale_row(owner, len(masks))
    stored, scale = reduce(weights, precision, row, len(masks) * layout.channel_count)
    return stored, None if scale is None else scale.view(len(masks), -1)


def reduced_head(head: Mapping[str, Tensor], precision: str) -> dict[str, Tensor]:
    """A head in a precision; for int8 with the scale of every class."""
    weight = head["weight"]
    row = torch.arange(len(weight)).unsqueeze(1).expand(weight.shape)
    stored, scale = reduce(weight, precision, row, len(weight))
    return {**head, "weight": stored, **({} if scale is None else {"scale": scale})}
