"""The sizes of a bundle's parts and tasks."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from etcl_deploy.bundle import format
from etcl_deploy.bundle.bundle import Bundle


def summarize(bundle: Bundle, path: Path) -> dict[str, Any]:
    """The report of `etcl inspect`: bytes by part and by task."""
    total, weights = path.stat().st_size, bundle.layout.weight_count
    per_task = {name: bundle.bytes_of(name) for name in bundle.tasks}
    owner = bundle.sizes.get("backbone/owner", 0)  # shared by all masks
    parts = {
        "backbone": sum(size for name, size in bundle.sizes.items() if name.startswith("backbone/")) - owner,
        "masks": sum(sizes["mask"] for sizes in per_task.values()) + owner,
        "heads": sum(sizes["head"] for sizes in per_task.values()),
        "norms": sum(sizes["norm"] for sizes in per_task.values()),
    }
    shared = owner / len(per_task)
    return {
        "format": format.FORMAT,
        "digest": bundle.digest,
        "encoding": bundle.encoding,
        "precision": bundle.precision,
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
                "mask_bits_per_weight": 8 * (per_task[task.name]["mask"] + shared) / weights,
                "accuracy": task.accuracy,
                "learned": task.learned,
            }
            for task in bundle.tasks.values()
        ],
    }


def separate_bytes(bundle: Bundle) -> int:
    """Bytes of the same tasks as separate dense fp32 networks: backbone, normalization and head."""
    layout = bundle.layout
    # Batch norm has scale, shift, mean and variance, of which a bundle keeps two; group and layer norm have just two.
    folded = sum(2 * int(step.settings["features"]) for step in bundle.plan.norms if step.op == "norm")
    shared = layout.weight_count + layout.norm_count + folded
    counts = [len(task.classes) for task in bundle.tasks.values()]
    heads = sum(prod(shape) for count in counts for shape in bundle.plan.head_shapes(count).values())
    return 4 * (len(bundle.tasks) * shared + heads)
