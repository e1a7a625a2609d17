"""Any network of convolutions, linear layers, normalization, pooling and activations, made maskable.

Every call of the module becomes steps of a plan. Before the plan is believed it is run with the module's own weights
and compared with what the module gives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from etcl_deploy.core.operations import NORMS, apply_weight
from etcl_deploy.core.plan import INPUT, PlanError, Step
from etcl_deploy.core.preprocessing import Preprocessing
from etcl_deploy.errors import NetworkError
from etcl_deploy.network.builder import Image, PlanBuilder
from etcl_deploy.network.masked_network import MaskedNetwork
from etcl_deploy.network.tracing.graph import ITEMS, describe, mode, record, unknown
from etcl_deploy.network.tracing.torch_functions import CALLS, RESHAPES, StepSpec, Value, reshaped
from etcl_deploy.network.tracing.torch_layers import read_layer

TOLERANCE = 1e-3  # of the largest feature


def mask_network(
    module: nn.Module,
    image: Image = (3, 32, 32),
    *,
    preprocessing: Preprocessing | None = None,
    density: float = 0.5,
    seed: int = 0,
) -> MaskedNetwork:
    """A network that learns tasks through masks over the module's weights, which it starts from.

    `image` is channels, height, width. A last Linear is the module's head: every task gets its own instead, and
    its own normalization. Raises NetworkError, naming the layer, for what cannot be masked.
    """
    channels, height, width = image
    try:
        preprocessing = preprocessing or Preprocessing(height, width, channels)
    except ValueError as error:
        raise NetworkError(f"images of {channels} x {height} x {width} cannot be read: {error}") from None
    if preprocessing.shape != (height, width, channels):
        raise NetworkError(f"the preprocessing gives {preprocessing.shape}, not images of {(height, width, channels)}")
    traced = _Trace(module, image)
    network = MaskedNetwork(traced.plan, preprocessing, density, torch.Generator().manual_seed(seed))
    with torch.no_grad():
        for step, layer in network.masked_layers.items():
            layer.weight.copy_(traced.weights[step])
    return network


class _Trace:
    """The plan of a module, and the weights its masked steps start from."""

    def __init__(self, module: nn.Module, image: Image) -> None:
        self.module = module
        self.weights: dict[str, Tensor] = {}
        self._builder = PlanBuilder(image)
        self._steps: dict[fx.Node, str] = {}  # node -> the step that gives its value
        self._norms: dict[str, nn.Module] = {}
        kinds = {parameter.dtype for parameter in module.parameters()} - {torch.float32, torch.float64}
        if kinds:
            raise NetworkError(f"the network has weights of {kinds.pop()}; convert it with .float() first")
        recording = record(module, image)
        self._values = recording.values
        for node in recording.calls:
            self._translate(node)
        if not self.weights:
            raise NetworkError("the network has no layer to mask; a last Linear is its head, which is not masked")
        self.plan = self._builder.plan(head_bias=recording.head is None or recording.head.bias is not None)
        try:
            _ = self.plan.shapes
        except PlanError as error:
            raise NetworkError(f"the network cannot be masked: {error}") from None
        self._compare(recording.images, self._values[recording.features])

    def _translate(self, node: fx.Node) -> None:
        value = self._values[node]
        if node.op == "placeholder":
            self._steps[node] = INPUT
        elif node.op == "call_module" or not _is_number(value):
            try:
                spec = self._spec(node)
                self._steps[node] = self._write(node, spec)
                shape = (ITEMS, *self._builder.shapes[self._steps[node]])
                if not isinstance(value, Tensor) or tuple(value.shape) != shape:
                    raise ValueError(f"it does not give {list(shape)}")
            except (ValueError, TypeError) as error:
                raise NetworkError(f"{describe(self.module, node)} cannot be masked: {error}") from None

    def _spec(self, node: fx.Node) -> StepSpec:
        positional: Any = fx.node.map_arg(node.args, self._resolve)
        named: Any = fx.node.map_arg(node.kwargs, self._resolve)
        if node.op == "call_module":
            return read_layer(self.module.get_submodule(str(node.target)), *positional, **named)
        if node.target in RESHAPES:
            return reshaped(positional[0], tuple(self._values[node].shape[1:]))
        if node.target not in CALLS:
            raise unknown(self.module, node)
        return CALLS[node.target](*positional, **named)

    def _resolve(self, node: fx.Node) -> Any:
        """An argument of a call: a tensor as the step that gives it, a number as itself."""
        value = self._values[node]
        return Value(self._steps[node], self._builder.shapes[self._steps[node]]) if node in self._steps else value

    def _write(self, node: fx.Node, spec: StepSpec) -> str:
        """Add the steps of a call; gives the name of the last."""
        inputs = [value.step for value in spec.inputs]
        base = (str(node.target) if node.op == "call_module" else node.name).replace(".", "_")
        for number, part in enumerate(spec.parts):
            name = self._free_name(base if number == 0 else f"{base}_{part.op}")
            inputs = [self._builder.add(name, part.op, *inputs, **part.settings)]
            if part.weight is not None:
                if any(part.weight is weight for weight in self.weights.values()):
                    raise ValueError("it is used twice, or shares its weight; a masked layer has a weight of its own")
                self.weights[name] = part.weight
            elif part.op in NORMS:
                layer = self.module.get_submodule(str(node.target))
                if layer in self._norms.values():
                    raise ValueError("it is used twice; a normalization has a scale of its own")
                self._norms[name] = layer
        return inputs[0]

    def _free_name(self, wanted: str) -> str:
        """A name no step has, and that a ModuleDict does not use for itself."""
        name, number = wanted, 1
        while name in self._builder.shapes or hasattr(nn.ModuleDict(), name):
            number += 1
            name = f"{wanted}_{number}"
        return name

    @torch.no_grad()
    def _compare(self, images: Tensor, expected: Tensor) -> None:
        """Refuse a plan that does not compute what the module does, for instance in place on what is read later."""

        def apply(step: Step, x: Tensor) -> Tensor:
            if step.op == "dropout":
                return x
            if step.weight_shape:
                return apply_weight(step.op, step.settings, x, self.weights[step.name])
            result: Tensor = self._norms[step.name](x)
            return result

        with mode(self.module, training=False):
            features = self.plan.run(images, apply)
        if not (features - expected).abs().max() <= TOLERANCE * expected.abs().max():
            raise NetworkError("the network cannot be masked: its steps, taken one by one, do not give what it gives")


def _is_number(value: Any) -> bool:
    """True for sizes and tuples of sizes, not for what is computed from pixels."""
    return all(isinstance(v, (int, float)) for v in (value if isinstance(value, tuple) else (value,)))
