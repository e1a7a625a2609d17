"""One task of a bundle as a plain network: weights baked, normalization folded, no trace of masks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from etcl_deploy.bundle.bundle import Bundle
from etcl_deploy.bundle.codec import unpack
from etcl_deploy.plan import Plan, Step, weigh


class Subnet(nn.Module):
    """A task's network: uint8 `[batch, height, width, channels]` in, logits `[batch, classes]` out.

    `plan` is the bundle's without the normalization steps that were folded; `weights` holds, for every step
    with a weight, `<step>.weight` and, where something was folded in, `<step>.bias`.
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
        if step.op != "norm":
            return weigh(step, x, weight, bias)
        assert bias is not None
        shape = (1, -1) + (1,) * (x.ndim - 2)
        return x * weight.view(shape) + bias.view(shape)


@torch.no_grad()
def materialize(bundle: Bundle, name: str) -> Subnet:
    """The network of one task."""
    task = bundle.task(name)
    folded = _foldable(bundle.plan)
    weights: dict[str, Tensor] = {}
    for step in bundle.plan.masked:
        mask = unpack(task.masks[step.name], step.weight_shape or ())
        weights[f"{step.name}.weight"] = torch.where(mask, bundle.weights[step.name], 0)
    for norm in bundle.plan.norms:
        scale, shift = task.norms[norm.name]
        if norm.name in folded:
            key = f"{folded[norm.name]}.weight"
            shape = (-1,) + (1,) * (weights[key].ndim - 1)
            weights[key] *= scale.view(shape)
            weights[f"{folded[norm.name]}.bias"] = shift.clone()
        else:
            weights[f"{norm.name}.weight"], weights[f"{norm.name}.bias"] = scale, shift
    head = {key: value.clone() for key, value in task.head.items()}
    return Subnet(bundle, _without(bundle.plan, folded), weights, head)


def _foldable(plan: Plan) -> dict[str, str]:
    """Normalization step -> the layer it can be folded into: its only input, which nothing else reads."""
    steps = {step.name: step for step in plan.steps}
    readers = [name for step in plan.steps for name in step.inputs]
    found = {}
    for norm in plan.norms:
        source = norm.inputs[0]
        if source in steps and steps[source].weight_shape and readers.count(source) == 1:
            found[norm.name] = source
    return found


def _without(plan: Plan, folded: dict[str, str]) -> Plan:
    """The plan with folded steps left out and their readers reading the layer itself."""
    steps = tuple(
        Step(s.name, s.op, tuple(folded.get(i, i) for i in s.inputs), s.settings)
        for s in plan.steps
        if s.name not in folded
    )
    return Plan(plan.input, steps, plan.head_bias)
