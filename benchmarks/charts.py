"""The pictures of docs/benchmarks.md, from the recorded results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etcl_deploy.bench.run import Row

RESULTS = Path(__file__).parent / "results"
COLOURS = {"aim": "#009e73", "now": "#0072b2", "miss": "#d55e00"}  # told apart by those who see fewer colours, too
WAYS = ("packed", "zstd", "lzma", "huffman", "coded", "entropy")


def draw_all(rows: Sequence[Row], folder: Path) -> None:
    """Write all pictures."""
    import matplotlib as mpl

    mpl.use("agg")
    for name, draw in (("targets", lambda: draw_targets(rows)), ("femnist1", draw_femnist1), ("masks", draw_masks)):
        draw().savefig(folder / f"{name}.png", dpi=110)


def draw_targets(rows: Sequence[Row]) -> Any:
    """Every figure relative to its now line, on one scale: below 1 is better than it asks for."""
    from matplotlib import pyplot as plt

    shown = [row for row in rows if row.recorded and _scale(row, row.recorded.ratio)]
    figure, axis = plt.subplots(figsize=(9, 0.27 * len(shown) + 1.1), layout="constrained")
    for place, row in enumerate(shown):
        assert row.recorded and row.part.now
        colour = COLOURS[row.verdict]
        at = _scale(row, row.recorded.ratio)
        ends = [_scale(row, value) for value in (row.recorded.low, row.recorded.high)]
        if all(ends):
            axis.plot(ends, [place, place], color=colour, lw=2, alpha=0.5)
        axis.plot(at, place, "o", color=colour)
        aim = row.part.aim and _scale(row, row.part.aim.limit)
        if aim:
            axis.plot(aim, place, "|", color="black", ms=10)
    axis.axvline(1, color="grey", lw=1)
    axis.set_xscale("log")
    axis.set_xticks([0.1, 0.2, 0.5, 1, 2, 5, 10], ["0.1", "0.2", "0.5", "1", "2", "5", "10"])
    names = [f"{row.target.id}  {row.part.label}".rstrip() for row in shown]
    axis.set_yticks(range(len(shown)), names)
    axis.invert_yaxis()
    axis.set_xlabel("relative to the now line; left is better")
    for verdict, colour in COLOURS.items():
        axis.plot([], [], "o", color=colour, label={"aim": "reaches its aim", "now": "holds now"}.get(verdict, verdict))
    axis.plot([], [], "|", color="black", ms=10, ls="", label="aim")
    axis.legend(frameon=False, loc="lower left")
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def _scale(row: Row, value: float | None) -> float | None:
    """A value relative to the now line, turned so that less is better; None where that has no spec."""
    line = row.part.now
    if not value or value < 0 or line is None or line.limit <= 0 or line.sign == "=":
        return None
    return value / line.limit if line.sign == "<=" else line.limit / value


def draw_femnist1() -> Any:
    """ACC of the method, of it without each of its parts, and of a network for each task; beside the paper's."""
    from matplotlib import pyplot as plt

    table = json.loads((RESULTS / "femnist1.json").read_text())["result"]
    figure, axis = plt.subplots(figsize=(7.5, 2.8), layout="constrained")
    for place, row in enumerate(table.values()):
        deviation = row["acc"]["deviation"] or 0
        axis.errorbar(row["acc"]["mean"], place, xerr=deviation, fmt="o", color="#0072b2", capsize=3)
        axis.plot(row["paper"].get("acc"), place, "D", color="#999999")
    counts = {name: len(row["seeds"]) for name, row in table.items()}
    names = [f"{name.replace('-', ' ', 1)}, {count} seed{'s' * (count > 1)}" for name, count in counts.items()]
    axis.set_yticks(range(len(table)), names)
    axis.invert_yaxis()
    axis.errorbar([], [], xerr=[], fmt="o", color="#0072b2", capsize=3, label="here, 30 epochs")
    axis.plot([], [], "D", color="#999999", label="the paper, 50 epochs")
    axis.legend(frameon=False, loc="upper left")
    axis.set(xlim=(60, 90), xlabel="ACC on F-EMNIST-1, %")
    axis.grid(axis="x", alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def draw_masks() -> Any:
    """Bits a weight and task that several ways need for the same ten masks."""
    from matplotlib import pyplot as plt

    runs = json.loads((RESULTS / "bundle_size.json").read_text())["result"]["runs"]
    figure, axis = plt.subplots(figsize=(9, 3), layout="constrained")
    for number, way in enumerate(WAYS):
        bits = [8 * row["masks"][way] / row["tasks"] / row["weights"] for row in runs.values()]
        colour = "black" if way == "entropy" else None
        places = [place + 0.14 * (number - 2.5) for place in range(len(runs))]
        axis.bar(places, bits, 0.13, label="coded (ours)" if way == "coded" else way, color=colour)
    axis.set_xticks(range(len(runs)), list(runs), rotation=20)
    axis.set_ylabel("bits a weight and task")
    axis.legend(frameon=False, ncols=len(WAYS), loc="lower center", bbox_to_anchor=(0.5, 1))
    axis.spines[["top", "right"]].set_visible(False)
    return figure
