"""HAT: Hard Attention to the Task (Serrà et al., ICML 2018).

Every unit (channel) has a gate a task, `sigmoid(s * e)`, which is learned with the weights and hardens as `s` grows
within each epoch. A unit whose gate is open at the end belongs to the task. Hard gates are masks: a weight is the
task's if the units at both of its ends are, so that a finished task is like one of any other method with masks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from etcl_deploy.config import Learning
from etcl_deploy.core.plan import INPUT, Plan, Step
from etcl_deploy.learn.methods.method import Method, TaskContext
from etcl_deploy.learn.task_record import TaskRecord
from etcl_deploy.learn.task_training import Shares, TaskTraining
from etcl_deploy.network.distributed import Batch
from etcl_deploy.network.masked_network import MaskedNetwork

LIMIT = 6.0  # of an embedding: beyond it the gate has no gradient to speak of
STEEPEST = 50.0  # of `s * e` where its hyperbolic cosine is taken

# Steps that keep a closed channel at zero, and each channel apart.
KEEP_ZERO = frozenset(
    ("relu", "relu6", "leaky_relu", "elu", "gelu", "silu", "hardswish", "tanh", "dropout", "max_pool2d", "avg_pool2d")
)


class Hat(Method):
    """Gates, a price on units no earlier task uses, and no change to weights between units earlier tasks use."""

    forgets = False

    def __init__(self, network: MaskedNetwork, options: Learning) -> None:
        super().__init__(network, options)
        self._chains = unit_chains(network.plan)
        self._ends = {step: chain[-1] for step, chain in self._chains.items()}

    def begin(self, context: TaskContext) -> TaskTraining:
        """Draw the embeddings `e` of the task's gates."""
        device = self.network.device
        sizes = {step: len(self.network.masked_layers[step].weight) for step in self._ends}
        self._used = {step: torch.zeros(size, dtype=torch.bool, device=device) for step, size in sizes.items()}
        self._used |= self.memory
        self._embeddings = {
            step: torch.randn(size, generator=context.generator).to(device).requires_grad_()
            for step, size in sizes.items()
        }
        self.network.begin(context.task.name, context.task.classes, context.generator, density=self.density)
        self.before_batch(1.0)
        return self.prepare(context, Shares(extra=self.options.others.hat_rate), self._embeddings)

    def before_batch(self, share: float) -> None:
        """Harden the gates as the epoch goes on."""
        most = self.options.others.hat_steepness
        self._steepness = 1 / most + (most - 1 / most) * share
        gates = {step: torch.sigmoid(self._steepness * e) for step, e in self._embeddings.items()}
        self.network.gates = {self._ends[step]: gate for step, gate in gates.items()}

    def penalty(self) -> Tensor | None:
        """The share of units, of those no earlier task uses, that this one opens."""
        gates = torch.cat([self.network.gates[end] for end in self._ends.values()])
        free = torch.cat([~used for used in self._used.values()]).float()
        return self.options.others.hat_thrift * (gates * free).sum() / free.sum().clamp_min(1)

    @torch.no_grad()
    def add_gradients(self, batch: Batch) -> None:
        """Make up for the flatness of steep gates (Eq. 5 of the paper)."""
        most, s = self.options.others.hat_steepness, self._steepness
        for e in self._embeddings.values():
            assert e.grad is not None
            steep = (s * e).clamp(-STEEPEST, STEEPEST)
            e.grad *= most / s * (torch.cosh(steep) + 1) / (torch.cosh(e) + 1)

    @torch.no_grad()
    def after_step(self) -> None:
        """Keep the embeddings where gates still have a gradient."""
        for e in self._embeddings.values():
            e.clamp_(-LIMIT, LIMIT)

    def finish(self, context: TaskContext) -> TaskRecord:
        """Turn the gates into masks; weights between units that any task uses are claimed."""
        network, plan = self.network, self.network.plan
        opened = {step: e.detach() > 0 for step, e in self._embeddings.items()}
        used = {step: self._used[step] | gate for step, gate in opened.items()}
        for step, end in self._ends.items():
            if end in network.norm_layers:  # a closed channel would come out of its normalization as a constant
                norm = network.norm_layers[end]
                with torch.no_grad():
                    norm.gamma.mul_(opened[step])
                    norm.beta.mul_(opened[step])
        record = self.freeze(context, masks_of(plan, self._chains, opened), masks_of(plan, self._chains, used))
        self.memory = used
        return record


def unit_chains(plan: Plan) -> dict[str, tuple[str, ...]]:
    """For every layer with units its own step and those of its bias and normalization, after which they are gated."""
    return {layer: (layer, *(step.name for step in chain)) for layer, chain in plan.chains.items()}


def masks_of(plan: Plan, chains: Mapping[str, tuple[str, ...]], units: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights between units, by step: those whose row and whose column both have one."""
    device = next(iter(units.values())).device
    open_after: dict[str, Tensor] = {INPUT: torch.ones(plan.input[0], dtype=torch.bool, device=device)}
    owner = {name: step for step, chain in chains.items() for name in chain}
    ends = {chain[-1]: step for step, chain in chains.items()}
    masks = {}
    for step in plan.steps:
        inputs = [open_after[name] for name in step.inputs]
        shape = step.weight_shape
        if step.op == "bias":
            own = owner.get(step.name)
            masks[step.name] = units[own].clone() if own else torch.ones(shape or (), dtype=torch.bool, device=device)
        elif shape:
            rows, columns = units[step.name], inputs[0].view(step.settings.get("groups", 1), -1)
            reach = columns.repeat_interleave(len(rows) // len(columns), 0)  # [rows, columns of a row]
            mask = rows.unsqueeze(1) & reach
            masks[step.name] = mask.view(*mask.shape, *([1] * (len(shape) - 2))).expand(shape).contiguous()
        end = ends.get(step.name)
        open_after[step.name] = units[end] if end else _after(step, inputs, plan)
    return masks


def _after(step: Step, inputs: list[Tensor], plan: Plan) -> Tensor:
    """The channels of a step's result that may be other than zero."""
    if step.op in KEEP_ZERO:
        return inputs[0]
    if step.op == "flatten":
        return inputs[0].repeat_interleave(plan.shapes[step.name][0] // len(inputs[0]))
    if step.op == "add":
        return inputs[0] | inputs[1]
    if step.op == "concat":
        return torch.cat(inputs)
    return torch.ones(plan.shapes[step.name][0], dtype=torch.bool, device=inputs[0].device)
