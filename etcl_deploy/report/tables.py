"""Tables for the terminal. Each is drawn from the document `--json` prints; nothing here prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from etcl_deploy.learn.metrics import shortage

if TYPE_CHECKING:
    from etcl_deploy.learn.run import RunSummary

GOOD, BAD, QUIET = "green", "red", "dim"
COMPARE_COLUMNS = ("method", "seeds", "ACC, %", "FWT", "BWT", "time", "size")


class PlainTable(Table):
    """A table that shows its cells as they are: no markup, no control characters."""

    def add_row(self, *cells: RenderableType | None, style: Any = None, end_section: bool = False) -> None:
        """Add a row of texts."""
        shown = [plain(cell) if isinstance(cell, str) else cell for cell in cells]
        super().add_row(*shown, style=style, end_section=end_section)


def plain(text: str, style: str = "") -> Text:
    """Text without markup, with unprintable characters replaced."""
    return Text("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text), style)


def size(count: float) -> str:
    """Bytes with a unit: 5.21 MB."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def shown(value: float | None, form: str = "{:.1f}") -> str:
    """A number in that form; "-" where it is not known."""
    return "-" if value is None else form.format(value)


def percent(value: float | None) -> str:
    """An accuracy with one digit."""
    return shown(value, "{:.1f} %")


def table(*columns: str, rows: Iterable[Sequence[RenderableType]] = (), title: str | None = None) -> PlainTable:
    """A table; columns named with a leading '>' are aligned right."""
    made = PlainTable(title=title and plain(title), title_justify="left", title_style="bold", header_style="bold")
    for column in columns:
        made.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    for row in rows:
        made.add_row(*row)
    return made


def facts(**values: str) -> Text:
    """Names in bold, each followed by its value, on one line."""
    line = Text()
    for name, value in values.items():
        line.append(f"{name} ", "bold").append(f"{value}   ")
    line.rstrip()
    return line


def run_report(summary: RunSummary) -> RenderableType:
    """The accuracy matrix of a run, ACC, BWT, FWT, the share claimed, the time, and the preset if there is one."""
    rows = accuracy_rows(summary)
    if len(rows) <= 8:
        matrix = table("task", *(f">after {number + 1}" for number in range(len(rows))), rows=rows)
    else:  # more columns do not fit a terminal; --json has the whole matrix
        ends = [[row[0], row[number + 1], row[-1]] for number, row in enumerate(rows)]
        matrix = table("task", ">learned", ">now", rows=ends)
    line = facts(
        ACC=shown(summary.acc, "{:.2f} %"),
        BWT=shown(summary.bwt, "{:+.4f}"),
        **({} if summary.fwt is None else {"FWT": f"{summary.fwt:+.4f}"}),
        claimed=f"{summary.claimed:.0%} of the backbone",
        time=f"{summary.seconds:.0f} s",
        **({"preset": summary.preset} if summary.preset else {}),
    )
    parts: list[RenderableType] = [matrix, line]
    short = shortage(summary.claimed)
    if short:
        parts.append(Text(short, style="yellow"))
    return Group(*parts)


def accuracy_rows(summary: RunSummary) -> list[list[str]]:
    """A row for each task: its name, and its accuracy after every task; empty before it was learned."""
    matrix = summary.matrix
    return [
        [f"{task + 1} {name}", *("" if number < task else shown(row[task]) for number, row in enumerate(matrix))]
        for task, name in enumerate(summary.tasks)
    ]


