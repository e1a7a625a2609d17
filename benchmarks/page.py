"""Write docs/benchmarks.md from the recorded results.

python benchmarks/page.py              write it
python benchmarks/page.py --check      is it what the results give, and are the tables of other documents?
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "research"))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "stress"))

import accuracy
import transfer
from record import Figure, read_results

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"
FOLDERS = (HERE, HERE / "research", HERE.parent / "tests" / "stress")
SCRIPTS = (
    *("accuracy", "known_truth", "harm", "step_cost", "scale", "bundle_size", "memory", "serving", "cold_task"),
    *("hostile", "devices", "kill_resume", "fuzz", "own_data"),
)
GROUPS = {
    "L": "Learning",
    "B": "Bundle",
    "S": "Serving: TorchServe, real HTTP, resnet18 of width 20, 100 tasks of 10 classes, masks made up",
    "D": "Devices",
    "R": "Trust",
    "P": "People",
}
INTRODUCTION = """# Benchmarks

What this software is built to reach, and what was measured. *Now* is the limit to hold from the first version on, *aim*
is where it is going. `python benchmarks/page.py` writes this page from `benchmarks/results/`, which has the settings,
the command, the versions and the machine of every result: no figure here is typed by hand.

```sh
python -m benchmarks                        # the scripts, and how many of their targets are held
python benchmarks/step_cost.py              # measure again; some take hours
python benchmarks/step_cost.py --record     # the same, and keep the result
```

Two times that are compared were measured in turns, in one run on one machine, at least five times; given is the median
and, where it was recorded, the range. The other side has its own best settings. For means over seeds the range is one
sample deviation below and above. The machine had two cores and was shared: ranges are wide.
"""


def path_of(script: str) -> Path:
    """Where a script lies."""
    return next(folder / f"{script}.py" for folder in FOLDERS if (folder / f"{script}.py").exists())


def figures_of(script: str) -> list[Figure]:
    """The recorded results of a script, held against its targets."""
    results = {part: record["result"] for part, record in read_results(script).items()}
    return list(importlib.import_module(script).figures(results))


def number(value: float) -> str:
    """A number with three digits; with five where it is next to 1."""
    if value == int(value) or value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4f}" if 0.99 < value < 1.01 else f"{value:.1f}" if value >= 50 else f"{value:.3g}"


def in_words(figure: Figure) -> str:
    """A figure with its range."""
    low, high = (min(figure.repeats), max(figure.repeats)) if figure.repeats else (0, 0)
    return f"{number(figure.measured)} ({number(low)} to {number(high)})" if low < high else number(figure.measured)


def cells(*values: str) -> str:
    """A row of a table."""
    return "| " + " | ".join(values) + " |"


def tables(figures: Sequence[Figure]) -> Iterator[str]:
    """All figures in one table a group."""
    verdicts = Counter(figure.verdict for figure in figures)
    yield f"Of {len(figures)} figures, {verdicts['aim']} reach their aim, {verdicts['now']} hold what they must now, "
    yield f"{verdicts['miss']} miss it."
    for letter, heading in GROUPS.items():
        yield f"\n## {heading}\n"
        yield "| id | what | now | aim | measured | verdict | |\n|---|---|---|---|---|---|---|"
        for figure in sorted((f for f in figures if f.target[0] == letter), key=lambda f: f.target):
            aim = f"`{figure.aim}` {figure.aim_asks}".strip() if figure.aim else ""
            verdict = f"**{figure.verdict}**" if figure.verdict == "miss" else figure.verdict
            now = f"`{figure.now}`" if figure.now else ""
            yield cells(figure.target, figure.what, now, aim, in_words(figure), verdict, figure.note)


def section(script: str) -> Iterator[str]:
    """How a script measures, from its docstring, and with what it was recorded."""
    path = path_of(script)
    yield f"\n### `{path.relative_to(HERE.parent)}`\n"
    paragraphs = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").split("\n\n")
    yield "\n\n".join(" ".join(p.split()) for p in paragraphs if not p.strip().startswith(("python ", "OMP_")))
    recorded: dict[str, list[str]] = {}
    for part, about in read_results(script).items():
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        machine = ", ".join(f"{name}: {value}" for name, value in about["machine"].items())
        commit = f"commit {about['commit'][:7]}{'' if about['clean'] else ', changed'}; " if "commit" in about else ""
        recorded.setdefault(f"{commit}with {versions}; {machine}.", []).append(part)
    for words, parts in recorded.items():
        yield f"\nRecorded ({', '.join(parts)}) {words}"


def passes() -> Iterator[str]:
    """The time of each stage of the whole path, before it was profiled and after."""
    about = read_results("passes")["passes"]
    settings = about["settings"]
    yield "\n## Performance passes\n"
    yield f"Commit {settings['before']} beside {settings['after']}, in turns, {settings['rounds']} rounds, one thread;"
    yield f"measured by `passes.py` of {settings['after']}. Given are medians, and the range of the ratios.\n"
    yield "| stage | before | after | ratio | what the profiler showed, and what changed |\n|---|---|---|---|---|"
    for stage, row in about["result"].items():
        times = (f"{number(1000 * row[side])} ms" for side in ("before", "after"))
        ratio = f"{row['ratio']:.2f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f})"
        yield cells(stage, *times, ratio, row["found"])


def page() -> str:
    """The whole page."""
    figures = [figure for script in SCRIPTS for figure in figures_of(script)]
    parts = [INTRODUCTION, *tables(figures), "\n## How each was measured"]
    for script in SCRIPTS:
        parts += section(script)
    return "\n".join([*parts, *passes()]) + "\n"


def write() -> None:
    """Write the page anew."""
    (DOCS / "benchmarks.md").write_text(page(), "utf-8")


def faults() -> list[str]:
    """Where docs/ does not say what the results give."""
    stale = (DOCS / "benchmarks.md").read_text("utf-8") != page()
    results = {part: record["result"] for part, record in read_results("accuracy").items()}
    learned = [row for recipe in ("femnist1", "mixed") for row in accuracy.ablations(results, recipe)]
    tables = {
        "results.md": [row for name, rows in results["methods"].items() for row in accuracy.table(name, rows)],
        "transfer.md": [*learned, *transfer.table(read_results("transfer"))],
    }
    faults = ["docs/benchmarks.md: python benchmarks/page.py"][:stale]
    for document, rows in tables.items():
        quoted = (DOCS / document).read_text("utf-8").splitlines()
        faults += [f"docs/{document} has not {row}" for row in rows if row not in quoted]
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        write()
    elif faults():
        sys.exit("\n".join(faults()))


if __name__ == "__main__":
    main()
