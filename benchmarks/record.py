"""Results of benchmarks as JSON: what was measured, with which command, settings and versions, on what machine."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from etcl_deploy.learn.run import current_versions

RESULTS = Path(__file__).parent / "results"


def write_result(name: str, targets: Sequence[str], result: Any, settings: Mapping[str, Any], **more: Any) -> None:
    """Write `results/NAME.json`."""
    record = {
        "targets": list(targets),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *map(_shown, sys.argv[1:])]),
        "result": result,
        "settings": dict(settings),
        "versions": current_versions(),
        "machine": {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "architecture": platform.machine()},
        **more,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def _shown(word: str) -> str:
    """Folders of this machine are nobody's business."""
    return "DIR" if "/" in word else word
