"""Smaller forms of an ONNX file that holds one task: weights in half precision, and files that inflate themselves.

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

FEWEST = 512  # numbers; below that a weight stays as it is
# The bits of every byte, first the lowest: a row is looked up, which opset 17 can do and is fast.
BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")

Rebuild = Callable[[str, np.ndarray], tuple[list[onnx.TensorProto], list[onnx.NodeProto]] | None]


def halved(model: onnx.ModelProto) -> None:
    """Keep weights in half precision; the network still computes in single."""

    def rebuild(name: str, values: np.ndarray) -> tuple[list[onnx.TensorProto], list[onnx.NodeProto]] | None:
        if values.dtype != np.float32:
            return None
        if np.abs(values).max() > np.finfo(np.float16).max:
            raise ExportError(f"{name} has numbers that half precision cannot hold; leave out --fp16")
        half = numpy_helper.from_array(values.astype(np.float16), f"{name}.half")
        return [half], [helper.make_node("Cast", [half.name], [name], to=TensorProto.FLOAT)]

    _replace(model, rebuild)


def compacted(model: onnx.ModelProto) -> None:
    """Keep of every weight one bit that says where it is not 0, and there its value."""

    def rebuild(name: str, values: np.ndarray) -> tuple[list[onnx.TensorProto], list[onnx.NodeProto]] | None:
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

        # Where a bit is set, how many were set up to there: the place of its value. Elsewhere 0, the place of a 0.
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


def _replace(model: onnx.ModelProto, rebuild: Rebuild) -> int:
    """Put operators in the place of every weight that `rebuild` has some for; gives how many."""
    kept, nodes, count = [], [], 0
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor)
        found = rebuild(tensor.name, values) if values.size >= FEWEST else None
        if found is None:
            kept.append(tensor)
        else:
            kept += found[0]
            nodes += found[1]
            count += 1
    nodes += model.graph.node
    del model.graph.initializer[:], model.graph.node[:]
    model.graph.initializer.extend(kept)
    model.graph.node.extend(nodes)
    return count
