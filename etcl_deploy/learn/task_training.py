"""A task while it is learned: its progress, its optimizer, the best state so far.

At any step a checkpoint of it can be taken and restored in another process. From there on every bit is what it would
have been without the interruption.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from etcl_deploy.config import Learning
from etcl_deploy.core.task import Items
from etcl_deploy.errors import LearningError
from etcl_deploy.network.distributed import ALONE, Batch, Distributed
from etcl_deploy.network.masked_network import MaskedNetwork


@dataclass(frozen=True)
class Checkpoint:
    """All that is needed to go on with a task under way."""

    task: str
    device: str  # the kind of device it was learned on
    numbers: Mapping[str, float | None]
    tensors: Mapping[str, Tensor]

    @property
    def seconds(self) -> float:
        """The time it took so far."""
        return self.numbers.get("seconds") or 0.0

    @property
    def probed(self) -> list[float]:
        """The validation accuracy of every start that was probed, in percent."""
        return [value or 0.0 for key, value in self.numbers.items() if key.startswith("probed/")]


class Shares(NamedTuple):
    """The share of the learning rate for each part: less where a part starts from what another task has learned."""

    backbone: float = 1.0  # weights, scores and normalization
    head: float = 1.0
    extra: float = 1.0  # what is learned outside the network


FULL = Shares()


class TaskTraining:
    """One task under way. Mutable on purpose: it changes at every step."""

    def __init__(
        self,
        network: MaskedNetwork,
        task: str,
        options: Learning,
        position: int,
        parameters: Sequence[Sequence[Tensor]],
        extra: Mapping[str, Tensor] = MappingProxyType({}),
        shares: Shares = FULL,
        group: Distributed = ALONE,
    ) -> None:
        """`parameters` are learned besides head and norms, group by group; `extra` too, outside the network."""
        self.network = network
        self.task = task
        self.options = options
        self.position = position
        self.extra = extra
        self.optimizer = _optimizer(network, parameters, list(extra.values()), options, shares)
        self.epoch = 0  # the one under way, from 0
        self.step = 0  # steps of it that are done
        self.loss = torch.zeros((), device=network.device)  # summed over its items so far
        self.best: float | None = None  # validation accuracy
        self.waited = 0  # epochs since
        self.best_tensors: dict[str, Tensor] = {}
        self.began = time.monotonic()
        self.group = group
        self.probed: Sequence[float] = ()  # the validation accuracy of every start that was probed
        self._seed(0)
        self._left_off: tuple[Tensor, ...] = ()  # states of the random numbers to go on with

    def start_epoch(self, training: Items) -> list[Tensor]:
        """The batches of the epoch; learning rate, order and random numbers all follow from its number alone."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["rate"] * _rate(self.options, self.epoch)
        self._seed(1 + self.epoch)
        batches = training.batches(self.options.batch_size, self.generator)
        if self._left_off:  # in the middle of this epoch
            for generator, state in zip(self._generators(), self._left_off, strict=True):
                generator.set_state(state)
            self._left_off = ()
        else:
            self.loss.zero_()
        return batches

    def read(self, items: Items, batches: Sequence[Tensor]) -> Iterator[Batch]:
        """This process's part of every batch of indices."""
        parts = [batch[self.group.span(len(batch))] for batch in batches]
        for batch, (images, labels) in zip(batches, items.read(parts, self.network.device), strict=True):
            yield Batch(images, labels, len(batch), self.dropout, self.group)

    def forget_gradients(self) -> None:
        """Leave nothing of the step before."""
        self.optimizer.zero_grad()
        for work in self.network.work.values():
            work.forget_gradients()

    def gradients(self) -> list[Tensor]:
        """The gradients of all that the optimizer moves."""
        return [parameter.grad for parameter in self._parameters() if parameter.grad is not None]

    def follow_gradients(self) -> None:
        """Let the optimizer move everything that has a gradient."""
        self.optimizer.step()
        for work in self.network.work.values():
            work.reflect()

    def end_epoch(self, validation: float | None) -> None:
        """Remember how well the epoch went, and go on to the next."""
        if validation is not None and (self.best is None or validation > self.best):
            self.best, self.waited = validation, 0
            if self.options.keep == "best":
                self.best_tensors = {k: v.clone() for k, v in self._learned().items()}
        else:
            self.waited += 1
        self.epoch += 1
        self.step = 0

    @property
    def is_over(self) -> bool:
        """All epochs are done, or validation has not improved for too long."""
        stalled = self.best is not None and 0 < self.options.patience <= self.waited
        return self.epoch >= self.options.epochs or stalled

    def use_best(self) -> None:
        """Go back to the state with the best validation accuracy, if that is what the options keep."""
        for name, tensor in self._learned().items():
            if name in self.best_tensors:
                tensor.copy_(self.best_tensors[name])

    def checkpoint(self) -> Checkpoint:
        """A checkpoint of this step."""
        numbers = {"epoch": self.epoch, "step": self.step, "best": self.best, "waited": self.waited}
        numbers["seconds"] = time.monotonic() - self.began
        numbers |= {f"probed/{index}": value for index, value in enumerate(self.probed)}
        tensors = {f"network/{k}": v for k, v in self._learned().items()}
        tensors |= {f"best/{k}": v for k, v in self.best_tensors.items()}
        tensors |= {"loss": self.loss}
        tensors |= {f"random/{index}": generator.get_state() for index, generator in enumerate(self._generators())}
        for index, parameter in enumerate(self._parameters()):
            state = self.optimizer.state.get(parameter, {})
            tensors |= {f"optimizer/{index}/{k}": v for k, v in state.items() if isinstance(v, Tensor)}
        kind = self.network.device.type
        return Checkpoint(self.task, kind, numbers, {k: v.detach().cpu().clone() for k, v in tensors.items()})

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint."""
        if checkpoint.device != self.network.device.type:
            hint = f"go on with --device {checkpoint.device}"
            raise LearningError(f"task {self.task!r} was left while it was learned on {checkpoint.device}; {hint}")
        numbers, tensors = checkpoint.numbers, checkpoint.tensors
        self.epoch, self.step, self.waited = (int(numbers[k] or 0) for k in ("epoch", "step", "waited"))
        self.best = numbers["best"]
        self.probed = checkpoint.probed
        self.began -= checkpoint.seconds
        for name, tensor in self._learned().items():
            tensor.copy_(tensors[f"network/{name}"])
        self.best_tensors = self._under(tensors, "best/")
        self.loss.copy_(tensors["loss"])
        if self.step:
            self._left_off = tuple(tensors[f"random/{index}"] for index in range(len(self._generators())))
        for index, parameter in enumerate(self._parameters()):
            state = self._under(tensors, f"optimizer/{index}/")
            if state:
                self.optimizer.state[parameter] = state

    def _learned(self) -> dict[str, Tensor]:
        """All tensors that change from step to step, by name."""
        return self.network.learning_tensors() | {f"extra/{k}": v.data for k, v in self.extra.items()}

    def _under(self, tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
        device = self.network.device
        return {k.removeprefix(prefix): v.clone().to(device) for k, v in tensors.items() if k.startswith(prefix)}

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _seed(self, use: int) -> None:
        self.generator = seeded(self.options.seed, self.position, use)
        self.dropout = torch.Generator(self.network.device).manual_seed(self.generator.initial_seed())

    def _generators(self) -> tuple[torch.Generator, ...]:
        return self.generator, self.dropout


def seeded(seed: int, position: int, use: int) -> torch.Generator:
    """A generator for one task and one use, so that no number depends on what was drawn before."""
    return torch.Generator().manual_seed(((seed * 1_000_003 + position) * 100_003 + use) % (1 << 63))


def _optimizer(
    network: MaskedNetwork,
    parameters: Sequence[Sequence[Tensor]],
    extra: Sequence[Tensor],
    options: Learning,
    shares: Shares,
) -> torch.optim.Optimizer:
    # Weights of the backbone are decayed by `MaskTraining.decay`, which spares claimed ones; scores never are.
    head = {"params": list(network.head.values()), "weight_decay": options.weight_decay, "share": shares.head}
    rest = [
        {"params": list(group), "weight_decay": 0.0, "share": shares.backbone}
        for group in (network.norms.parameters(), *parameters)
    ]
    outside = {"params": list(extra), "weight_decay": 0.0, "share": shares.extra}
    groups: list[dict[str, Any]] = [group for group in (head, *rest, outside) if group["params"]]
    for group in groups:
        group["lr"] = group["rate"] = options.learning_rate * group.pop("share")  # lr follows the schedule, rate stays
    if options.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=options.momentum, fused=True)
    return torch.optim.Adam(groups, fused=True)


def _rate(options: Learning, epoch: int) -> float:
    """The factor on the learning rate in an epoch, counted from 0."""
    if options.schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * epoch / options.epochs))
