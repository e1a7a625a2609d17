"""One task of a bundle as a stand-alone ONNX file.

The graph is written from the plan, step by step, rather than traced: it takes milliseconds, holds exactly the
operators of `onnx_graph.py`, and does not depend on the exporter of one torch version. Channels that the task's mask
leaves unused are left out. Every file is run in onnxruntime and compared with the bundle before it gets its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import onnx
import torch
from onnx import helper
from torch import Tensor

import etcl_deploy
from etcl_deploy.bundle.bundle import Bundle
from etcl_deploy.core import atomic
from etcl_deploy.core.task import Items, Task, load, percent_right
from etcl_deploy.errors import ExportError
from etcl_deploy.export.compress import compact_weights, halve_weights
from etcl_deploy.export.parity import LIMITS, Parity, answers_of, compare, expected_of, seeded_images, session
from etcl_deploy.export.prune import PrunedLayer, prune
from etcl_deploy.runtime.onnx_graph import OPSET, Graph, as_model, write_linear, write_network
from etcl_deploy.runtime.subnet import Subnet, materialize

ExamplesOf = Callable[[str], Task | None]  # from a task's name, its images with known classes, or None

MAX_LOSS = 1.0  # points of accuracy that 8 bit may cost


@dataclass(frozen=True)
class OnnxOptions:
    """How a file is written: its opset, the precision of weights, and whether they are rebuilt from bits on loading."""

    opset: int = OPSET
    precision: str = "fp32"  # fp16: weights only; int8: weights and what is computed from them
    compact: bool = False

    def __post_init__(self) -> None:
        latest = onnx.defs.onnx_opset_version()
        if not OPSET <= self.opset <= latest:
            raise ExportError(f"opset {self.opset} is not written; {OPSET} to {latest} are")
        if self.precision not in LIMITS:
            raise ExportError(f"precision {self.precision!r} is unknown; known: {', '.join(LIMITS)}")


@dataclass(frozen=True)
class Accuracy:
    """The accuracy of the bundle and of the file, in percent, on `items` images with known classes."""

    items: int
    before: float
    after: float


@dataclass(frozen=True)
class OnnxReport:
    """The file that was written, how its answers compare, and the channels left in every layer."""

    file: str
    task: str
    bytes: int
    opset: int
    precision: str
    compact: bool
    parity: Parity
    accuracy: Accuracy | None
    layers: Sequence[PrunedLayer]


def export_task(
    bundle: Bundle,
    task: str,
    path: str | Path,
    pixels: Tensor | None = None,
    options: OnnxOptions | None = None,
    examples: Task | None = None,
    max_loss: float = MAX_LOSS,
) -> OnnxReport:
    """Write `task` to `path` once it answers like the bundle, on `pixels` (prepared images) or seeded ones.

    `examples` are images of the task with known classes. 8 bit is calibrated on their training part. Answers are
    compared on their test part, where the accuracy of the file may be `max_loss` points below that of the bundle.
    """
    path, options = Path(path), options or OnnxOptions()
    atomic.check_replaceable(path)
    known = None if examples is None else _matched(examples, bundle, task)
    subnet = materialize(bundle, task)
    smaller, layers = prune(subnet)
    model = _reduced(task_model(bundle, task, smaller, options), options, examples)
    images = load(known.images) if known else seeded_images(bundle.preprocessing) if pixels is None else pixels
    accuracy = None
    with atomic.replacing(path) as temporary:
        write_checked(model, temporary, f"task {task!r}")
        expected, answers = expected_of(subnet, images), answers_of(session(temporary), images)
        if known:
            accuracy = _accuracy(known, expected, answers)
            if not accuracy.before - accuracy.after <= max_loss:
                raise ExportError(
                    f"{path.name} gets {accuracy.after:.2f} % of {accuracy.items} test images right where the bundle "
                    f"gets {accuracy.before:.2f} %; it may lose {max_loss:g} points; deleted"
                )
            model.metadata_props.add(key="etcl.measured", value=json.dumps(asdict(accuracy)))
            temporary.write_bytes(model.SerializeToString(deterministic=True))
        parity = compare(expected, answers, LIMITS[options.precision], path.name)
    size = path.stat().st_size
    return OnnxReport(
        str(path), task, size, options.opset, options.precision, options.compact, parity, accuracy, layers
    )


def _reduced(model: onnx.ModelProto, options: OnnxOptions, examples: Task | None) -> onnx.ModelProto:
    """A model in the precision and size that the options ask for."""
    if options.precision == "int8":
        if examples is None:
            raise ExportError("8 bit need images of the task to be calibrated on")
        from etcl_deploy.export.quantize import quantized  # imports much

        model = quantized(model, load(examples.train_x).numpy())
    elif options.precision == "fp16":
        halve_weights(model)
    if options.compact:
        compact_weights(model)
    return model


def write_checked(model: onnx.ModelProto, path: Path, what: str) -> None:
    """Write a model and have ONNX's own checker read it."""
    path.write_bytes(model.SerializeToString(deterministic=True))
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(f"the graph of {what} is not valid ONNX: {error}") from None


def metadata(bundle: Bundle, options: OnnxOptions) -> dict[str, str]:
    """The metadata of every file about its origin."""
    versions = {"etcl_deploy": etcl_deploy.__version__, "onnx": onnx.__version__, "torch": version("torch")}
    return {
        "etcl.bundle": bundle.digest,
        "etcl.preprocessing": json.dumps(bundle.preprocessing.as_json(), sort_keys=True),
        "etcl.precision": options.precision,
        "etcl.versions": json.dumps(versions, sort_keys=True),
    }


def task_model(bundle: Bundle, task: str, subnet: Subnet, options: OnnxOptions | None = None) -> onnx.ModelProto:
    """The model of a task's network, whole and in single precision."""
    options, graph = options or OnnxOptions(), Graph()
    features = write_network(graph, subnet.plan, bundle.preprocessing, subnet.weights)
    logits = write_linear(graph, features, "logits", subnet.head["weight"], subnet.head.get("bias"))
    graph.add("Softmax", [logits], "probabilities", axis=1)
    entry = bundle.task(task)
    outputs = {"probabilities": len(entry.classes), "logits": len(entry.classes)}
    model = as_model(graph, bundle.preprocessing, outputs, options.opset)
    own = {
        "etcl.task": task,
        "etcl.classes": json.dumps(entry.classes),
        "etcl.accuracy": json.dumps(entry.accuracy),
    }
    helper.set_model_props(model, own | metadata(bundle, options))
    return model


def _matched(examples: Task, bundle: Bundle, task: str) -> Items:
    """The test part of examples, with labels as the bundle numbers its classes."""
    classes = bundle.task(task).classes
    unknown = [name for name in examples.classes if name not in classes]
    if unknown:
        raise ExportError(f"the images for task {task!r} have the class {unknown[0]!r}; it has: {', '.join(classes)}")
    if not len(examples.test_x):
        raise ExportError(f"there is no test image for task {task!r} to compare on")
    numbers = torch.tensor([classes.index(name) for name in examples.classes])
    return Items(examples.test_x, numbers[examples.test_y])


def _accuracy(known: Items, before: Tensor, after: Tensor) -> Accuracy:
    return Accuracy(len(known), *(percent_right([(logits, known.labels)]) for logits in (before, after)))
