"""One task of a bundle as a stand-alone ONNX file.

The graph is written from the plan, step by step, rather than traced: it takes milliseconds, holds exactly the
operators below, and has no dependency on the exporter of one torch version. Nothing is believed: every file is run
in onnxruntime and compared before it gets its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from etcl_deploy import atomic
from etcl_deploy.bundle.bundle import Bundle
from etcl_deploy.errors import ExportError
from etcl_deploy.export.parity import Parity, check_parity, seeded_images
from etcl_deploy.plan import INPUT, Settings, Step
from etcl_deploy.runtime.subnet import Subnet, materialize

OPSET = 17  # the oldest with everything used here, so the widest choice of devices
IR_VERSION = 8


@dataclass(frozen=True)
class OnnxReport:
    """What was written, and how it compared."""

    file: str
    task: str
    bytes: int
    opset: int
    parity: Parity


def export_task(bundle: Bundle, task: str, path: str | Path, pixels: Tensor | None = None) -> OnnxReport:
    """Write `task` to `path` once it answers like the bundle, on `pixels` (prepared images) or seeded ones."""
    path = Path(path)
    if path.is_dir():
        raise ExportError(f"{path} is a directory; name a file ending in .onnx")
    subnet = materialize(bundle, task)
    model = _model(bundle, task, subnet)
    with atomic.replacing(path) as temporary:
        temporary.write_bytes(model.SerializeToString(deterministic=True))
        try:
            onnx.checker.check_model(str(temporary), full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            raise ExportError(f"the graph of task {task!r} is not valid ONNX: {error}") from None
        images = seeded_images(bundle.preprocessing) if pixels is None else pixels
        parity = check_parity(subnet, temporary, images)
    return OnnxReport(str(path), task, path.stat().st_size, OPSET, parity)


class _Graph:
    """Nodes and initializers, added in order."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def constant(self, name: str, value: Tensor | np.ndarray) -> str:
        array = value.numpy() if isinstance(value, Tensor) else value
        self.initializers.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def add(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output


def _conv(s: Settings) -> dict[str, list[int]]:
    return {"strides": [s["stride"]] * 2, "pads": [s["padding"]] * 4}


def _pool(s: Settings) -> dict[str, list[int]]:
    return {"kernel_shape": [s["kernel"]] * 2, "strides": [s["stride"]] * 2}


# Plan operation -> ONNX operator and its attributes, for steps that need nothing but their inputs and weights.
OPERATORS: dict[str, tuple[str, Callable[[Settings], dict[str, list[int]]]]] = {
    "conv2d": ("Conv", _conv),
    "relu": ("Relu", lambda s: {}),
    "avg_pool2d": ("AveragePool", _pool),
    "flatten": ("Flatten", lambda s: {}),
    "add": ("Add", lambda s: {}),
}


def _model(bundle: Bundle, task: str, subnet: Subnet) -> onnx.ModelProto:
    graph = _Graph()
    names = {INPUT: _normalize(graph, subnet)}
    for step in subnet.plan.steps:
        inputs = [names[name] for name in step.inputs]
        names[step.name] = _write_step(graph, step, f"step/{step.name}", inputs, subnet)
    features = names[subnet.plan.steps[-1].name]
    logits = _linear(graph, features, "logits", subnet.head["weight"], subnet.head.get("bias"))
    graph.add("Softmax", [logits], "probabilities", axis=1)
    height, width, channels = bundle.preprocessing.shape
    classes = len(bundle.task(task).classes)
    image: list[str | int | None] = ["batch", height, width, channels]
    described = helper.make_graph(
        graph.nodes,
        "etcl",
        [helper.make_tensor_value_info("image", TensorProto.UINT8, image)],
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", classes])
            for name in ("probabilities", "logits")
        ],
        graph.initializers,
    )
    model = helper.make_model(
        described,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="etcl-deploy",
    )
    helper.set_model_props(model, _metadata(bundle, task))
    return model


def _normalize(graph: _Graph, subnet: Subnet) -> str:
    """uint8 NHWC to float NCHW, scaled and shifted as the preprocessing says."""
    x = graph.add("Cast", ["image"], "image_float", to=TensorProto.FLOAT)
    x = graph.add("Transpose", [x], "image_nchw", perm=[0, 3, 1, 2])
    scale = graph.constant("image_scale", np.array(subnet.preprocessing.scale, np.float32))
    shift = graph.constant("image_shift", np.array(subnet.preprocessing.shift, np.float32))
    return graph.add("Add", [graph.add("Mul", [x, scale], "image_scaled"), shift], "image_normal")


def _write_step(graph: _Graph, step: Step, name: str, inputs: list[str], subnet: Subnet) -> str:
    weight, bias = (
        subnet.weights.get(f"{step.name}.weight"),
        subnet.weights.get(f"{step.name}.bias"),
    )
    if step.op == "linear":
        assert weight is not None
        return _linear(graph, inputs[0], name, weight, bias)
    if step.op == "norm":
        assert weight is not None and bias is not None
        shape = (1, -1) + (1,) * (len(subnet.plan.shapes[step.name]) - 1)
        scale = graph.constant(f"{name}.weight", weight.view(shape))
        shift = graph.constant(f"{name}.bias", bias.view(shape))
        scaled = graph.add("Mul", [inputs[0], scale], f"{name}.scaled")
        return graph.add("Add", [scaled, shift], name)
    operator, attributes = OPERATORS[step.op]
    for part, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            inputs.append(graph.constant(f"{name}.{part}", tensor))
    return graph.add(operator, inputs, name, **attributes(step.settings))


def _linear(graph: _Graph, x: str, name: str, weight: Tensor, bias: Tensor | None) -> str:
    inputs = [x, graph.constant(f"{name}.weight", weight)]
    if bias is not None:
        inputs.append(graph.constant(f"{name}.bias", bias))
    return graph.add("Gemm", inputs, name, transB=1)


def _metadata(bundle: Bundle, task: str) -> dict[str, str]:
    entry = bundle.task(task)
    return {
        "etcl.task": task,
        "etcl.classes": json.dumps(entry.classes),
        "etcl.preprocessing": json.dumps(bundle.preprocessing.as_json(), sort_keys=True),
        "etcl.bundle": bundle.digest,
        "etcl.accuracy": json.dumps(entry.accuracy),
    }
