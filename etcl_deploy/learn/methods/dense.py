"""Dense networks, for comparison: `one` for each task alone, or a single one that goes on learning.

`ewc`: Elastic Weight Consolidation (Kirkpatrick et al., PNAS 2017), which makes it costly to change weights that matter
to earlier tasks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from etcl_deploy.core.task import Items
from etcl_deploy.learn.methods.method import Method, TaskContext
from etcl_deploy.learn.task_record import TaskRecord
from etcl_deploy.learn.task_training import TaskTraining


class Naive(Method):
    """One network, fine-tuned task by task: what forgetting looks like. Heads and normalization are each task's own."""


class One(Method):
    """A network for each task, from scratch: what forward transfer is measured against."""

    forgets = False

    def begin(self, context: TaskContext) -> TaskTraining:
        """Every task begins with the weights the network had before the first."""
        self._start = {step: layer.weight.detach().clone() for step, layer in self.network.masked_layers.items()}
        return super().begin(context)

    @torch.no_grad()
    def finish(self, context: TaskContext) -> TaskRecord:
        """The task keeps its weights to itself."""
        record = self.freeze(context, claims={}, alone=True)
        for step, weight in self._start.items():
            self.network.masked_layers[step].weight.copy_(weight)
        return record


class Ewc(Method):
    """Fine-tuning with a penalty of `strength / 2 * sum(F_t * (w - w_t)^2)` over earlier tasks t.

    `F_t` is the diagonal of the Fisher information at `w_t`. The sum over tasks is a parabola again, so two numbers a
    weight are remembered, not two a task: the importance `sum F_t`, and the centre, the mean of `w_t` weighted by it.
    """

    def penalty(self) -> Tensor | None:
        """The parabola, up to a constant."""
        if not self.memory:
            return None
        parts = [
            (self.memory[f"{step}/importance"] * (work.used - self.memory[f"{step}/centre"]).square()).sum()
            for step, work in self.network.work.items()
        ]
        return self.options.others.ewc_strength / 2 * torch.stack(parts).sum()

    def finish(self, context: TaskContext) -> TaskRecord:
        """Add what matters to this task to what is remembered."""
        record = self.freeze(context, claims={})
        chosen = torch.randperm(len(context.training), generator=context.generator)[: self.options.others.ewc_items]
        memory: dict[str, Tensor] = {}
        for step, importance in self._importance(context.training[chosen]).items():
            weight = self.network.masked_layers[step].weight.detach()
            before = self.memory.get(f"{step}/importance", torch.zeros_like(weight))
            centre = self.memory.get(f"{step}/centre", weight)
            total = before + importance
            share = torch.where(total > 0, importance / total.clamp_min(torch.finfo(total.dtype).tiny), 0)
            memory[f"{step}/importance"], memory[f"{step}/centre"] = total, torch.lerp(centre, weight, share)
        self.memory = memory
        return record

    def _importance(self, items: Items) -> dict[str, Tensor]:
        """The mean over items of the squared gradient of each one's loss, by step."""
        network = self.network
        layers = network.masked_layers
        importance = {step: torch.zeros_like(layer.weight) for step, layer in layers.items()}
        for images, labels in items.read(torch.split(torch.arange(len(items)), 1), network.device):
            loss = F.cross_entropy(network(images), labels)
            gradients = torch.autograd.grad(loss, [layer.weight for layer in layers.values()])
            for total, gradient in zip(importance.values(), gradients, strict=True):
                total += gradient.square() / len(items)
        return importance
