"""Every operation of a plan as ONNX operators of opset 17, and a whole network of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod, sqrt
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from etcl_deploy.core.operations import Shape, StepSettings, as_pair
from etcl_deploy.core.plan import INPUT, Plan, Step
from etcl_deploy.core.preprocessing import Preprocessing

Attributes = dict[str, Any]

OPSET = 17  # the oldest with everything used here, so the widest choice of devices
IR_VERSION = 8


class Graph:
    """Nodes and initializers, added in order."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def constant(self, name: str, value: Tensor | np.ndarray) -> str:
        """Add a tensor; gives its name."""
        array = value.numpy() if isinstance(value, Tensor) else value
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def add(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Add a node; gives the name of its result."""
        self.nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output


def write_network(graph: Graph, plan: Plan, preprocessing: Preprocessing, weights: Mapping[str, Tensor]) -> str:
    """Add all steps of a plan, from the uint8 input `image` on; returns the name of the features."""
    names = {INPUT: _normalize(graph, preprocessing)}
    for step in plan.steps:
        inputs = [names[name] for name in step.inputs]
        weight, bias = (weights.get(f"{step.name}.{part}") for part in ("weight", "bias"))
        names[step.name] = write_step(graph, step, f"step/{step.name}", inputs, plan.shapes[step.name], weight, bias)
    return names[plan.steps[-1].name]


def as_model(
    graph: Graph, preprocessing: Preprocessing, outputs: Mapping[str, int | str], opset: int = OPSET
) -> onnx.ModelProto:
    """The model of a graph that takes uint8 `image`; `outputs` names its outputs and the length of their rows."""
    image: list[str | int | None] = ["batch", *preprocessing.shape]
    described = helper.make_graph(
        graph.nodes,
        "etcl",
        [helper.make_tensor_value_info("image", TensorProto.UINT8, image)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", count]) for name, count in outputs.items()],
        graph.initializers,
    )
    opsets = [helper.make_opsetid("", opset)]
    written = max(IR_VERSION, helper.find_min_ir_version_for(opsets))
    return helper.make_model(described, opset_imports=opsets, ir_version=written, producer_name="etcl-deploy")


def _normalize(graph: Graph, preprocessing: Preprocessing) -> str:
    """uint8 NHWC to float NCHW, scaled and shifted as the preprocessing says."""
    x = graph.add("Cast", ["image"], "image_float", to=TensorProto.FLOAT)
    x = graph.add("Transpose", [x], "image_nchw", perm=[0, 3, 1, 2])
    scale = graph.constant("image_scale", np.array(preprocessing.scale, np.float32))
    shift = graph.constant("image_shift", np.array(preprocessing.shift, np.float32))
    return graph.add("Add", [graph.add("Mul", [x, scale], "image_scaled"), shift], "image_normal")


def write_step(
    graph: Graph, step: Step, name: str, inputs: list[str], shape: Shape, weight: Tensor | None, bias: Tensor | None
) -> str:
    """Add a step that gives `[batch, *shape]`; returns the name of its result."""
    if step.op in _NAMED:
        operator, attributes = _NAMED[step.op]
        tensors = [
            graph.constant(f"{name}.{part}", tensor)
            for part, tensor in (("weight", weight), ("bias", bias))
            if tensor is not None
        ]
        return graph.add(operator, [*inputs, *tensors], name, **attributes(step.settings))
    if step.op in _COMPOSED:
        return _COMPOSED[step.op](graph, inputs[0], name)
    assert weight is not None
    if step.op == "linear":
        return write_linear(graph, inputs[0], name, weight, bias)
    if step.op == "bias":
        return _shift(graph, inputs[0], name, weight, shape)
    assert bias is not None
    if step.op == "layer_norm":
        scale = graph.constant(f"{name}.weight", weight.view(shape))
        shift = graph.constant(f"{name}.bias", bias.view(shape))
        eps = step.settings["eps"]
        return graph.add("LayerNormalization", [inputs[0], scale, shift], name, axis=1, epsilon=eps)
    x = _standardize(graph, inputs[0], name, shape, step.settings) if step.op == "group_norm" else inputs[0]
    scale = graph.constant(f"{name}.weight", _along_channels(weight, shape))
    return _shift(graph, graph.add("Mul", [x, scale], f"{name}.scaled"), name, bias, shape)


def write_linear(graph: Graph, x: str, name: str, weight: Tensor, bias: Tensor | None) -> str:
    """Add a linear layer; returns the name of its result."""
    inputs = [x, graph.constant(f"{name}.weight", weight)]
    if bias is not None:
        inputs.append(graph.constant(f"{name}.bias", bias))
    return graph.add("Gemm", inputs, name, transB=1)


def _shift(graph: Graph, x: str, name: str, values: Tensor, shape: Shape) -> str:
    return graph.add("Add", [x, graph.constant(f"{name}.bias", _along_channels(values, shape))], name)


def _along_channels(values: Tensor, shape: Shape) -> Tensor:
    return values.view((1, -1) + (1,) * (len(shape) - 1))


def _standardize(graph: Graph, x: str, name: str, shape: Shape, s: StepSettings) -> str:
    """Give every group of channels mean 0 and variance 1, each as one channel of InstanceNormalization."""
    groups = s["groups"]
    apart = graph.constant(f"{name}.apart", np.array([-1, groups, prod(shape) // groups]))
    together = graph.constant(f"{name}.together", np.array([-1, *shape]))
    one = graph.constant(f"{name}.one", np.ones(groups, np.float32))
    zero = graph.constant(f"{name}.zero", np.zeros(groups, np.float32))
    x = graph.add("Reshape", [x, apart], f"{name}.groups")
    x = graph.add("InstanceNormalization", [x, one, zero], f"{name}.standard", epsilon=s["eps"])
    return graph.add("Reshape", [x, together], f"{name}.channels")


def _relu6(graph: Graph, x: str, name: str) -> str:
    low = graph.constant(f"{name}.low", np.array(0, np.float32))
    high = graph.constant(f"{name}.high", np.array(6, np.float32))
    return graph.add("Clip", [x, low, high], name)


def _gelu(graph: Graph, x: str, name: str) -> str:
    """x * (1 + erf(x / sqrt 2)) / 2"""
    root, half, one = (
        graph.constant(f"{name}.{part}", np.array(value, np.float32))
        for part, value in (("root", 1 / sqrt(2)), ("half", 0.5), ("one", 1))
    )
    erf = graph.add("Erf", [graph.add("Mul", [x, root], f"{name}.argument")], f"{name}.erf")
    share = graph.add("Mul", [graph.add("Add", [erf, one], f"{name}.sum"), half], f"{name}.share")
    return graph.add("Mul", [x, share], name)


def _silu(graph: Graph, x: str, name: str) -> str:
    return graph.add("Mul", [x, graph.add("Sigmoid", [x], f"{name}.share")], name)


def _window(s: StepSettings) -> Attributes:
    return {
        "kernel_shape": [*as_pair(s["kernel"])],
        "strides": [*as_pair(s["stride"])],
        "pads": [*as_pair(s["padding"])] * 2,
    }


def _convolution(s: StepSettings) -> Attributes:
    return {**_window(s), "dilations": [*as_pair(s["dilation"])], "group": s["groups"]}


def _nothing(_: StepSettings) -> Attributes:
    return {}


# Plan operation -> ONNX operator and its attributes, for steps that are one operator.
_NAMED: dict[str, tuple[str, Callable[[StepSettings], Attributes]]] = {
    "conv2d": ("Conv", _convolution),
    "max_pool2d": ("MaxPool", _window),
    "avg_pool2d": ("AveragePool", lambda s: {**_window(s), "count_include_pad": 1}),
    "relu": ("Relu", _nothing),
    "leaky_relu": ("LeakyRelu", lambda s: {"alpha": s["slope"]}),
    "elu": ("Elu", lambda s: {"alpha": s["alpha"]}),
    "hardswish": ("HardSwish", _nothing),
    "tanh": ("Tanh", _nothing),
    "sigmoid": ("Sigmoid", _nothing),
    "flatten": ("Flatten", _nothing),
    "add": ("Add", _nothing),
    "concat": ("Concat", lambda s: {"axis": 1}),
}
# The same for activations that take several operators.
_COMPOSED: dict[str, Callable[[Graph, str, str], str]] = {"relu6": _relu6, "gelu": _gelu, "silu": _silu}
