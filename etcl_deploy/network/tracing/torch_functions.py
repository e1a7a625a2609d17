"""Readers of torch's functions and methods: the steps of a plan that each stands for.

A reader takes the arguments of the call, with a `Value` in place of every tensor, and gives its `StepSpec`. For a call
that no plan can do it raises a ValueError with the reason.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from etcl_deploy.core.operations import Pair, Shape, StepSettings, fixed_windows
from etcl_deploy.network.builder import single


@dataclass(frozen=True)
class Value:
    """A tensor of the traced network: the step that gives it, and its shape for one item."""

    step: str
    shape: Shape


@dataclass(frozen=True)
class OpSpec:
    """One step of a call: what it does and, for a masked one, the weight it starts from."""

    op: str
    settings: StepSettings
    weight: Tensor | None = None


@dataclass(frozen=True)
class StepSpec:
    """The values a call reads, and the steps it takes one after another; none if it changes nothing."""

    inputs: tuple[Value, ...]
    parts: tuple[OpSpec, ...] = ()


Reader = Callable[..., StepSpec]


def refuse_if(condition: bool, reason: str) -> None:
    """Raise the reason as a ValueError if it applies."""
    if condition:
        raise ValueError(reason)


def pair(value: int | Sequence[int]) -> int | Pair:
    """A size as a setting; torch takes one number, or one or two in a list."""
    if isinstance(value, int):
        return value
    return single((value[0], value[-1]))


def simple(op: str) -> Reader:
    """The reader of an activation without settings."""
    return lambda input, inplace=False: StepSpec((input,), (OpSpec(op, {}),))


def read_same(input: Value, *_: Any, **__: Any) -> StepSpec:
    """A call that changes nothing."""
    return StepSpec((input,))


def read_leaky_relu(input: Value, negative_slope: float = 0.01, inplace: bool = False) -> StepSpec:
    """The step of `F.leaky_relu`."""
    return StepSpec((input,), (OpSpec("leaky_relu", {"slope": float(negative_slope)}),))


def read_elu(input: Value, alpha: float = 1.0, inplace: bool = False) -> StepSpec:
    """The step of `F.elu`."""
    return StepSpec((input,), (OpSpec("elu", {"alpha": float(alpha)}),))


def read_gelu(input: Value, approximate: str = "none") -> StepSpec:
    """The step of `F.gelu`."""
    refuse_if(approximate != "none", f"approximate={approximate!r}; only the exact one can be")
    return StepSpec((input,), (OpSpec("gelu", {}),))


def read_dropout(input: Value, p: float = 0.5, training: bool = True, inplace: bool = False) -> StepSpec:
    """The step of `F.dropout`."""
    if p == 0 or not training:
        return StepSpec((input,))
    percent = round(100 * p)
    whole = abs(percent - 100 * p) < 1e-9 and 1 <= percent <= 99
    refuse_if(not whole, f"p={p}; it must be whole percent from 0.01 to 0.99")
    return StepSpec((input,), (OpSpec("dropout", {"percent": percent}),))


def read_max_pool2d(
    input: Value,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> StepSpec:
    """The step of `F.max_pool2d`."""
    refuse_if(pair(dilation) != 1, "its windows have gaps (dilation)")
    refuse_if(return_indices, "it also gives indices (return_indices)")
    return _pool("max_pool2d", input, kernel_size, stride, padding, ceil_mode)


def read_avg_pool2d(
    input: Value,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> StepSpec:
    """The step of `F.avg_pool2d`."""
    refuse_if(pair(padding) != 0 and not count_include_pad, "it does not count its padding (count_include_pad)")
    refuse_if(divisor_override is not None, "it divides by another number (divisor_override)")
    return _pool("avg_pool2d", input, kernel_size, stride, padding, ceil_mode)


def _pool(
    op: str,
    x: Value,
    kernel: int | Sequence[int],
    stride: int | Sequence[int] | None,
    padding: int | Sequence[int],
    ceil_mode: bool,
) -> StepSpec:
    refuse_if(ceil_mode, "its windows may reach past the padding (ceil_mode)")
    sizes = {"kernel": pair(kernel), "stride": pair(stride or kernel), "padding": pair(padding)}
    return StepSpec((x,), (OpSpec(op, sizes),))


def adaptive(op: str) -> Reader:
    """The reader of adaptive pooling, as the fixed pooling `op` that does the same."""

    def read(input: Value, output_size: int | Sequence[int | None] | None, return_indices: bool = False) -> StepSpec:
        refuse_if(return_indices, "it also gives indices (return_indices)")
        refuse_if(len(input.shape) != 3, "it does not read a map of channels, height and width")
        wanted = output_size if isinstance(output_size, Sequence) else (output_size, output_size)
        size = (input.shape[1], input.shape[2])
        output = (wanted[0] or size[0], wanted[-1] or size[1])
        return _windows(op, input, output)

    return read


def _windows(op: str, x: Value, output: Pair) -> StepSpec:
    size = (x.shape[1], x.shape[2])
    if output == size:
        return StepSpec((x,))
    kernel, stride = fixed_windows(size, output)
    return StepSpec((x,), (OpSpec(op, {"kernel": single(kernel), "stride": single(stride), "padding": 0}),))


def _mean(input: Value, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> StepSpec:
    dims = {d % 4 for d in dim} if isinstance(dim, Sequence) else set()
    refuse_if(len(input.shape) != 3 or dims != {2, 3}, "only the mean over height and width can be")
    pooled = _windows("avg_pool2d", input, (1, 1))
    return pooled if keepdim else StepSpec(pooled.inputs, (*pooled.parts, OpSpec("flatten", {})))


def _add(input: Any, other: Any, *, alpha: float = 1) -> StepSpec:
    refuse_if(not isinstance(input, Value) or not isinstance(other, Value) or alpha != 1, "it adds a constant")
    return StepSpec((input, other), (OpSpec("add", {}),))


def _cat(tensors: Sequence[Value], dim: int = 0) -> StepSpec:
    refuse_if(dim % (len(tensors[0].shape) + 1) != 1, f"it joins along dimension {dim}; only channels can be")
    if len(tensors) == 1:
        return StepSpec(tuple(tensors))
    return StepSpec(tuple(tensors), (OpSpec("concat", {}),))


def reshaped(x: Value, result: Shape) -> StepSpec:
    """The steps of a view or reshape that gives one item the shape `result`."""
    if result == x.shape:
        return StepSpec((x,))
    refuse_if(result != (prod(x.shape),), f"it makes {list(result)} of {list(x.shape)}; only flattening can be")
    return StepSpec((x,), (OpSpec("flatten", {}),))


# Functions by themselves, methods by name.
CALLS: dict[Callable[..., Any] | str, Reader] = {
    **{call: simple("relu") for call in (F.relu, torch.relu, torch.relu_, "relu", "relu_")},
    **{call: simple("tanh") for call in (torch.tanh, torch.tanh_, "tanh", "tanh_")},
    **{call: simple("sigmoid") for call in (torch.sigmoid, torch.sigmoid_, "sigmoid", "sigmoid_")},
    **{call: _add for call in (operator.add, operator.iadd, torch.add, "add", "add_")},
    **{call: _cat for call in (torch.cat, torch.concat, torch.concatenate)},
    **{call: _mean for call in (torch.mean, "mean")},
    **{call: read_same for call in ("contiguous", "clone")},
    F.relu6: simple("relu6"),
    F.leaky_relu: read_leaky_relu,
    F.elu: read_elu,
    F.gelu: read_gelu,
    F.silu: simple("silu"),
    F.hardswish: simple("hardswish"),
    F.dropout: read_dropout,
    F.max_pool2d: read_max_pool2d,
    torch.max_pool2d: read_max_pool2d,
    F.avg_pool2d: read_avg_pool2d,
    F.adaptive_avg_pool2d: adaptive("avg_pool2d"),
    F.adaptive_max_pool2d: adaptive("max_pool2d"),
}
RESHAPES = {torch.flatten, torch.reshape, torch.squeeze, "flatten", "view", "reshape", "squeeze"}
SOFTMAX = {F.softmax, F.log_softmax, torch.softmax, torch.log_softmax, "softmax", "log_softmax"}
