"""One task of a bundle as a stand-alone ONNX file.

The graph is written from the plan, step by step, rather than traced: it takes milliseconds, holds exactly the
operators of `operators.py`, and has no dependency on the exporter of one torch version. What the task's mask leaves
unused is left out. Nothing is believed: every file is run in onnxruntime and compared before it gets its name.
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
from etcl_deploy.export.compress import compacted, halved
from etcl_deploy.export.parity import LIMITS, Parity, answers_of, compare, expected_of, seeded_images, session
from etcl_deploy.export.prune import Pruned, prune
from etcl_deploy.runtime.onnx_graph import OPSET, Graph, as_model, write_linear, write_network
from etcl_deploy.runtime.subnet import Subnet, materialize

Examples = Callable[[str], Task | None]  # images of a task with known classes, where there are any

MAX_LOSS = 1.0  # points of accuracy that 8 bit may cost


@dataclass(frozen=True)
class Form:
    """How a file is: its opset, the precision of its weights, and whether it inflates itself when it is loaded."""

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
    """In percent, on so many images with known classes: the bundle's, and the file's."""

    items: int
    before: float
    after: float


@dataclass(frozen=True)
class OnnxReport:
    """What was written, how it compared, and what was left out of every layer."""

    file: str
    task: str
    bytes: int
    opset: int
    precision: str
    compact: bool
    parity: Parity
    accuracy: Accuracy | None
    layers: Sequence[Pruned]


def export_task(
    bundle: Bundle,
    task: str,
    path: str | Path,
    pixels: Tensor | None = None,
    form: Form | None = None,
    examples: Task | None = None,
    max_loss: float = MAX_LOSS,
) -> OnnxReport:
    """Write `task` to `path` once it answers like the bundle, on `pixels` (prepared images) or seeded ones.

    `examples` are images of the task with known classes: 8 bit is calibrated on its training part, and what is compared
    is its test part, of which a file may get `max_loss` points less right than the bundle.
    """
    path, form = Path(path), form or Form()
    atomic.check_replaceable(path)
    known = None if examples is None else _matched(examples, bundle, task)
    subnet = materialize(bundle, task)
    smaller, layers = prune(subnet)
    model = _formed(task_model(bundle, task, smaller, form), form, examples)
    images = load(known.images) if known else seeded_images(bundle.preprocessing) if pixels is None else pixels
    accuracy = None
    with atomic.replacing(path) as temporary:
        write_checked(model, temporary, f"task {task!r}")
        expected, found = expected_of(subnet, images), answers_of(session(temporary), images)
        if known:
            accuracy = _accuracy(known, expected, found)
            if not accuracy.before - accuracy.after <= max_loss:
                raise ExportError(
                    f"{path.name} gets {accuracy.after:.2f} % of {accuracy.items} test images right where the bundle "
                    f"gets {accuracy.before:.2f} %; it may lose {max_loss:g} points; deleted"
                )
            model.metadata_props.add(key="etcl.measured", value=json.dumps(asdict(accuracy)))
            temporary.write_bytes(model.SerializeToString(deterministic=True))
        parity = compare(expected, found, LIMITS[form.precision], path.name)
    size = path.stat().st_size
    return OnnxReport(str(path), task, size, form.opset, form.precision, form.compact, parity, accuracy, layers)


def _formed(model: onnx.ModelProto, form: Form, examples: Task | None) -> onnx.ModelProto:
    """A model in the precision and size that is wanted."""
    if form.precision == "int8":
        if examples is None:
            raise ExportError("8 bit need images of the task to be calibrated on")
        from etcl_deploy.export.quantize import quantized  # imports much

        model = quantized(model, load(examples.train_x).numpy())
    elif form.precision == "fp16":
        halved(model)
    if form.compact:
        compacted(model)
    return model


def write_checked(model: onnx.ModelProto, path: Path, what: str) -> None:
    """Write a model and have ONNX's own checker read it."""
    path.write_bytes(model.SerializeToString(deterministic=True))
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ExportError(f"the graph of {what} is not valid ONNX: {error}") from None


def metadata(bundle: Bundle, form: Form) -> dict[str, str]:
    """What every file says of where it comes from."""
    versions = {"etcl_deploy": etcl_deploy.__version__, "onnx": onnx.__version__, "torch": version("torch")}
    return {
        "etcl.bundle": bundle.digest,
        "etcl.preprocessing": json.dumps(bundle.preprocessing.as_json(), sort_keys=True),
        "etcl.precision": form.precision,
        "etcl.versions": json.dumps(versions, sort_keys=True),
    }


def task_model(bundle: Bundle, task: str, subnet: Subnet, form: Form | None = None) -> onnx.ModelProto:
    """The model of a task's network, whole and in single precision."""
    form, graph = form or Form(), Graph()
    features = write_network(graph, subnet.plan, bundle.preprocessing, subnet.weights)
    logits = write_linear(graph, features, "logits", subnet.head["weight"], subnet.head.get("bias"))
    graph.add("Softmax", [logits], "probabilities", axis=1)
    entry = bundle.task(task)
    outputs = {"probabilities": len(entry.classes), "logits": len(entry.classes)}
    model = as_model(graph, bundle.preprocessing, outputs, form.opset)
    own = {
        "etcl.task": task,
        "etcl.classes": json.dumps(entry.classes),
        "etcl.accuracy": json.dumps(entry.accuracy),
    }
    helper.set_model_props(model, own | metadata(bundle, form))
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
