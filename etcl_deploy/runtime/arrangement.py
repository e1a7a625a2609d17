"""The order in which onnxruntime wants a network's numbers on this machine.

onnxruntime rewrites a graph for the processor it finds: it fuses layers and lays out weights in blocks as wide as the
processor's vectors. That makes it fast, and takes milliseconds for every network. Here it is done once for all tasks: a
network is optimized whose numbers say where they come from, and the order of the numbers in the result is read off. The
result then takes these numbers as inputs, so that a task is a buffer and switching tasks costs nothing. This module
knows nothing of how onnxruntime lays out weights, so its users compare answers before they trust an arrangement.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper

from etcl_deploy.core.plan import Plan
from etcl_deploy.core.preprocessing import Preprocessing
from etcl_deploy.runtime.onnx_graph import Graph, as_model, write_network

FEATURES = "features"
# Numbers say where they come from by their value, from here on; below lie the constants of a graph. Whole numbers are
# exact in single precision up to 2 ** 24.
FIRST = 1 << 22
MAX_NUMBERS = (1 << 24) - FIRST


class EngineError(Exception):
    """An engine that does not work with this network or on this machine."""


@dataclass(frozen=True)
class Place:
    """An input of the arranged graph: for each of its numbers, the position among the network's, or -1."""

    name: str
    shape: tuple[int, ...]
    source: np.ndarray  # int32, flat


@dataclass(frozen=True)
class Arrangement:
    """A graph that takes `image` and all numbers of a network as inputs and gives `features`."""

    model: bytes
    places: tuple[Place, ...]


def arrange(plan: Plan, preprocessing: Preprocessing, shapes: Mapping[str, tuple[int, ...]]) -> Arrangement:
    """The arrangement of a folded plan; `shapes` are those of its weights and biases, numbered in this order."""
    sizes = [prod(shape) for shape in shapes.values()]
    if sum(sizes) > MAX_NUMBERS:
        raise EngineError(f"{sum(sizes)} numbers are more than the {MAX_NUMBERS} that can be told apart")
    marks = torch.split(torch.arange(FIRST, FIRST + sum(sizes)).float(), sizes)
    weights = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), marks, strict=True)}
    graph = Graph()
    last = write_network(graph, plan, preprocessing, weights)
    graph.add("Identity", [last], FEATURES)
    model = _optimized(as_model(graph, preprocessing, {FEATURES: plan.features}))
    places = []
    for tensor in list(model.graph.initializer):
        if tensor.data_type != TensorProto.FLOAT:
            continue
        values = numpy_helper.to_array(tensor)
        if values.size and values.max() >= FIRST:
            places.append(_place(tensor.name, values, sum(sizes)))
            model.graph.initializer.remove(tensor)
            model.graph.input.append(helper.make_tensor_value_info(tensor.name, TensorProto.FLOAT, values.shape))
    placed = np.zeros(sum(sizes), bool)
    for place in places:
        placed[place.source[place.source >= 0]] = True
    if not placed.all():
        raise EngineError("onnxruntime changed numbers while it optimized the graph")
    return Arrangement(model.SerializeToString(), tuple(places))


def open_session(model: bytes, threads: int) -> onnxruntime.InferenceSession:
    """A session of an arranged graph, which is not optimized again."""
    options = _options(threads)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _options(threads: int) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # A thread that waits must not take the processor from the server beside it.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _optimized(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model as onnxruntime optimizes it for this processor."""
    options = _options(1)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    with tempfile.TemporaryDirectory(prefix="etcl-") as directory:
        path = Path(directory) / "optimized.onnx"
        options.optimized_model_filepath = str(path)
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return onnx.load(path, load_external_data=False)


def _place(name: str, values: np.ndarray, count: int) -> Place:
    source = values.astype(np.int64).ravel() - FIRST
    source[values.ravel() == 0] = -1
    if source.min() < -1 or source.max() >= count or (values != np.rint(values)).any():
        raise EngineError("onnxruntime mixed numbers with others while it optimized the graph")
    return Place(name, values.shape, source.astype(np.int32))
