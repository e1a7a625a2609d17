"""Readers of torch's layers: the steps of a plan that each stands for."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from etcl_deploy.core.operations import Pair
from etcl_deploy.network.builder import single
from etcl_deploy.network.tracing import torch_functions as calls
from etcl_deploy.network.tracing.torch_functions import OpSpec, StepSpec, Value, pair, refuse_if


def kind_of(layer: nn.Module) -> type[nn.Module] | None:
    """The known kind that computes what `layer` computes: its own, or the one it is a mere subclass of."""
    for kind in type(layer).__mro__:
        if kind in LAYERS:
            own = (getattr(type(layer), name, None) for name in _COMPUTING)
            same = all(a is b for a, b in zip(own, (getattr(kind, name, None) for name in _COMPUTING), strict=True))
            return kind if same else None
    return None


def read_layer(layer: nn.Module, x: Value) -> StepSpec:
    """The steps of a layer of a known kind."""
    kind = kind_of(layer)
    assert kind is not None
    refuse_if(parametrize.is_parametrized(layer), "its weight is computed (parametrization)")
    hooked = layer._forward_hooks or layer._forward_pre_hooks
    refuse_if(bool(hooked), "it has hooks, which a mask would not see")
    return LAYERS[kind](layer, x)


_COMPUTING = ("__call__", "forward", "_conv_forward")


def _with_bias(x: Value, part: OpSpec, bias: Tensor | None) -> StepSpec:
    """A masked layer, and its bias as a masked step of its own."""
    biases = () if bias is None else (OpSpec("bias", {"features": len(bias)}, bias),)
    return StepSpec((x,), (part, *biases))


def _conv2d(layer: nn.Conv2d, x: Value) -> StepSpec:
    padding = _conv_padding(layer)
    refuse_if(padding != 0 and layer.padding_mode != "zeros", f"padding_mode is {layer.padding_mode!r}, not 'zeros'")
    sizes = {
        "in": layer.in_channels,
        "out": layer.out_channels,
        "kernel": pair(layer.kernel_size),
        "stride": pair(layer.stride),
        "padding": padding,
        "dilation": pair(layer.dilation),
        "groups": layer.groups,
    }
    return _with_bias(x, OpSpec("conv2d", sizes, layer.weight), layer.bias)


def _conv_padding(layer: nn.Conv2d) -> int | Pair:
    if not isinstance(layer.padding, str):
        return pair(layer.padding)
    if layer.padding == "valid":
        return 0
    reach = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    refuse_if(any(r % 2 for r in reach), "padding 'same' pads one side more than the other here")
    return single((reach[0] // 2, reach[1] // 2))


def _linear(layer: nn.Linear, x: Value) -> StepSpec:
    part = OpSpec("linear", {"in": layer.in_features, "out": layer.out_features}, layer.weight)
    return _with_bias(x, part, layer.bias)


def _batch_norm(layer: nn.BatchNorm1d | nn.BatchNorm2d, x: Value) -> StepSpec:
    return StepSpec((x,), (OpSpec("norm", {"features": layer.num_features, "eps": layer.eps}),))


def _group_norm(layer: nn.GroupNorm, x: Value) -> StepSpec:
    sizes = {"features": layer.num_channels, "groups": layer.num_groups, "eps": layer.eps}
    return StepSpec((x,), (OpSpec("group_norm", sizes),))


def _instance_norm(layer: nn.InstanceNorm2d, x: Value) -> StepSpec:
    refuse_if(layer.track_running_stats, "it keeps running statistics of single items (track_running_stats)")
    sizes = {"features": layer.num_features, "groups": layer.num_features, "eps": layer.eps}
    return StepSpec((x,), (OpSpec("group_norm", sizes),))


def _layer_norm(layer: nn.LayerNorm, x: Value) -> StepSpec:
    shape = list(layer.normalized_shape)
    refuse_if(tuple(shape) != x.shape, f"it normalizes {shape} of {list(x.shape)}; only the whole item can be")
    return StepSpec((x,), (OpSpec("layer_norm", {"features": prod(shape), "eps": layer.eps}),))


# Each reader is asked with the layer and what it reads.
LAYERS: dict[type[nn.Module], Callable[[Any, Value], StepSpec]] = {
    nn.Conv2d: _conv2d,
    nn.Linear: _linear,
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.GroupNorm: _group_norm,
    nn.InstanceNorm2d: _instance_norm,
    nn.LayerNorm: _layer_norm,
    nn.MaxPool2d: lambda m, x: calls.read_max_pool2d(
        x, m.kernel_size, m.stride, m.padding, m.dilation, m.ceil_mode, m.return_indices
    ),
    nn.AvgPool2d: lambda m, x: calls.read_avg_pool2d(
        x, m.kernel_size, m.stride, m.padding, m.ceil_mode, m.count_include_pad, m.divisor_override
    ),
    nn.AdaptiveAvgPool2d: lambda m, x: calls.adaptive("avg_pool2d")(x, m.output_size),
    nn.AdaptiveMaxPool2d: lambda m, x: calls.adaptive("max_pool2d")(x, m.output_size, m.return_indices),
    nn.ReLU: lambda m, x: calls.simple("relu")(x),
    nn.ReLU6: lambda m, x: calls.simple("relu6")(x),
    nn.LeakyReLU: lambda m, x: calls.read_leaky_relu(x, m.negative_slope),
    nn.ELU: lambda m, x: calls.read_elu(x, m.alpha),
    nn.GELU: lambda m, x: calls.read_gelu(x, m.approximate),
    nn.SiLU: lambda m, x: calls.simple("silu")(x),
    nn.Hardswish: lambda m, x: calls.simple("hardswish")(x),
    nn.Tanh: lambda m, x: calls.simple("tanh")(x),
    nn.Sigmoid: lambda m, x: calls.simple("sigmoid")(x),
    nn.Dropout: lambda m, x: calls.read_dropout(x, m.p),
    nn.Flatten: lambda m, x: calls.reshaped(x, tuple(m(torch.empty(1, *x.shape, device="meta")).shape[1:])),
    nn.Identity: lambda m, x: calls.read_same(x),
}
