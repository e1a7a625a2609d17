"""Shared by all benchmarks: figures held against targets, runs that are learned once, results kept as JSON.

`results/SCRIPT.json` has for every part of a script its result, settings, command, commit, versions and machine.
The same commit, seed, threads and instruction set give the same bits; another set adds numbers in another order, which
after some thousand steps is another network. So the set is pinned here to one that most machines have.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pinned  # noqa: F401  (first: torch reads it once)
import torch

from etcl_deploy.config import Config
from etcl_deploy.learn.events import Event
from etcl_deploy.learn.run import current_versions
from etcl_deploy.runs.session import Session, resume, train
from etcl_deploy.runs.store import StoredRun, load_run

RESULTS = Path(__file__).parent / "results"
SIGNS = {"<=": operator.le, ">=": operator.ge, "=": operator.eq, ">": operator.gt}

say = partial(print, flush=True)


@dataclass(frozen=True)
class Figure:
    """A measured value of a target, and two limits for it such as `<= 1/20`: the one to hold now, and the aim."""

    target: str
    what: str
    measured: float
    now: str = ""
    aim: str = ""
    repeats: Sequence[float] = ()  # their range is the spread; for a mean over seeds one deviation below and above
    note: str = ""
    aim_asks: str = ""  # what the aim asks for beside its limit, and this experiment had not

    @property
    def verdict(self) -> str:
        """The better of the limits it holds; "miss" if it holds none."""
        if self.aim and not self.aim_asks and self._holds(self.aim):
            return "aim"
        return "now" if not self.now or self._holds(self.now) else "miss"

    def _holds(self, limit: str) -> bool:
        sign, number = limit.split()
        return bool(SIGNS[sign](self.measured, float(Fraction(number))))


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the option that every script has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="keep the result in benchmarks/results/")
    return parser


def learned(directory: Path, config: Config, report: Callable[[Event], None] = lambda event: None) -> StoredRun:
    """The run in a directory: learned if there is none, finished if it was interrupted."""
    session = Session("cpu", report=report)
    if not (directory / "run.json").exists():
        say(f"learning {directory.name} ...")
        train(config, directory, session=session)
    elif load_run(directory, finished=False).waiting:
        resume(directory, session=session)
    stored = load_run(directory)
    if stored.config != config:
        raise SystemExit(f"{directory} was learned with other settings: remove it")
    return stored


def write_result(script: str, part: str, result: Any, settings: Mapping[str, Any]) -> None:
    """Put one part into `results/SCRIPT.json`, beside the others."""
    path = RESULTS / f"{script}.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    record[part] = {"result": result, "settings": dict(settings), **_circumstances()}
    path.write_text(json.dumps(record, indent=1) + "\n")


def read_results(script: str) -> dict[str, dict[str, Any]]:
    """All recorded parts of a script."""
    record: dict[str, dict[str, Any]] = json.loads((RESULTS / f"{script}.json").read_text("utf-8"))
    return record


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and sample deviation, which a single value has not; of no values both are None."""
    return {"mean": fmean(values) if values else None, "deviation": stdev(values) if len(values) > 1 else None}


def ends(figure: Mapping[str, Any]) -> list[float]:
    """One deviation below a mean and above it; nothing for a single value."""
    mean, deviation = figure["mean"], figure["deviation"]
    return [] if deviation is None else [mean - deviation, mean + deviation]


def in_words(figure: Mapping[str, Any]) -> str:
    """A mean with its deviation, if there is one."""
    return f"{figure['mean']:.4g}" + (f" ± {figure['deviation']:.2g}" if figure["deviation"] is not None else "")


def show(**figures: Any) -> str:
    """Figures in one line."""
    rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in figures.items()}
    return "  ".join(f"{key} {json.dumps(value)}" for key, value in rounded.items())


def _circumstances() -> dict[str, Any]:
    """With which command, commit and versions something was measured, and on what machine; no folder of it is named."""
    words = ["DIR" if "/" in word else word for word in sys.argv[1:]]
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
    return {
        "command": " ".join(["python", Path(sys.argv[0]).name, *words]),
        "commit": _git("rev-parse", "HEAD"),
        "clean": not changed,  # apart from the results themselves
        "versions": current_versions(),
        "machine": {
            "processor": _processor(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "architecture": platform.machine(),
        },
    }


def _git(*words: str) -> str:
    """What git says of the tree the benchmarks are in."""
    root = Path(__file__).parents[1]
    return subprocess.run(["git", *words], cwd=root, capture_output=True, check=True, text=True).stdout.strip()


def _processor() -> str:
    """The name of the processor."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
