"""Write docs/benchmarks.md and its pictures from the recorded results.

python benchmarks/page.py              write them
python benchmarks/page.py --check      is the page what the results give? (text only)
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from charts import draw_all
from figures import read_results

from etcl_deploy.bench.run import Row, recorded_rows, verdict_of
from etcl_deploy.bench.show import in_words, number
from etcl_deploy.bench.targets import Benchmark, read_table

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
GROUPS = {
    "L": "Learning",
    "B": "Bundle",
    "S": "Serving: TorchServe, real HTTP, resnet18 of width 20, 100 tasks of 10 classes, masks made up",
    "D": "Devices",
    "R": "Trust",
    "P": "People",
}
INTRODUCTION = """# Benchmarks

What this software is built to reach, and what was measured. *Now* is the line to hold from the first version on, *aim*
is where it is going. `python benchmarks/page.py` writes this page from `benchmarks/results/*.json`, each of which has
the settings, the command, the versions and the machine that gave it: no figure here is typed by hand.

```sh
etcl bench --list      # the table below, and whether the data is there to measure it again
etcl bench L7          # measure one target again, in full; some take hours
etcl bench --quick     # all of them in smaller experiments, within 15 minutes on two cores
```

`etcl bench` works in a checkout, and changes no recorded result: `python benchmarks/NAME.py` does. Two times that are
compared were measured in turns, in one run on one machine, at least five times; given is the median and, where it was
recorded, the range. The other side has its own best settings. For means over seeds the range is one sample deviation
below and above. *Clearly* means by more than two deviations between at least three seeds. The machine had two cores and
was shared: ranges are wide. A target with several parts is as good as the worst of them.
"""
PICTURES = """
![Every figure relative to its now line](pictures/targets.png)

Left is better. Each dot is a figure relative to its *now* line, with its range; the tick is the *aim*. All-or-nothing
lines (= 0, = 1) and lines at 0 (L2, L5) have no place on such a scale, and are in the table only.

![ACC on F-EMNIST-1](pictures/femnist1.png)

![Bits a weight and task](pictures/masks.png)
"""
COLUMNS = ("figure", "measured", "repeats", "ours", "other", "unit", "now", "aim", "verdict")


def words(path: Path) -> str:
    """How a script measures, from its docstring: without its commands, a paragraph a line."""
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    paragraphs = [paragraph for paragraph in text.split("\n\n") if "python benchmarks/" not in paragraph]
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def cells(*values: str) -> str:
    return "| " + " | ".join(value.replace("|", "\\|") for value in values) + " |"


def lines_of(row: Row) -> tuple[str, str]:
    now, aim = (f"`{line.text}`" if line else "" for line in (row.part.now, row.part.aim))
    return now, aim


def bold(verdict: str) -> str:
    return f"**{verdict}**" if verdict == "miss" else verdict


def named(row: Row) -> str:
    return f"{row.target.id} {row.part.label}".strip()


def overview(rows: Sequence[Row]) -> Iterator[str]:
    """All targets in one table a group; before them, how many hold and which miss."""
    verdicts = Counter(verdict_of(group) for _, group in groupby(rows, lambda row: row.target))
    told = (("aim", "reach their aim"), ("now", "hold the now line"), ("miss", "miss it"))
    counts = [f"{verdicts[verdict]} {what}" for verdict, what in told]
    counts += [f"{verdicts['not measured yet']} are not measured yet"] if verdicts["not measured yet"] else []
    yield f"\nOf {sum(verdicts.values())} targets, {', '.join(counts)}.\n"
    yield "**What misses**, part by part:\n"
    for row in rows:
        if row.verdict == "miss" and row.recorded:
            line = row.part.now.text if row.part.now else ""
            yield f"* {named(row)}: {row.target.what}: {in_words(row.recorded)}, and should be {line}."
    yield PICTURES
    yield "## All targets"
    for letter, group in groupby(rows, lambda row: row.target.id[0]):
        yield f"\n### {GROUPS[letter]}\n"
        yield "| id | what | now | aim | measured | verdict |\n|---|---|---|---|---|---|"
        for row in group:
            label = f": {row.part.label}" if row.part.label else ""
            yield cells(
                row.target.id, row.target.what + label, *lines_of(row), in_words(row.recorded), bold(row.verdict)
            )


def section(benchmark: Benchmark, rows: Iterable[Row], about: Mapping[str, Any] | None) -> Iterator[str]:
    """How one benchmark measures, all that it found, and how to repeat it."""
    own = [row for row in rows if row.target.benchmark == benchmark.name]
    ids = dict.fromkeys(row.target.id for row in own)
    yield f"\n### {', '.join(ids)}: `{benchmark.name}`\n"
    script = HERE / f"{benchmark.name}.py"
    yield words(script) if script.exists() else "The script is not written yet."
    if about is None:
        yield "\nNot measured yet."
        return
    yield "\n".join(["", cells(*COLUMNS), "|---" * len(COLUMNS) + "|"])
    for row in own:
        found = row.recorded
        if found is None:
            yield cells(named(row), "-", "", "", "", "", *lines_of(row), row.verdict)
            continue
        sides = ("" if value is None else number(value) for value in (found.ours, found.other))
        repeats = "" if found.repeats is None else str(found.repeats)
        yield cells(named(row), in_words(found), repeats, *sides, found.unit, *lines_of(row), bold(row.verdict))
    notes = [f"* {named(row)}: {row.recorded.note}." for row in own if row.recorded and row.recorded.note]
    if notes:
        yield "\n".join(["", *notes])
    parts = f" Its runs, each with its own command, are in `benchmarks/results/{benchmark.name}/`."
    quick = f" (smaller: {benchmark.smaller})" if benchmark.smaller else " (fewer or shorter repeats)"
    yield circumstances(about)
    if (HERE / "results" / benchmark.name).is_dir():
        yield parts
    yield f"Again: `etcl bench {benchmark.name}`; quickly: `etcl bench {benchmark.name} --quick`{quick}."


def circumstances(about: Mapping[str, Any]) -> str:
    """With which command, versions and machine something was measured."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    machine = "{architecture}, cores: {cores}, threads: {threads}".format(**about["machine"])
    return f"\nRecorded by `{about['command']}` ({versions}; {machine})."


def passes() -> Iterator[str]:
    """What each stage of the whole path took before somebody looked at it with a profiler, and after."""
    about = json.loads((HERE / "results" / "passes.json").read_text("utf-8"))
    yield "\n## Performance passes\n"
    yield words(HERE / "passes.py")
    yield "\n| stage | before | after | ratio | what the profiler showed, and what changed |\n|---|---|---|---|---|"
    for stage, row in about["result"].items():
        times = (f"{number(1000 * row[side])} ms" for side in ("before", "after"))
        spread = f"{row['ratio']:.2f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f})"
        yield cells(stage, *times, spread, row["found"])
    yield circumstances(about)


def page() -> str:
    """The whole page."""
    table = read_table(HERE)
    rows, results = recorded_rows(table), read_results(HERE / "results")
    parts = [INTRODUCTION, *overview(rows), "\n## How each was measured"]
    for name in dict.fromkeys(row.target.benchmark for row in rows):
        parts += section(table.benchmarks[name], rows, results.get(name))
    parts += passes()
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    made = page()
    if parser.parse_args().check:
        if not PAGE.exists() or PAGE.read_text("utf-8") != made:
            sys.exit("docs/benchmarks.md is not what the results give: python benchmarks/page.py")
        return
    PAGE.write_text(made, "utf-8")
    draw_all(recorded_rows(read_table(HERE)), PAGE.parent / "pictures")


if __name__ == "__main__":
    main()
