"""Processes that learn one run together, as `torchrun` starts them: each computes its part of every batch.

Gradients are summed over all processes, batch statistics are those of the whole batch, and every process draws random
numbers for the whole batch. So the result is that of one process with the same batches, up to the order in which
numbers are added. Work that is done once a task (comparing, measuring) each process does for itself; `same` makes sure
that all came to the same.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from etcl_deploy.errors import RunError


@dataclass(frozen=True)
class Distributed:
    """One of `size` processes, counted from 0. The first one writes, and speaks to the user."""

    rank: int = 0
    size: int = 1
    kind: str = "cpu"  # of the device that messages between them start on

    @property
    def first(self) -> bool:
        """True for the process that writes and speaks."""
        return self.rank == 0

    def span(self, count: int) -> slice:
        """This process's part of `count` items; parts differ by one item at most."""
        each, more = divmod(count, self.size)
        start = self.rank * each + min(self.rank, more)
        return slice(start, start + each + (self.rank < more))

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all processes, in one message."""
        if self.size == 1:
            return
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        self._together(dist.all_reduce, flat)
        for tensor, total in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(total.view_as(tensor))

    def any(self, *, wanted: bool) -> bool:
        """True if any process wants it."""
        if self.size == 1:
            return wanted
        votes = torch.tensor([float(wanted)], device=self.kind)
        self.add_up([votes])
        return bool(votes)

    def same(self, value: str, what: str) -> None:
        """Refuse to go on if `value` is not the same for all."""
        if self.size == 1:
            return
        values: list[str] = [""] * self.size
        self._together(dist.all_gather_object, values, value)
        if len(set(values)) > 1:
            other = next(rank for rank, theirs in enumerate(values) if theirs != values[0])
            raise RunError(f"{what} differs between process 0 and process {other}; all need the same machine and data")

    def _together(self, collective: Callable[..., object], *arguments: Any) -> None:
        try:
            collective(*arguments)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            hint = "start all of them again with --resume"
            raise RunError(f"another process of this run has ended; {hint} (process {self.rank}: {reason})") from None


ALONE = Distributed()


@dataclass(frozen=True)
class Batch:
    """Items to take a step with: this process's part of a batch, and what all processes must agree on."""

    images: Tensor
    labels: Tensor
    count: int  # items of the whole batch, over all processes
    generator: torch.Generator  # for dropout; every process draws for the whole batch
    group: Distributed = ALONE

    @property
    def span(self) -> slice:
        """The place of this part in the whole batch."""
        return self.group.span(self.count)

    def mean_loss(self, logits: Tensor) -> Tensor:
        """This process's part of the mean cross entropy of the whole batch; over all processes they add up to it."""
        return F.cross_entropy(logits, self.labels, reduction="sum") / self.count


@contextmanager
def joined(kind: str) -> Iterator[Distributed]:
    """This process among those `torchrun` started, on a `kind` of device; alone, if it did not."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    try:
        yield Distributed(dist.get_rank(), size, kind)
    except RunError:
        # Where one process has ended torchrun asks the others to. This one is about to, and to say why.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise
    finally:
        dist.destroy_process_group()


class Summed(torch.autograd.Function):
    """The sum of a tensor over all processes; a gradient goes back to each of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, distributed: Distributed) -> Tensor:
        """The sum, the same for all."""
        ctx.distributed = distributed
        total = x.clone()
        distributed.add_up([total])
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The gradients of all processes, added up."""
        total = gradients[0].clone()
        ctx.distributed.add_up([total])
        return total, None


def summed(x: Tensor, distributed: Distributed) -> Tensor:
    """The sum of a tensor over all processes, to be differentiated."""
    total: Tensor = Summed.apply(x, distributed)  # type: ignore[no-untyped-call]
    return total
