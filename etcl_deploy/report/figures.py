"""Charts as inline SVG. Text and axes take the colour of the page, light or dark."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

INK = "#010203"  # used for nothing else: replaced by the colour of the page
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f", "#a6761d")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: browsers can search it and read it aloud
    "svg.hashsalt": "etcl",
    "text.parse_math": False,  # dollar signs in a name are part of the name
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.prop_cycle": f"cycler('color', {list(COLOURS)})",
}
FEW = 12  # up to this many tasks are labelled by name; more are told apart by shade
WIDE = 7.2  # inches

Matrix = Sequence[Sequence[float | None]]


def heat_map(
    values: np.ndarray,
    names: Sequence[str],
    *,
    label: str,
    rows: str,
    columns: str,
    limits: tuple[float, float],
    marked: np.ndarray | None = None,
    form: str = "{:.0f}",
) -> str:
    """A matrix as shades of colour; nan is left empty, `marked` cells have a frame."""
    count = len(names)

    def draw(axes: Axes) -> None:
        image = axes.pcolormesh(
            np.ma.masked_invalid(values), cmap="viridis", vmin=limits[0], vmax=limits[1], rasterized=count > 60
        )
        axes.set_aspect("equal")
        axes.invert_yaxis()
        axes.spines[:].set_visible(False)
        step = 1 if count <= 40 else 10
        places = range(0, count, step)
        labels = [f"{place + 1} {_short(names[place])}" if count <= 40 else str(place + 1) for place in places]
        axes.set_xticks([place + 0.5 for place in places], [str(place + 1) for place in places])
        axes.set_yticks([place + 0.5 for place in places], labels)
        axes.tick_params(length=0, labelsize=10 if count <= FEW else 7)
        axes.set_xlabel(columns)
        axes.set_ylabel(rows)
        if marked is not None:
            frames = [
                Rectangle((column + 0.06, row + 0.06), 0.88, 0.88, fill=False, edgecolor=COLOURS[1], linewidth=1.6)
                for row, column in np.argwhere(marked)
            ]
            axes.add_collection(PatchCollection(frames, match_original=True, rasterized=count > 60))
        for (row, column), value in np.ndenumerate(values) if count <= FEW else ():
            if not np.isnan(value):
                shade = (value - limits[0]) / (limits[1] - limits[0] or 1)
                colour = "black" if shade > 0.6 else "white"
                axes.text(column + 0.5, row + 0.5, form.format(value), ha="center", va="center", color=colour, size=8)
        bar = axes.figure.colorbar(image, ax=axes, shrink=0.7, pad=0.02)
        bar.outline.set_visible(False)
        bar.set_label(label)

    side = min(WIDE, 2.2 + 0.42 * count)
    return _svg(draw, side + 1.2, max(1.8, side * 0.8))


def task_curves(matrix: Matrix, names: Sequence[str]) -> str:
    """A line for each task: its accuracy after every later one."""

    def draw(axes: Axes) -> None:
        ends = []
        shades = colormaps["turbo"](np.linspace(0.1, 0.9, len(names)))  # without the shades a dark or light page hides
        for number, name in enumerate(names):
            places = np.arange(number, len(matrix)) + 1
            values = np.array([row[number] for row in matrix[number:]], float)
            marker = "o" if len(names) <= FEW or number == len(names) - 1 else ""
            axes.plot(places, values, marker=marker, markersize=3, linewidth=1.2, color=shades[number])
            ends.append((values[-1], name))
        axes.set_xlabel("tasks learned")
        axes.set_ylabel("test accuracy, %")
        axes.margins(x=0.02 if len(names) > FEW else 0.12, y=0.1)
        _limit_percent(axes)
        if len(names) <= FEW:
            low, high = axes.get_ylim()
            _label_ends(axes, ends, len(matrix), (high - low) / 18)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    return _svg(draw, WIDE, 3.6)


def bars(
    values: Mapping[str, float | None], label: str, form: str, deviations: Mapping[str, float | None] | None = None
) -> str:
    """A bar for each known value, with the value and its deviation beside it."""

    def draw(axes: Axes) -> None:
        known = {name: value for name, value in values.items() if value is not None}
        places, heights = np.arange(len(known)), list(known.values())
        spread = [(deviations or {}).get(name) or 0.0 for name in known]
        axes.barh(places, heights, xerr=spread if any(spread) else None, color=COLOURS[0], height=0.6, ecolor=INK)
        axes.set_yticks(places, [_short(name) for name in known], size=10 if len(known) <= FEW else 7)
        axes.invert_yaxis()
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_xlabel(label)
        for place, height, room in zip(places, heights, spread, strict=True):
            end = max(height + room, 0)
            axes.annotate(form.format(height), (end, place), (4, 0), textcoords="offset points", va="center", size=8)
        axes.margins(x=0.15)

    return _svg(draw, WIDE, 0.9 + (0.32 if len(values) <= FEW else 0.16) * len(values))


def lines(series: Mapping[str, Sequence[float | None]], x: str, y: str, lowest: float | None = None) -> str:
    """A line for each name over 1, 2, 3, ...; None leaves a hole in it."""

    def draw(axes: Axes) -> None:
        for name, values in series.items():
            marker = "o" if len(values) < 60 else ""
            axes.plot(np.arange(len(values)) + 1, np.array(values, float), marker=marker, markersize=3, label=name)
        if len(series) > 1:
            legend = axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
            for text in legend.get_texts():
                text.set_color(INK)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if max(map(len, series.values())) == 1:
            axes.set_xticks([1])
        if y.endswith("%"):
            _limit_percent(axes)
        if lowest is not None:
            axes.set_ylim(lowest, lowest + 1.05 * (axes.get_ylim()[1] - lowest))

    return _svg(draw, WIDE, 3.0)


def _limit_percent(axes: Axes) -> None:
    """End the axis near 100 %, and show at least ten points so that small changes look small."""
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 90.0), min(high, 101.0))


def _label_ends(axes: Axes, ends: list[tuple[float, str]], place: int, room: float) -> None:
    """Write names beside the ends of lines, moved down where they would overlap."""
    height = np.inf
    for value, name in sorted((end for end in ends if not np.isnan(end[0])), reverse=True):
        height = min(value, height - room)
        end = (place, height)
        axes.annotate(_short(name), end, (6, 0), textcoords="offset points", va="center", size=8, annotation_clip=False)


def _short(name: str) -> str:
    """A name that fits beside a chart; the middle is cut, since names often differ at their ends."""
    return name if len(name) <= 18 else f"{name[:9]}…{name[-8:]}"


def _svg(draw: Callable[[Axes], None], width: float, height: float) -> str:
    """An `<svg>` element that fills the width of the page, up to `width` inches."""
    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        draw(axes)
        text = io.StringIO()
        with warnings.catch_warnings():  # the browser draws the text, in its own font
            warnings.filterwarnings("ignore", "Glyph .* missing from")
            figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r' width="[\d.]+pt"', f' style="width:100%;max-width:{width:.1f}in;height:auto"', svg, count=1)
    svg = re.sub(r' height="[\d.]+pt"', "", svg, count=1)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return re.sub(r'<g id="[\w.]+">', "<g>", svg)  # ids would repeat within a page
