"""GPM: Gradient Projection Memory (Saha et al., ICLR 2021).

After each task the space that holds most of every layer's inputs is remembered; later tasks move the weights only
orthogonally to it, so that what the layers answer to those inputs stays as it was.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from etcl_deploy.core.operations import as_pair
from etcl_deploy.core.plan import Step
from etcl_deploy.core.task import load
from etcl_deploy.learn.methods.method import Method, TaskContext
from etcl_deploy.learn.projection import extended, outside
from etcl_deploy.learn.task_record import TaskRecord
from etcl_deploy.learn.task_training import TaskTraining
from etcl_deploy.network.layers import MaskedLayer

MAX_VECTORS = 20_000  # vectors of a layer's inputs the space is taken from: patches of images are many


class Gpm(Method):
    """Fine-tuning outside the remembered spaces. Not the gradient is projected but each step: the optimizer is free."""

    def begin(self, context: TaskContext) -> TaskTraining:
        """Make room for the weights before a step."""
        layers = self.network.masked_layers
        self._before = {step: torch.empty_like(layers[step].weight) for step in self.memory}
        return super().begin(context)

    @torch.no_grad()
    def before_batch(self, share: float) -> None:
        """Remember the weights as they are before the step."""
        for step, before in self._before.items():
            before.copy_(self.network.masked_layers[step].weight)

    @torch.no_grad()
    def after_step(self) -> None:
        """Take back what the step did inside the remembered spaces."""
        for step, space in self.memory.items():
            weight, before = self.network.masked_layers[step].weight, self._before[step]
            moved = (weight - before).view(len(weight), -1)
            weight.copy_(before + outside(moved, space).view_as(weight))

    def finish(self, context: TaskContext) -> TaskRecord:
        """Add the inputs of every layer to its space."""
        record = self.freeze(context, claims={})
        chosen = torch.randperm(len(context.training), generator=context.generator)[: self.options.others.gpm_items]
        inputs = self._inputs(load(context.training.images, chosen), context.generator)
        energy = self.options.others.gpm_energy
        self.memory = {step: extended(self.memory.get(step), seen, energy) for step, seen in inputs.items()}
        return record

    @torch.no_grad()
    def _inputs(self, images: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """The input vectors of every layer, `[vectors, columns of the weight]`, by step."""
        inputs: dict[str, Tensor] = {}

        def collect(layer: MaskedLayer, x: Tensor) -> None:
            seen = _columns(layer.step, x)
            inputs[layer.step.name] = seen[torch.randperm(len(seen), generator=generator)[:MAX_VECTORS].to(seen.device)]

        hooks = [
            layer.register_forward_pre_hook(lambda layer, args: collect(layer, args[0]))
            for layer in self.network.masked_layers.values()
        ]
        try:
            self.network.features(images.to(self.network.device))
        finally:
            for hook in hooks:
                hook.remove()
        return inputs


def _columns(step: Step, x: Tensor) -> Tensor:
    """A layer's inputs as vectors; a row of its weight, flattened, is multiplied with each of them."""
    if step.op == "linear":
        return x
    if step.op == "bias":
        return torch.ones(1, 1, device=x.device)  # whatever comes in, it is added once
    s = step.settings
    patches = F.unfold(x, as_pair(s["kernel"]), as_pair(s["dilation"]), as_pair(s["padding"]), as_pair(s["stride"]))
    columns = s["in"] // s["groups"] * as_pair(s["kernel"])[0] * as_pair(s["kernel"])[1]
    return patches.transpose(1, 2).reshape(-1, columns)
