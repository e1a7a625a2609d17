"""Results of benchmarks as JSON: what was measured, with which command, settings and versions, on what machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from etcl_deploy.learn.run import current_versions
from etcl_deploy.settings import config_from

RESULTS = Path(__file__).parent / "results"
VARIABLE = "ETCL_RESULTS"  # another folder in its place


def read_options(parser: argparse.ArgumentParser, **quick: Any) -> argparse.Namespace:
    """What was given on the command line; with --quick, `quick` are the defaults, and no recorded result is touched."""
    parser.add_argument("--quick", action="store_true", help=f"a smaller experiment: {quick}; recorded nowhere")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it can be stopped from where that is ignored, too
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**quick)
        os.environ.setdefault(VARIABLE, tempfile.mkdtemp())
    return parser.parse_args()


def results() -> Path:
    """Where results are kept."""
    return Path(os.environ.get(VARIABLE) or RESULTS)


def write_result(name: str, targets: Sequence[str], result: Any, settings: Mapping[str, Any]) -> None:
    """Write `results/NAME.json`."""
    record = {"targets": list(targets), "result": result, "settings": dict(settings), **circumstances()}
    results().mkdir(exist_ok=True)
    (results() / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


def measure_once(measure: Callable[[], Mapping[str, Any]], folder: str, name: str, config: Mapping[str, Any]) -> None:
    """Keep what a long run gives as `results/FOLDER/NAME.json`; one that is there is not repeated."""
    path = results() / folder / f"{name}.json"
    if path.exists():
        _check(path, json.loads(path.read_text()), config)
    else:
        sys.stderr.write(f"measuring {folder} {name} ...\n")
        result = {**measure(), "config": config, **circumstances()}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def measured(folder: str, config_of: Callable[[str], Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """All that `measure_once` kept, by name; what was measured with other settings than today's is refused."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted((results() / folder).glob("*.json"))}
    for name, result in found.items():
        _check(results() / folder / f"{name}.json", result, config_of(name))
    return found


def _check(path: Path, result: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """A setting that came later counts as its default: whoever adds one makes that what was done before."""
    if config_from(result["config"]) != config_from(json.loads(json.dumps(config))):
        raise SystemExit(f"results/{path.parent.name}/{path.name} was measured with other settings: remove it")


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and sample deviation; of a single value None."""
    return {"mean": fmean(values), "deviation": stdev(values) if len(values) > 1 else None}


def in_words(figure: Mapping[str, float | None]) -> str:
    """A mean with its deviation, if there is one."""
    return f"{figure['mean']:.4g}" + (f" ± {figure['deviation']:.2g}" if figure["deviation"] is not None else "")


def circumstances() -> dict[str, Any]:
    """With which command, versions and machine something was measured."""
    return {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *map(_shown, sys.argv[1:])]),
        "versions": current_versions(),
        "machine": {"cores": os.cpu_count(), "threads": torch.get_num_threads(), "architecture": platform.machine()},
    }


def _shown(word: str) -> str:
    """Folders of this machine are nobody's business."""
    return "DIR" if "/" in word else word
