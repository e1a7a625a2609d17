"""One task of a bundle as a plain network: weights baked, normalization folded, no trace of masks."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from etcl_deploy.bundle.bundle import Bundle
from etcl_deploy.bundle.layout import split
from etcl_deploy.operations import NORMS, normalize, weigh
from etcl_deploy.plan import Plan, Step


class Subnet(nn.Module):
    """A task's network: uint8 `[batch, height, width, channels]` in, logits `[batch, classes]` out.

    `plan` is the bundle's without the bias and batch norm steps that were folded into the layer before them;
    `weights` holds, for every step with a weight or normalization, `<step>.weight` and, where it has one or
    something was folded in, `<step>.bias`.
    """

    def __init__(self, bundle: Bundle, plan: Plan, weights: dict[str, Tensor], head: dict[str, Tensor]) -> None:
        super().__init__()
        self.preprocessing = bundle.preprocessing
        self.plan = plan
        self.weights = weights
        self.head = head

    @property
    def nbytes(self) -> int:
        """Bytes its tensors take."""
        return sum(t.nbytes for t in (*self.weights.values(), *self.head.values()))

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits for a batch of prepared images."""
        features = self.plan.run(self.preprocessing.normalize(pixels), self._apply_step)
        return F.linear(features, self.head["weight"], self.head.get("bias"))

    def _apply_step(self, step: Step, x: Tensor) -> Tensor:
        weight, bias = self.weights[f"{step.name}.weight"], self.weights.get(f"{step.name}.bias")
        if step.op not in NORMS:
            return weigh(step.op, step.settings, x, weight, bias)
        assert bias is not None
        return normalize(step.op, step.settings, x, weight, bias)


@torch.no_grad()
def materialize(bundle: Bundle, name: str) -> Subnet:
    """The network of one task."""
    task, plan, layout = bundle.task(name), bundle.plan, bundle.layout
    folded = _foldable(plan)
    selected = split(torch.where(bundle.mask(name), bundle.weights, 0), layout.weights)
    norms = split(task.norm, layout.norms)
    weights: dict[str, Tensor] = {}
    for step in plan.steps:
        if step.name in selected:
            weights[f"{step.name}.weight"] = selected[step.name]
        elif step.name in norms:
            weights[f"{step.name}.weight"], weights[f"{step.name}.bias"] = norms[step.name]
        if step.name in folded:
            _fold(weights, step, folded[step.name])
    return Subnet(bundle, plan.without({*folded, *plan.dropouts}), weights, task.head_values())


def _foldable(plan: Plan) -> dict[str, str]:
    """Bias or batch norm step -> the layer it can be folded into: before it, with nothing else reading in between."""
    layers = {step.name for step in plan.steps if step.op in ("conv2d", "linear")}
    readers = Counter(name for step in plan.steps for name in step.inputs)
    found: dict[str, str] = {}
    for step in plan.steps:
        layer = found.get(step.inputs[0], step.inputs[0])
        if step.op in ("bias", "norm") and layer in layers and readers[step.inputs[0]] == 1:
            found[step.name] = layer
    return found


def _fold(weights: dict[str, Tensor], step: Step, layer: str) -> None:
    """Move what `step` adds and multiplies by into the weight and bias of `layer`."""
    own, bias = weights.pop(f"{step.name}.weight"), weights.get(f"{layer}.bias")
    if step.op == "bias":
        weights[f"{layer}.bias"] = own if bias is None else bias + own
        return
    weight, shift = weights[f"{layer}.weight"], weights.pop(f"{step.name}.bias")
    weights[f"{layer}.weight"] = weight * own.view((-1,) + (1,) * (weight.ndim - 1))
    weights[f"{layer}.bias"] = shift.clone() if bias is None else bias * own + shift
