"""Targets, and the figures that are held against them.

A target has one part or several; a part has the line to hold (`now`) and the one it is going to (`aim`). A figure is
what a benchmark measured for one part. Benchmarks are scripts of the source tree: `benchmarks/targets.toml` names them.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from math import inf
from pathlib import Path
from typing import Any

from etcl_deploy.errors import BenchmarkError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TABLE = "targets.toml"
SIGNS = {"<=": operator.le, ">=": operator.ge, "=": operator.eq, ">": operator.gt}
LINE = re.compile(r"(<=|>=|=|>) ([-\d./e]+)( clearly)?(?: (?:of|at) ([\d,]+|all) \w+)?")
FEWEST = 3  # repeats, for anything to be clear
# Worst first: a target is as good as the worst of its parts.
VERDICTS = ("failed", "miss", "too small", "not measured yet", "~ now", "now", "~ aim", "aim", "skipped", "")


@dataclass(frozen=True)
class Figure:
    """What was measured for one part of a target."""

    target: str
    label: str
    ratio: float
    unit: str
    ours: float | None = None
    other: float | None = None
    repeats: int | None = None
    low: float | None = None  # the spread of the ratio: smallest and largest of the repeats,
    high: float | None = None  # or for means over seeds one sample deviation below and above
    count: float = inf  # how large the experiment was, where the target says how large it has to be
    note: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For a program; the id first."""
        return {**asdict(self), "count": None if self.count == inf else self.count}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Figure:
        """What `as_json` gave."""
        return cls(**{**values, "count": inf if values["count"] is None else values["count"]})


@dataclass(frozen=True)
class Line:
    """A limit: `<= 1.2`; `> 0 clearly`; with how large the experiment has to be, `= 1 of 50 kills`."""

    text: str
    sign: str
    limit: float
    clearly: bool
    size: float

    @classmethod
    def parse(cls, text: str) -> Line:
        """The line that is written so."""
        found = LINE.fullmatch(text)
        if not found:
            raise BenchmarkError(f"{TABLE}: {text!r} is no line; one looks like '<= 1.2' or '= 1 of 50 kills'")
        sign, limit, clearly, size = found.groups()
        number = float(Fraction(limit)) if "/" in limit else float(limit)
        return cls(text, sign, number, bool(clearly), inf if size == "all" else float((size or "0").replace(",", "")))

    def holds(self, figure: Figure, *, any_size: bool = False) -> bool:
        """Whether the figure is on the right side of it.

        Clearly above means by more than two deviations between at least three seeds.
        """
        value = figure.ratio
        if self.clearly:
            if figure.low is None or (figure.repeats or 0) < FEWEST:
                return False
            value -= 2 * (figure.ratio - figure.low)
        return (any_size or figure.count >= self.size) and bool(SIGNS[self.sign](value, self.limit))


@dataclass(frozen=True)
class Part:
    """One figure that a target asks for."""

    label: str
    now: Line | None
    aim: Line | None

    def judge(self, figure: Figure, *, smaller: bool = False, grows: bool = False) -> str:
        """Which line it reaches, "aim" or "now", else "miss"; "~" before it if the experiment was a smaller one.

        Of figures that grow with the experiment, a small one that misses says nothing.
        """
        sign = "~ " if smaller else ""
        for word, line in (("aim", self.aim), ("now", self.now)):
            if line and line.holds(figure, any_size=smaller):
                return sign + word
        if self.now is None:
            return f"{sign}now"
        return "too small" if smaller and grows else "miss"


@dataclass(frozen=True)
class Target:
    """What is to be reached, and the benchmark that tells."""

    id: str
    what: str
    benchmark: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Benchmark:
    """A script of the source tree; targets.toml says what each field means."""

    name: str
    data: tuple[str, ...] = ()
    work: bool = False
    timed: bool = False
    smaller: str = ""
    grows: bool = False


@dataclass(frozen=True)
class Table:
    """All targets and all benchmarks, by name."""

    folder: Path
    targets: Mapping[str, Target]
    benchmarks: Mapping[str, Benchmark]

    def named(self, name: str) -> list[Target]:
        """The target of that id, or those that the benchmark of that name measures."""
        found = [target for target in self.targets.values() if name in (target.id, target.benchmark)]
        if not found:
            known = ", ".join([*self.targets, *self.benchmarks])
            raise BenchmarkError(f"no target or benchmark is called {name!r}; there are: {known}")
        return found


def find_table(start: Path) -> Table:
    """The targets of the checkout that holds `start`."""
    for folder in (start, *start.parents):
        if (folder / "benchmarks" / TABLE).is_file():
            return read_table(folder / "benchmarks")
    raise BenchmarkError(
        f"there is no benchmarks/{TABLE} in {start} or above it: benchmarks are part of the source tree and are not "
        "installed; run `etcl bench` in a checkout"
    )


def read_table(folder: Path) -> Table:
    """The targets of a folder of benchmarks."""
    values = tomllib.loads((folder / TABLE).read_text("utf-8"))
    benchmarks = {
        name: Benchmark(name, **{**row, "data": tuple(row.get("data", ()))})
        for name, row in values["benchmarks"].items()
    }
    targets = {
        name: Target(name, row["what"], row["benchmark"], tuple(_part(part) for part in row["parts"]))
        for name, row in values["targets"].items()
    }
    return Table(folder, targets, benchmarks)


def _part(values: Mapping[str, str]) -> Part:
    now, aim = (Line.parse(values[key]) if key in values else None for key in ("now", "aim"))
    return Part(values.get("label", ""), now, aim)
