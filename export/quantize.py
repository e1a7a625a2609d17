"""A network in integers of 8 bit, whose ranges are measured on a task's own images."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from etcl_deploy.errors import ExportError

BATCH_SIZE = 16  # images that are measured together
MAX_IMAGES = 512  # images that are measured at all
# The operators that become 8 bit. Preparing the image and computing probabilities stay in single precision.
OPERATORS = ["Conv", "Gemm", "Add", "Relu", "MaxPool", "AveragePool", "Concat", "Flatten"]


class _Images(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, pixels: np.ndarray) -> None:
        self._left: Iterator[np.ndarray] = iter(np.split(pixels, range(BATCH_SIZE, len(pixels), BATCH_SIZE)))

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The next images, or None after the last."""
        part = next(self._left, None)
        return None if part is None else {"image": part}


def quantized(model: onnx.ModelProto, pixels: np.ndarray) -> onnx.ModelProto:
    """The model with weights and activations in 8 bit, their ranges measured on prepared images."""
    if not len(pixels):
        raise ExportError("there is no image to measure ranges on")
    # Seven bits for weights: processors without VNNI add pairs of products in 16 bit, where eight would overflow.
    with tempfile.TemporaryDirectory(prefix="etcl-") as directory:
        plain, small = Path(directory) / "plain.onnx", Path(directory) / "small.onnx"
        plain.write_bytes(model.SerializeToString())
        logger = logging.getLogger()
        level = logger.level
        logger.setLevel(logging.ERROR)  # it would advise users of the command line to run another tool first
        try:
            quantize_static(
                plain,
                small,
                _Images(pixels[:: -(-len(pixels) // MAX_IMAGES)]),  # of every class: they often come class by class
                quant_format=QuantFormat.QDQ,
                op_types_to_quantize=OPERATORS,
                nodes_to_exclude=["image_normal"],
                per_channel=True,
                reduce_range=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
            )
        finally:
            logger.setLevel(level)
        small_model = onnx.load(small, load_external_data=False)
    small_model.metadata_props.extend(x for x in model.metadata_props if x not in small_model.metadata_props)
    return small_model
