"""A recording of a module at work: every call in order, and the value it gives.

`torch.fx` records the calls, and a batch sent through them gives their values.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from etcl_deploy.errors import NetworkError
from etcl_deploy.network.builder import Image
from etcl_deploy.network.tracing.torch_functions import SOFTMAX
from etcl_deploy.network.tracing.torch_layers import LAYERS, kind_of

_GATHERING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
ITEMS = 3  # in the batch that is sent through: a number no layer is likely to have as its size


@dataclass(frozen=True)
class Recording:
    """The calls that lead from the images to the features, and their values; the module's own head, if any."""

    images: Tensor
    calls: tuple[fx.Node, ...]
    values: Mapping[fx.Node, Any]
    features: fx.Node
    head: nn.Linear | None


def record(module: nn.Module, image: Image) -> Recording:
    """The calls of the module up to its features, in evaluation mode."""
    images = torch.randn(ITEMS, *image, generator=torch.Generator().manual_seed(0))
    images = next((images.to(p.device, p.dtype) for p in module.parameters()), images)
    with mode(module, training=True):  # so that F.dropout(x, training=self.training) is seen
        graph, defaults = _traced(module)
    features, head = _features(module, graph)
    needed = _needed(graph, features)
    for node in needed:  # before it is run: an unknown layer is a better reason than a shape it does not take
        if node.op == "get_attr" or (node.op == "call_module" and not kind_of(module.get_submodule(str(node.target)))):
            raise unknown(module, node)
    recorder = _Recorder(module, graph)
    with mode(module, training=False), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recorder.run(images.clone(), *defaults)  # a layer may work in place
    return Recording(images, needed, recorder.env, features, head)


def unknown(module: nn.Module, node: fx.Node) -> NetworkError:
    """The error for a call that no step stands for."""
    known = ", ".join(kind.__name__ for kind in LAYERS)
    return NetworkError(f"{describe(module, node)} cannot be masked; known: {known}")


def describe(module: nn.Module, node: fx.Node) -> str:
    """A call as an error names it: the layer and its kind."""
    if node.op == "get_attr":
        return f"layer {node.target!r} (a tensor used directly)"
    called = _called(module, node)
    name = str(node.target) if node.op == "call_module" else node.name
    return f"layer {name!r} ({getattr(called, '__name__', called)})"


class _Tracer(fx.Tracer):
    """Looks into everything but the layers a plan knows, and torch's own."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return kind_of(m) is not None or super().is_leaf_module(m, module_qualified_name)


class _Recorder(fx.Interpreter):
    """Runs a traced graph and keeps every value."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        super().__init__(module, garbage_collect_values=False, graph=graph)
        self.extra_traceback = False

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is F.dropout:  # written down in training mode
            kwargs = {**kwargs, "training": False}
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        try:
            return super().run_node(n)
        except Exception as error:
            raise NetworkError(f"{describe(self.module, n)} fails on these images: {error}") from error


def _traced(module: nn.Module) -> tuple[fx.Graph, list[Any]]:
    """The graph of the module for its first argument, and the defaults of the others."""
    named = [p for p in inspect.signature(module.forward).parameters.values() if p.kind not in _GATHERING]
    missing = [p.name for p in named[1:] if p.default is p.empty]
    if missing or not named:
        taken = ", ".join([named[0].name, *missing]) if named else "nothing by name"
        raise NetworkError(f"the network takes {taken}; it must take a batch of images and no more")
    defaults = {p.name: p.default for p in named[1:]}
    try:
        return _Tracer().trace(module, concrete_args=defaults or None), list(defaults.values())
    except Exception as error:  # it runs the user's code with stand-ins for tensors: anything can happen
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise NetworkError(
            f"{type(module).__name__} cannot be traced: {reason[0]}; what it does must not depend on the data"
        ) from error


def _features(module: nn.Module, graph: fx.Graph) -> tuple[fx.Node, nn.Linear | None]:
    """The node whose value the head sees, and the module's own head if it has one."""
    last = next(node for node in graph.nodes if node.op == "output").args[0]
    if not isinstance(last, fx.Node):
        raise NetworkError(f"the network gives a {type(last).__name__}; it must give one tensor")
    ending = last
    while _called(module, ending) in SOFTMAX | {nn.Softmax, nn.LogSoftmax}:
        ending = ending.all_input_nodes[0]
    if ending.op == "call_module":
        layer = module.get_submodule(str(ending.target))
        if isinstance(layer, nn.Linear) and kind_of(layer) is nn.Linear:
            return ending.all_input_nodes[0], layer
    return last, None


def _needed(graph: fx.Graph, features: fx.Node) -> tuple[fx.Node, ...]:
    """The nodes the features depend on, in order."""
    needed, waiting = set(), [features]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    return tuple(node for node in graph.nodes if node in needed)


def _called(module: nn.Module, node: fx.Node) -> Any:
    """The class, function or method name behind a node."""
    return type(module.get_submodule(str(node.target))) if node.op == "call_module" else node.target


@contextmanager
def mode(module: nn.Module, *, training: bool) -> Iterator[None]:
    """The module in training or evaluation mode, and afterwards every part as it was."""
    before = {part: part.training for part in module.modules()}
    module.train(training)
    try:
        yield
    finally:
        for part, mode in before.items():
            part.training = mode
