"""Smaller ONNX files of one task: weights in half precision, or as bits and values that rebuild the weights.

Both leave the graph as it is and put operators before its weights that rebuild them. onnxruntime runs these once, when
it loads the file: a task takes less room on disk and on the wire, and the same time to answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from etcl_deploy.errors import ExportError

MIN_SIZE = 512  # numbers; a smaller weight stays as it is
# The bits of every byte, the lowest first. Opset 17 has no operator that unpacks bits; looking up a row is fast.
BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")

# The tensors and operators that rebuild a weight of some name and value; None where it stays as it is.
Rebuilt = tuple[list[onnx.TensorProto], list[onnx.NodeProto]]
Rebuild = Callable[[str, np.ndarray], Rebuilt | None]


def halve_weights(model: onnx.ModelProto) -> None:
    """Keep weights in half precision; the network still computes in single."""

    def rebuild(name: str, values: np.ndarray) -> Rebuilt | None:
        if values.dtype != np.float32:
            return None
        if np.abs(values).max() > np.finfo(np.float16).max:
            raise ExportError(f"{name} has numbers that half precision cannot hold; leave out --fp16")
        half = numpy_helper.from_array(values.astype(np.float16), f"{name}.half")
        return [half], [helper.make_node("Cast", [half.name], [name], to=TensorProto.FLOAT)]

    _replace(model, rebuild)


def compact_weights(model: onnx.ModelProto) -> None:
    """Keep a bit for every number of a weight, and the numbers that are not 0."""

    def rebuild(name: str, values: np.ndarray) -> Rebuilt | None:
        flat = values.ravel()
        selected = flat != 0
        chosen = np.concatenate([np.zeros(1, flat.dtype), flat[selected]])
        bits = np.packbits(selected, bitorder="little")
        if bits.nbytes + chosen.nbytes >= flat.nbytes:
            return None
        parts = {"bits": bits, "values": chosen, "shape": np.array(values.shape)}
        if flat.size % 8:
            parts |= {"start": np.array([0]), "end": np.array([flat.size])}
        held = [numpy_helper.from_array(array, f"{name}.{part}") for part, array in parts.items()]
        nodes: list[onnx.NodeProto] = []

        def add(op: str, *inputs: str, **attributes: Any) -> str:
            output = f"{name}.{len(nodes)}"
            nodes.append(helper.make_node(op, inputs, [output], **attributes))
            return output

        # The place of a number among the values: how many bits are set up to there, or 0, the place of a 0.
        each = add("Gather", "inflate.bits", add("Cast", f"{name}.bits", to=TensorProto.INT32))
        ones = add("Cast", add("Reshape", each, "inflate.flat"), to=TensorProto.INT32)
        places = add("Mul", add("CumSum", ones, "inflate.axis"), ones)
        if flat.size % 8:
            places = add("Slice", places, f"{name}.start", f"{name}.end")
        dense = add("Gather", f"{name}.values", places)
        nodes.append(helper.make_node("Reshape", [dense, f"{name}.shape"], [name]))
        return held, nodes

    if _replace(model, rebuild):
        constants = {"bits": BITS, "axis": np.array(0), "flat": np.array([-1])}
        model.graph.initializer.extend(numpy_helper.from_array(v, f"inflate.{name}") for name, v in constants.items())


def _replace(model: onnx.ModelProto, rebuild: Rebuild) -> bool:
    """Replace every weight that `rebuild` has operators for; gives whether there was one."""
    kept, nodes = [], []
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        rebuilt = rebuild(tensor.name, values) if values.size >= MIN_SIZE else None
        held, operators = rebuilt or ([tensor], [])
        kept += held
        nodes += operators
    replaced = bool(nodes)
    nodes += model.graph.node
    del model.graph.initializer[:], model.graph.node[:]
    model.graph.initializer.extend(kept)
    model.graph.node.extend(nodes)
    return replaced
