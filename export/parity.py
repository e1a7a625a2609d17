"""Does an exported model answer like the network it was made from?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from etcl_deploy.errors import ParityError
from etcl_deploy.preprocessing import Preprocessing
from etcl_deploy.runtime.subnet import Subnet

MAX_RELATIVE_DIFFERENCE = 1e-4
SEEDED_ITEMS = 64


@dataclass(frozen=True)
class Parity:
    """How many items were compared, how many got the same class, the largest difference of logits."""

    items: int
    same_class: int
    max_rel_diff: float


def session(path: Path) -> onnxruntime.InferenceSession:
    """An onnxruntime session on the CPU."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), sess_options=options, providers=["CPUExecutionProvider"])


def check_parity(subnet: Subnet, path: Path, pixels: Tensor) -> Parity:
    """Compare class and logits on prepared images. Raises ParityError when a class or a logit differs."""
    with torch.inference_mode():
        expected = subnet(pixels)
    _, found = session(path).run(None, {"image": pixels.numpy()})
    logits = torch.from_numpy(np.asarray(found))
    same = int((logits.argmax(1) == expected.argmax(1)).sum())
    scale = expected.abs().amax(1, keepdim=True).clamp_min(1e-6)
    difference = float(((logits - expected).abs() / scale).max())
    parity = Parity(len(pixels), same, difference)
    if same != len(pixels) or not difference <= MAX_RELATIVE_DIFFERENCE:
        raise ParityError(
            f"{path.name} differs from the bundle: same class for {same} of {len(pixels)} items, "
            f"relative difference {difference:.1e} (at most {MAX_RELATIVE_DIFFERENCE:.0e}); deleted"
        )
    return parity


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
