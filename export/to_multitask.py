"""All tasks of a bundle in one ONNX file: the backbone once, a mask in packed bits for every task, all heads.

Beside `image` it takes `task_id`, the number of a task in the file's list. Masks and other values of a task lie in
tables with a row for every task. Each time the network runs it takes one row, unpacks its bits and selects weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor

from etcl_deploy.bundle.bits import pack
from etcl_deploy.bundle.bundle import Bundle
from etcl_deploy.bundle.layout import split
from etcl_deploy.core import atomic
from etcl_deploy.core.plan import Plan
from etcl_deploy.core.task import load
from etcl_deploy.export.compress import BITS, halve_weights
from etcl_deploy.export.parity import (
    LIMITS,
    SEEDED_ITEMS,
    Parity,
    answers_of,
    compare,
    expected_of,
    seeded_images,
    session,
)
from etcl_deploy.export.to_onnx import ExamplesOf, OnnxOptions, metadata, write_checked
from etcl_deploy.runtime.onnx_graph import Graph, as_model, write_network
from etcl_deploy.runtime.subnet import Folding, materialize, select

COMPARED = 8  # made-up images for each task


@dataclass(frozen=True)
class MultitaskReport:
    """The file that was written, and how its answers compare with the bundle's over all tasks."""

    file: str
    tasks: list[str]
    bytes: int
    opset: int
    precision: str
    parity: Parity


class TaskGraph(Graph):
    """A graph whose weights differ from task to task: operators that select those of a task stand in their place."""

    def __init__(self, tables: dict[str, Tensor], masks: dict[str, Tensor], scales: dict[str, Tensor]) -> None:
        super().__init__()
        self._tables = tables  # of small numbers: [tasks, ...]
        self._masks = masks  # of weights: uint8 [tasks, bytes]
        self._scales = scales  # of their output channels, where there are any: [tasks, channels]
        super().constant("bits", BITS.astype(np.float32))
        super().constant("flat", np.array([-1]))
        super().constant("zero", np.array([0]))

    def constant(self, name: str, value: Tensor | np.ndarray) -> str:
        """Add a tensor, or where tasks differ in it the operators that select a task's own; gives its name."""
        key = name.removeprefix("step/")
        if key in self._tables:
            table = self._tables[key].view(-1, *value.shape)
            return self.add("Gather", [super().constant(f"{name}.all", table), "task_id"], name, axis=0)
        if key not in self._masks:
            return super().constant(name, value)
        row = self.add("Gather", [super().constant(f"{name}.bits", self._masks[key]), "task_id"], f"{name}.row")
        each = self.add(
            "Gather", ["bits", self.add("Cast", [row], f"{name}.bytes", to=TensorProto.INT32)], f"{name}.each"
        )
        mask = self.add("Reshape", [each, "flat"], f"{name}.flat")
        if (size := value.numel() if isinstance(value, Tensor) else value.size) % 8:
            mask = self.add("Slice", [mask, "zero", super().constant(f"{name}.size", np.array([size]))], f"{name}.cut")
        shaped = self.add("Reshape", [mask, super().constant(f"{name}.shape", np.array(value.shape))], f"{name}.shaped")
        weight = [super().constant(f"{name}.shared", value), shaped]
        if key not in self._scales:
            return self.add("Mul", weight, name)
        table = self._scales[key].view((-1, value.shape[0]) + (1,) * (value.ndim - 1))
        scale = self.add("Gather", [super().constant(f"{name}.scales", table), "task_id"], f"{name}.scale")
        return self.add("Mul", [self.add("Mul", weight, f"{name}.selected"), scale], name)


