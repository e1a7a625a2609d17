"""Targets and figures for a person and for a program: a rich table, a JSON document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.text import Text

from etcl_deploy.bench.run import Row, lacks, verdict_of
from etcl_deploy.bench.targets import Figure, Table, Target
from etcl_deploy.render import BAD, GOOD, QUIET, Rows, table

STYLES = {"aim": f"bold {GOOD}", "now": GOOD, "miss": f"bold {BAD}", "failed": f"bold {BAD}"}
WIDTHS = {"now": 10, "aim": 10, "measured": 12, "recorded": 12, "verdict": 8}  # the words get the rest
SMALLER = "~, too small: a smaller experiment than the target's (in brackets), so its figure is an indication only:"
KEYS = ("ratio", "ours", "other", "unit", "repeats", "settings")


def number(value: float) -> str:
    """A figure as a person reads it: three digits, four where it is next to 1."""
    if value == int(value) or value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4f}" if 0.99 < value < 1.01 else f"{value:.1f}" if value >= 50 else f"{value:.3g}"


def in_words(figure: Figure | None) -> str:
    """A figure with its spread; "-" if there is none."""
    if figure is None:
        return "-"
    if figure.low is None or figure.high is None or figure.low == figure.high:
        return number(figure.ratio)
    return f"{number(figure.ratio)} ({number(figure.low)} to {number(figure.high)})"


def targets_report(rows: Sequence[Row], benches: Table) -> RenderableType:
    """All targets with what is recorded for them, what measures them, and whether it can be run here."""
    made = _wide("id", "what", "now", "aim", "recorded", "verdict", "benchmark")
    reasons = {name: lacks(benches, benchmark) for name, benchmark in benches.benchmarks.items()}
    for row in rows:
        name = row.target.benchmark
        here = Text.assemble(name, (" ✗", BAD) if reasons[name] else (" ✓", GOOD))
        made.add_row(*_asked(row), in_words(row.recorded), _verdict(row), here)
    lacking = [Text(f"  {name}: {reason}", QUIET) for name, reason in reasons.items() if reason]
    return Group(
        made, Text("✓, ✗: all it needs is here, or not:" if lacking else "✓: all it needs is here", QUIET), *lacking
    )


def measured_report(rows: Sequence[Row], *, quick: bool) -> RenderableType:
    """What was measured beside what is recorded; below it, what was another experiment or is missing, and why."""
    made = _wide("id", "what", "now", "aim", "measured, quick" if quick else "measured", "recorded", "verdict")
    for row in rows:
        made.add_row(*_asked(row), in_words(row.measured), in_words(row.recorded), _verdict(row))
    lines: list[RenderableType] = [made]
    if any(row.verdict.startswith("~") or row.verdict == "too small" for row in rows):
        lines.append(Text(SMALLER, QUIET))
    for reason, group in groupby(sorted(rows, key=lambda row: row.reason), lambda row: row.reason):
        if reason:
            names = dict.fromkeys(row.target.id for row in group)
            lines.append(Text(f"  {' '.join(names)}: {reason}", QUIET))
    return Group(*lines)


def _wide(*columns: str) -> Rows:
    """A table without lines between its columns; figures stay narrow."""
    made = table(*columns)
    made.box, made.padding = SIMPLE_HEAD, (0, 1, 0, 0)
    made.pad_edge = False
    for column, name in zip(made.columns, columns, strict=True):
        column.max_width = WIDTHS.get(name.partition(",")[0])
        column.min_width = 12 if name == "benchmark" else None
    return made


def _asked(row: Row) -> list[str]:
    """Id, words, and both lines."""
    first = row.part is row.target.parts[0]
    what = f"{row.target.what}: {row.part.label}" if row.part.label else row.target.what
    lines = (line.text if line else "" for line in (row.part.now, row.part.aim))
    return [row.target.id if first else "", what if first else f"… {row.part.label}", *lines]


def _verdict(row: Row) -> Text:
    return Text(row.verdict, STYLES.get(row.verdict, QUIET))


def documents(rows: Sequence[Row], *, measured: bool) -> list[dict[str, Any]]:
    """For a program, a document a target: that of the part that decides, with all of them in "parts"."""
    found = []
    for target, group in groupby(rows, lambda row: row.target):
        parts = list(group)
        verdict = verdict_of(parts)
        whole = _document(target, next(row for row in parts if row.verdict == verdict), measured=measured)
        found.append({**whole, "parts": [_document(target, row, measured=measured) for row in parts]})
    return found


def _document(target: Target, row: Row, *, measured: bool) -> dict[str, Any]:
    figure = row.measured if measured else row.recorded
    values: Mapping[str, Any] = figure.as_json() if figure else dict.fromkeys(KEYS)
    spread = [figure.low, figure.high] if figure and figure.low is not None else None
    asked = {name: line.text if line else None for name, line in (("now", row.part.now), ("aim", row.part.aim))}
    return {
        "id": target.id,
        **{key: values[key] for key in KEYS},
        "what": target.what,
        "label": row.part.label,
        "spread": spread,
        **asked,
        "verdict": row.verdict,
        "reason": row.reason,
        "benchmark": target.benchmark,
        "recorded": row.recorded.ratio if row.recorded else None,
    }
