"""One task of a bundle as a stand-alone ONNX file.

The graph is written from the plan, step by step, rather than traced: it takes milliseconds, holds exactly the
operators of `operators.py`, and has no dependency on the exporter of one torch version. Nothing is believed: every
file is run in onnxruntime and compared before it gets its name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper
from torch import Tensor

from etcl_deploy import atomic
from etcl_deploy.bundle.bundle import Bundle
from etcl_deploy.errors import ExportError
from etcl_deploy.export.operators import Graph, write_linear, write_step
from etcl_deploy.export.parity import Parity, check_parity, seeded_images
from etcl_deploy.plan import INPUT
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
    atomic.check_replaceable(path)
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


def _model(bundle: Bundle, task: str, subnet: Subnet) -> onnx.ModelProto:
    graph = Graph()
    names = {INPUT: _normalize(graph, subnet)}
    for step in subnet.plan.steps:
        inputs = [names[name] for name in step.inputs]
        weight, bias = (subnet.weights.get(f"{step.name}.{part}") for part in ("weight", "bias"))
        shape = subnet.plan.shapes[step.name]
        names[step.name] = write_step(graph, step, f"step/{step.name}", inputs, shape, weight, bias)
    features = names[subnet.plan.steps[-1].name]
    logits = write_linear(graph, features, "logits", subnet.head["weight"], subnet.head.get("bias"))
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


def _normalize(graph: Graph, subnet: Subnet) -> str:
    """uint8 NHWC to float NCHW, scaled and shifted as the preprocessing says."""
    x = graph.add("Cast", ["image"], "image_float", to=TensorProto.FLOAT)
    x = graph.add("Transpose", [x], "image_nchw", perm=[0, 3, 1, 2])
    scale = graph.constant("image_scale", np.array(subnet.preprocessing.scale, np.float32))
    shift = graph.constant("image_shift", np.array(subnet.preprocessing.shift, np.float32))
    return graph.add("Add", [graph.add("Mul", [x, scale], "image_scaled"), shift], "image_normal")


def _metadata(bundle: Bundle, task: str) -> dict[str, str]:
    entry = bundle.task(task)
    return {
        "etcl.task": task,
        "etcl.classes": json.dumps(entry.classes),
        "etcl.preprocessing": json.dumps(bundle.preprocessing.as_json(), sort_keys=True),
        "etcl.bundle": bundle.digest,
        "etcl.accuracy": json.dumps(entry.accuracy),
    }
