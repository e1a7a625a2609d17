"""One task of a bundle as a stand-alone ONNX file.

The graph is written from the plan, step by step, rather than traced: it takes milliseconds, holds exactly the
operators of `operators.py`, and has no dependency on the exporter of one torch version. Nothing is believed: every
file is run in onnxruntime and compared before it gets its name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import helper
from torch import Tensor

from etcl_deploy import atomic
from etcl_deploy.bundle.bundle import Bundle
from etcl_deploy.errors import ExportError
from etcl_deploy.export.parity import Parity, check_parity, seeded_images
from etcl_deploy.runtime.operators import OPSET, Graph, as_model, write_linear, write_network
from etcl_deploy.runtime.subnet import Subnet, materialize


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
    features = write_network(graph, subnet.plan, bundle.preprocessing, subnet.weights)
    logits = write_linear(graph, features, "logits", subnet.head["weight"], subnet.head.get("bias"))
    graph.add("Softmax", [logits], "probabilities", axis=1)
    classes = len(bundle.task(task).classes)
    model = as_model(graph, bundle.preprocessing, {"probabilities": classes, "logits": classes})
    helper.set_model_props(model, _metadata(bundle, task))
    return model


def _metadata(bundle: Bundle, task: str) -> dict[str, str]:
    entry = bundle.task(task)
    return {
        "etcl.task": task,
        "etcl.classes": json.dumps(entry.classes),
        "etcl.preprocessing": json.dumps(bundle.preprocessing.as_json(), sort_keys=True),
        "etcl.bundle": bundle.digest,
        "etcl.accuracy": json.dumps(entry.accuracy),
    }