def export_multitask(
    bundle: Bundle, path: str | Path, options: OnnxOptions | None = None, examples_of: ExamplesOf = lambda task: None
) -> MultitaskReport:
    """Write all tasks to `path` once each answers like the bundle, on test images of `examples_of` or made-up ones."""
    path, options = Path(path), options or OnnxOptions()
    atomic.check_replaceable(path)
    model = _model(bundle, options)
    if options.precision == "fp16":
        halve_weights(model)
    made_up = seeded_images(bundle.preprocessing)[:: SEEDED_ITEMS // COMPARED]
    with atomic.replacing(path) as temporary:
        write_checked(model, temporary, "all tasks")
        loaded = session(temporary)
        compared = []
        for number, task in enumerate(bundle.tasks):
            own = examples_of(task)
            pixels = made_up if own is None else load(own.test_x)
            answers = answers_of(loaded, pixels, task_id=np.array(number))
            expected = expected_of(materialize(bundle, task), pixels)
            compared.append(compare(expected, answers, LIMITS[options.precision], f"task {task!r} in {path.name}"))
    parity = Parity(
        sum(one.items for one in compared),
        sum(one.same_class for one in compared),
        max(one.max_rel_diff for one in compared),
    )
    return MultitaskReport(str(path), list(bundle.tasks), path.stat().st_size, options.opset, options.precision, parity)


def _model(bundle: Bundle, options: OnnxOptions) -> onnx.ModelProto:
    graph, plan, first = _tabled(bundle)
    features = write_network(graph, plan, bundle.preprocessing, first)
    logits = _write_head(graph, bundle, features)
    graph.add("Softmax", [logits], "probabilities", axis=1)
    model = as_model(graph, bundle.preprocessing, {"probabilities": "classes", "logits": "classes"}, options.opset)
    model.graph.input.append(helper.make_tensor_value_info("task_id", TensorProto.INT64, []))
    tasks = bundle.tasks.values()
    own = {
        "etcl.tasks": json.dumps([task.name for task in tasks]),
        "etcl.classes": json.dumps([task.classes for task in tasks]),
        "etcl.accuracy": json.dumps([task.accuracy for task in tasks]),
    }
    helper.set_model_props(model, own | metadata(bundle, options))
    return model


def _tabled(bundle: Bundle) -> tuple[TaskGraph, Plan, dict[str, Tensor]]:
    """An empty graph with the tables of all tasks, the folded plan, and weights in the shapes it has."""
    layout, folding = bundle.layout, Folding.of(bundle.plan)
    shared = split(bundle.weights, layout.weights)
    # A step that only adds has its numbers under the name of a bias in the graph.
    adding = {f"{step.name}.weight": f"{step.name}.bias" for step in folding.plan.steps if step.op == "bias"}
    rows: dict[str, list[Tensor]] = {}
    bits: dict[str, list[Tensor]] = {}
    scales: dict[str, list[Tensor]] = {}
    others: dict[str, Tensor] = {}
    for name, task in bundle.tasks.items():
        masks, norms = split(bundle.mask(name), layout.weights), split(task.norm, layout.norms)
        selected = {step: select(shared[step], masks[step]) for step in shared if step not in folding.chains}
        others = folding.others(selected, norms)
        for key, values in others.items():
            rows.setdefault(adding.get(key, key), []).append(values)
        for layer, scale in folding.scales(norms).items():
            scales.setdefault(f"{layer}.weight", []).append(scale)
        for layer in folding.chains:
            bits.setdefault(f"{layer}.weight", []).append(pack(masks[layer].flatten()))
    tables, masked, scaled = ({key: torch.stack(own) for key, own in table.items()} for table in (rows, bits, scales))
    weights = {f"{layer}.weight": shared[layer] for layer in folding.chains}
    return TaskGraph(tables, masked, scaled), folding.plan, others | weights


def _write_head(graph: TaskGraph, bundle: Bundle, features: str) -> str:
    """A linear layer with the rows of one task out of those of all; returns the name of the logits."""
    heads = [task.head_values() for task in bundle.tasks.values()]
    ends = np.cumsum([len(head["weight"]) for head in heads])[:, None]
    starts = np.vstack([np.zeros((1, 1), ends.dtype), ends[:-1]])
    span = [
        graph.add("Gather", [graph.constant(f"head.{name}s", table), "task_id"], f"head.{name}")
        for name, table in (("start", starts), ("end", ends))
    ]
    inputs = [features]
    for part in heads[0]:
        every = graph.constant(f"head.{part}.all", torch.cat([head[part] for head in heads]))
        inputs.append(graph.add("Slice", [every, *span, "zero"], f"head.{part}"))
    return graph.add("Gemm", inputs, "logits", transB=1)
