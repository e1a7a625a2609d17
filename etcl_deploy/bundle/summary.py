"""What is inside a bundle, in numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etcl_deploy.bundle import format
from etcl_deploy.bundle.bundle import ENCODING, Bundle, weight_count


def summarize(bundle: Bundle, path: Path) -> dict[str, Any]:
    """What `etcl inspect` reports: bytes by part and by task."""
    total = path.stat().st_size
    weights = weight_count(bundle.plan)
    per_task = {name: task.sizes() for name, task in bundle.tasks.items()}
    parts = {
        "backbone": sum(weight.nbytes for weight in bundle.weights.values()),
        "masks": sum(sizes["mask"] for sizes in per_task.values()),
        "heads": sum(sizes["head"] for sizes in per_task.values()),
        "norms": sum(sizes["norm"] for sizes in per_task.values()),
    }
    return {
        "format": format.FORMAT,
        "digest": bundle.digest,
        "encoding": ENCODING,
        "backbone": bundle.backbone,
        "weights": weights,
        "bytes": {"total": total, **parts, "manifest": total - sum(parts.values())},
        "separate": separate_bytes(bundle),
        "tasks": [
            {
                "name": task.name,
                "classes": list(task.classes),
                "density": task.density,
                "bytes": {**per_task[task.name], "total": sum(per_task[task.name].values())},
                "mask_bits_per_weight": 8 * per_task[task.name]["mask"] / weights,
                "accuracy": task.accuracy,
            }
            for task in bundle.tasks.values()
        ],
    }


def separate_bytes(bundle: Bundle) -> int:
    """Bytes of the same tasks as separate dense fp32 networks: backbone, normalization and head."""
    backbone = sum(weight.nbytes for weight in bundle.weights.values())
    # Batch norm has scale, shift, mean and variance, of which a bundle keeps two; group and layer norm have just two.
    folded = sum(2 * 4 * step.settings["features"] for step in bundle.plan.norms if step.op == "norm")
    return sum(backbone + task.sizes()["norm"] + folded + task.sizes()["head"] for task in bundle.tasks.values())
