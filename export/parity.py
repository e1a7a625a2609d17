"""Compare the answers of an exported model with those of the network it was made from."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from etcl_deploy.core.preprocessing import Preprocessing
from etcl_deploy.errors import ExportError, ParityError
from etcl_deploy.runtime.engine import relative_difference
from etcl_deploy.runtime.subnet import Subnet

SEEDED_ITEMS = 16
BATCH_SIZE = 256  # images that run together


@dataclass(frozen=True)
class Limit:
    """The least share of items with the same class, and the largest errors of logits (relative) and probabilities."""

    same_class: float
    max_rel_diff: float
    max_score_diff: float


# By precision. For 8 bit the loss of accuracy is limited too, see to_onnx.py.
LIMITS = {"fp32": Limit(1.0, 1e-4, 1e-4), "fp16": Limit(0.99, inf, 0.02), "int8": Limit(0.8, inf, inf)}
MAX_SOFTMAX_DIFFERENCE = 1e-5


@dataclass(frozen=True)
class Parity:
    """The number of items compared, the number that got the same class, and the largest difference of logits."""

    items: int
    same_class: int
    max_rel_diff: float


def session(path: Path) -> onnxruntime.InferenceSession:
    """An onnxruntime session on the CPU. Raises ExportError where onnxruntime cannot run the file."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(str(path), sess_options=options, providers=["CPUExecutionProvider"])
    except Exception as error:  # it has a class for every reason, of no common name
        raise ExportError(f"onnxruntime {onnxruntime.__version__} cannot run the file: {error}") from None


def expected_of(subnet: Subnet, pixels: Tensor) -> Tensor:
    """Logits of the learned network."""
    with torch.inference_mode():
        return torch.cat([subnet(part) for part in torch.split(pixels, BATCH_SIZE)])


def answers_of(loaded: onnxruntime.InferenceSession, pixels: Tensor, **inputs: np.ndarray) -> Tensor:
    """Logits of an exported model. Raises ParityError if its probabilities are not those of its logits."""
    parts = [
        loaded.run(["probabilities", "logits"], {"image": p.numpy(), **inputs}) for p in torch.split(pixels, BATCH_SIZE)
    ]
    probabilities, logits = (torch.from_numpy(np.concatenate(outputs)) for outputs in zip(*parts, strict=True))
    if not (probabilities - logits.softmax(1)).abs().max() <= MAX_SOFTMAX_DIFFERENCE:
        raise ParityError("the file's probabilities are not those of its logits; deleted")
    return logits


def compare(expected: Tensor, answers: Tensor, limit: Limit, what: str) -> Parity:
    """The difference between two sets of logits. Raises ParityError where it passes the limit."""
    same = int((answers.argmax(1) == expected.argmax(1)).sum())
    difference = relative_difference(answers, expected)
    score = float((answers.softmax(1) - expected.softmax(1)).abs().max())
    close = difference <= limit.max_rel_diff and score <= limit.max_score_diff
    if same < limit.same_class * len(expected) or not close:
        raise ParityError(
            f"{what} differs from the bundle: same class for {same} of {len(expected)} items, relative difference "
            f"{difference:.1e} (at most {limit.max_rel_diff:.0e}), of probabilities {score:.1e} (at most "
            f"{limit.max_score_diff:.0e}); deleted"
        )
    return Parity(len(expected), same, difference)


def seeded_images(preprocessing: Preprocessing) -> Tensor:
    """Images to compare on when there are no real ones: smooth shapes and noise, the same every time."""
    generator = torch.Generator().manual_seed(0)
    height, width, channels = preprocessing.shape
    coarse = torch.rand(SEEDED_ITEMS, channels, 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")
    noise = torch.rand(SEEDED_ITEMS, channels, height, width, generator=generator)
    blend = torch.linspace(0, 1, SEEDED_ITEMS).view(-1, 1, 1, 1)
    mixed = (1 - blend) * smooth + blend * noise
    return (mixed * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
