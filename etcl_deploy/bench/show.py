"""Targets and figures for a person and for a program: a rich table, a JSON document."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.text import Text

from etcl_deploy.bench.run import Row, lacks, verdict_of
from etcl_deploy.bench.targets import Figure, Table, Target
from etcl_deploy.report.tables import BAD, GOOD, QUIET, PlainTable

STYLES = {"aim": f"bold {GOOD}", "now": GOOD, "miss": f"bold {BAD}", "failed": f"bold {BAD}"}
RATIOS = {"": 17, "now": 11, "aim": 12, "verdict": 9}  # how wide columns are beside each other; the others 15
SMALLER = "~, too small: a smaller experiment than the target's (in brackets), so its figure is an indication only:"
Cell = str | Text
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
    reasons = {name: lacks(benches, benchmark) for name, benchmark in benches.benchmarks.items()}

    def told(row: Row) -> list[Cell]:
        name = row.target.benchmark
        here = Text.assemble(name, (" ✗", BAD) if reasons[name] else (" ✓", GOOD))
        return [in_words(row.recorded), _verdict(row), here]

    lacking = [Text(f"  {name}: {reason}", QUIET) for name, reason in reasons.items() if reason]
    return Group(
        *_by_target(rows, ("recorded", "verdict", "benchmark"), told),
        Text("✓, ✗: all it needs is here, or not:" if lacking else "✓: all it needs is here", QUIET),
        *lacking,
    )


def measured_report(rows: Sequence[Row], *, quick: bool) -> RenderableType:
    """What was measured beside what is recorded; below it, what was another experiment or is missing, and why."""

    def told(row: Row) -> list[Cell]:
        return [in_words(row.measured), in_words(row.recorded), _verdict(row)]

    named = ("measured, quick" if quick else "measured", "recorded", "verdict")
    lines = [*_by_target(rows, named, told)]
    if any(row.verdict.startswith("~") or row.verdict == "too small" for row in rows):
        lines.append(Text(SMALLER, QUIET))
    for reason, group in groupby(sorted(rows, key=lambda row: row.reason), lambda row: row.reason):
        if reason:
            names = dict.fromkeys(row.target.id for row in group)
            lines.append(Text(f"  {' '.join(names)}: {reason}", QUIET))
    return Group(*lines)


def _by_target(
    rows: Sequence[Row], named: Sequence[str], told: Callable[[Row], list[Cell]]
) -> Iterator[RenderableType]:
    """A line of words for every target, below it a line for each of its parts: both lines, and what is `told` of it."""
    names = ["", "now", "aim", *named]
    yield _columns(names, [[Text(name, "bold") for name in names]])
    yield Rule(style=QUIET)
    for target, group in groupby(rows, lambda row: row.target):
        yield Text.assemble((f"{target.id} ", "bold"), target.what)
        yield _columns(names, [[row.part.label, *_lines(row), *told(row)] for row in group])


def _columns(names: Sequence[str], cells: Sequence[Sequence[Cell]]) -> RenderableType:
    """Cells in columns whose widths follow from their names and the terminal's alone, so that all of them align."""
    made = PlainTable.grid(expand=True, padding=(0, 1, 0, 0))
    made.add_column(width=2)
    for name in names:
        made.add_column(ratio=RATIOS.get(name.partition(",")[0], 15))
    for row in cells:
        made.add_row("", *row)
    return made


def _lines(row: Row) -> list[Cell]:
    return [line.text if line else "" for line in (row.part.now, row.part.aim)]


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