def compare_report(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A row for each method: mean and deviation over the seeds."""
    first, *others = COMPARE_COLUMNS
    return table(first, *(f">{column}" for column in others), rows=map(compare_cells, rows))


def compare_cells(row: Mapping[str, Any]) -> list[str]:
    """The cells of a method, in the order of COMPARE_COLUMNS."""
    forms = {"acc": "{:.2f}", "fwt": "{:+.3f}", "bwt": "{:+.3f}", "seconds": "{:.0f} s"}
    figures = (_with_deviation(row[name], form) for name, form in forms.items())
    count = row["bytes"]["mean"]
    return [row["method"], str(len(row["seeds"])), *figures, "-" if count is None else size(count)]


def _with_deviation(value: Mapping[str, float | None], form: str) -> str:
    deviation = value["deviation"]
    return shown(value["mean"], form) + ("" if deviation is None else f" ± {form.replace('+', '').format(deviation)}")


def recipes_report(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A row for each recipe: what it is, and which of its data is there."""
    made = table("recipe", "what it is", ">tasks", "network", "data")
    for row in rows:
        needed = Text(", ").join(
            Text(f"{name} ✓", GOOD) if there else Text(f"{name} missing", BAD) for name, there in row["data"].items()
        )
        about, tasks = row["about"].partition(": ")[2], str(row["tasks"] or "-")
        made.add_row(row["name"], about, tasks, row["network"], needed or Text("comes with scikit-learn", QUIET))
    return made


def data_report(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Where each data set is, or how to get it."""
    parts: list[RenderableType] = []
    for row in rows:
        how = f"etcl data fetch downloads {size(row['download'])} to it" if row["download"] else row["by_hand"]
        if row["place"]:
            parts.append(Text.assemble(("✓ ", GOOD), plain(f"{row['title']}: {row['place']}")))
            if row["partial"]:
                parts.append(plain(f"  only a part of it: {row['partial']}", QUIET))
                parts.append(plain(f"  the whole of it belongs in {row['folder']}; {how}", QUIET))
            continue
        parts.append(Text.assemble(("✗ ", BAD), plain(f"{row['title']} is missing: {', '.join(row['missing'])}")))
        if row["pickled"]:
            parts.append(plain(f"  {row['pickled']}"))
        parts.append(plain(f"  from {row['home']} ({row['terms']})", QUIET))
        parts.append(plain(f"  belongs in {row['folder']}; {how}"))
    return Group(*parts)


def transfer_report(summary: RunSummary) -> RenderableType:
    """For each task: the tasks it was compared with, why they are similar or not, and the heads it improved."""
    compared = table("task", "compared with", ">distance", ">untrained", "similar", "reason", title="Similarity")
    for name, rows in summary.comparisons.items():
        for number, row in enumerate(rows):
            verdict = Text("yes", GOOD) if row.similar else Text("no", QUIET)
            distances = (f"{row.distance:.3f}", f"{row.original:.3f}")
            compared.add_row("" if number else name, row.task, *distances, verdict, row.reason)
    columns = ("by task", "head of", ">kept", ">moved", ">new items", ">after", ">own items", ">after", ">worst class")
    heads = table(*columns, title="Heads improved")
    for name, changes in summary.heads.items():
        for number, change in enumerate(changes):
            accuracies = map(percent, (change.before, change.after, change.own_before, change.own_after))
            moved = f"{change.moved:.3f}"
            worst = f"{change.worst:+.1f}"
            heads.add_row("" if number else name, change.task, f"{change.kept:.0%}", moved, *accuracies, worst)
    return Group(*(made for made in (compared, heads) if made.row_count))


def bundle_report(info: Mapping[str, Any]) -> RenderableType:
    """The bytes of a bundle by part and by task, with bars."""
    title = f"{info['backbone']} bundle, masks {info['encoding']}, weights {info['precision']}"
    parts = table("part", ">bytes", ">of dense", "", title=title)
    total, dense = info["bytes"]["total"], info["separate"]
    for part in ("backbone", "masks", "heads", "norms", "manifest"):
        parts.add_row(part, *_beside(info["bytes"][part], dense))
    parts.add_section()
    parts.add_row("bundle", *_beside(total, dense), style="bold")
    parts.add_row(f"{len(info['tasks'])} dense models", *_beside(dense, dense))
    densities = sorted({f"{task['density']:.2f}" for task in info["tasks"]})
    norm = size(info["bytes"]["norms"] / len(info["tasks"]))  # nearly the same for all
    title = f"tasks, density {' to '.join(densities[:: max(1, len(densities) - 1)])}, normalization {norm} each"
    tasks = table("task", ">accuracy %", ">mask", ">head", ">all", ">of dense", "", title=title)
    most = max(task["bytes"]["total"] for task in info["tasks"])
    for task in info["tasks"]:
        own = task["bytes"]
        counts = (size(own[part]) for part in ("mask", "head", "total"))
        share = f"{own['total'] * len(info['tasks']) / dense:.1%}"
        tasks.add_row(task["name"], _accuracy(task), *counts, share, Bar(most, 0, own["total"], width=8))
    return Group(parts, tasks, Text(f"digest {info['digest']}", QUIET))


def _beside(count: float, whole: float) -> tuple[str, str, Bar]:
    """Bytes, their share of the whole in percent, and as a bar."""
    return size(count), f"{count / whole:.1%}", Bar(whole, 0, count, width=24)


def _accuracy(task: Mapping[str, Any]) -> str:
    """The accuracy of a bundled task; where a lower precision changed it, also the one before."""
    now, before = (shown(task[key]) for key in ("accuracy", "learned"))
    return now if now == before else f"{before} → {now}"


def predictions_report(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A row for each image: its class, the probability, and the next three classes."""
    made = table("image", "task", "class", ">probability", "then")
    for row in rows:
        best = sorted(row["scores"].items(), key=lambda item: -item[1])
        then = ", ".join(f"{label} {score:.3f}" for label, score in best[1:4])
        made.add_row(row["input"], row["task"], row["label"], f"{best[0][1]:.3f}", then)
    return made


def onnx_line(report: Mapping[str, Any]) -> str:
    """One ONNX file: what was written, and how it compares with the bundle."""
    parity, accuracy = report["parity"], report.get("accuracy")
    words = [size(report["bytes"]), f"opset {report['opset']}", report["precision"]]
    words += ["compact"] if report.get("compact") else []
    said = [
        f"same class for {parity['same_class']} of {parity['items']} images, "
        f"largest relative difference {parity['max_rel_diff']:.0e}"
    ]
    if accuracy:
        said.append(f"{accuracy['before']:.2f} % → {accuracy['after']:.2f} % of {accuracy['items']} test images right")
    layers = report.get("layers", ())
    unused = sum(layer["outputs"] - layer["kept_outputs"] for layer in layers)
    if unused:
        said.append(f"{unused} of {sum(layer['outputs'] for layer in layers)} channels left out")
    return f"{report['file']} ({', '.join(words)}): {'; '.join(said)}"


def onnx_report(reports: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A row for each ONNX file."""
    made = table("file", "task", ">bytes", ">same class", ">difference", ">accuracy")
    for report in reports:
        parity, accuracy = report["parity"], report["accuracy"]
        right = f"{accuracy['before']:.2f} → {accuracy['after']:.2f}" if accuracy else "-"
        same = f"{parity['same_class']}/{parity['items']}"
        made.add_row(
            report["file"], report["task"], size(report["bytes"]), same, f"{parity['max_rel_diff']:.0e}", right
        )
    return made


def demo_report(result: Mapping[str, Any]) -> RenderableType:
    """Accuracies, how many items got the network's class in each way to ask, and sizes."""
    tasks, sizes = result["tasks"], result["bytes"]
    made = table("task", ">learned", ">at end", *(f">{way}" for way in tasks[0]["same"]))
    for task in tasks:
        counts = [
            Text(f"{count}/{task['items']} same", GOOD if count == task["items"] else BAD)
            for count in task["same"].values()
        ]
        made.add_row(task["name"], percent(task["after_learning"]), percent(task["at_end"]), *counts)
    bytes_line = {
        "bundle": size(sizes["bundle"]),
        f"{len(tasks)} separate models": size(sizes["separate"]),
        "ratio": f"{sizes['bundle'] / sizes['separate']:.2f}",
    }
    others = {"largest mixed batch": str(result["largest_batch"]), "time": f"{result['seconds']:.0f} s"}
    return Group(made, facts(**bytes_line), facts(**others))


def server_report(info: Mapping[str, Any]) -> RenderableType:
    """The addresses and files of a server."""
    made = Table.grid(padding=(0, 2))
    for key, value in info.items():
        if value is not None:
            made.add_row(Text(key.replace("_", " "), "bold"), Text(str(value), overflow="fold"))
    return made


def doctor_report(checks: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A row for each check."""
    made = table("", "what", "found", "how to get it")
    for check in checks:
        missing = Text("✗", BAD) if check["needed"] else Text("-", QUIET)
        made.add_row(Text("✓", GOOD) if check["ok"] else missing, check["name"], check["found"], check["hint"])
    return made
