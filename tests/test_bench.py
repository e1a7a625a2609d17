"""`etcl bench`: targets, figures of recorded and new results, and the page that is written from them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from math import inf
from pathlib import Path
from typing import Any

import pytest
from conftest import ETCL, ROOT

from etcl_deploy.bench.run import Row, verdict_of
from etcl_deploy.bench.targets import Figure, Line, Part, read_table
from etcl_deploy.errors import BenchmarkError

FOLDER = ROOT / "benchmarks"
TABLE = read_table(FOLDER)
COUNTS = {"L": 8, "B": 3, "S": 8, "D": 4, "R": 3, "P": 1}
IDS = [f"{letter}{number + 1}" for letter, count in COUNTS.items() for number in range(count)]
KEYS = {"id", "ratio", "ours", "other", "unit", "repeats", "settings"}


def bench(*words: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run(
        [ETCL, "bench", *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


def script(name: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, FOLDER / name, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def figures_in(folder: Path) -> dict[str, list[Figure]]:
    """What the readers find in a folder of results."""
    done = script("figures.py", folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {name: [Figure.from_json(figure) for figure in row["figures"]] for name, row in found.items()}


def test_the_list_has_every_target_once() -> None:
    """With its lines, what is recorded for it, and the script that measures it."""
    done = bench("--list", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["id"] for row in rows] == IDS
    for row in rows:
        assert row.keys() >= KEYS and row["benchmark"] in TABLE.benchmarks
        assert all(part["now"] or part["aim"] for part in row["parts"])
    shown = bench("--list", COLUMNS="80").stdout.splitlines()
    assert [line.partition(" ")[0] for line in shown if line[:1].isupper()] == IDS, "a line of words each, unbroken"
    assert any(" miss " in line for line in shown)


@pytest.mark.parametrize("words", [(), ("L7", "--list")])
def test_wrong_usage_is_exit_code_2(words: tuple[str, ...]) -> None:
    """Nothing to do, or two things at once."""
    assert bench(*words).returncode == 2


def test_an_unknown_name_is_one_line_with_all_that_exist() -> None:
    """Ids and scripts."""
    done = bench("nobody")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "no target or benchmark is called 'nobody'; there are: L1, L2" in done.stderr
    assert "step_cost" in done.stderr


def test_a_target_is_as_good_as_its_worst_part() -> None:
    """One that nobody has measured is not as good as a measured one; one that was left out says nothing."""
    target = TABLE.targets["L1"]
    for word, whole in (("now", "now"), ("not measured yet", "not measured yet"), ("skipped", "aim")):
        assert verdict_of(Row(target, target.parts[0], None, None, found) for found in ("aim", word)) == whole


def test_outside_a_checkout_there_are_no_benchmarks(tmp_path: Path) -> None:
    """They are not installed, and the message says so."""
    done = bench("--list", cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "part of the source tree" in done.stderr


def test_without_its_data_a_target_is_skipped(tmp_path: Path) -> None:
    """That is no error."""
    done = bench("L3", "--quick", "--json", ETCL_DATA=str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["id"], found["ratio"], found["verdict"]) == ("L3", None, "skipped")
    assert found["reason"] == "no mnist below $ETCL_DATA"


def test_a_quick_benchmark_runs_and_leaves_the_recorded_result_alone(tmp_path: Path) -> None:
    """A real one, from any folder of the checkout; its result is kept where --work says."""
    recorded = FOLDER / "results" / "cold_task.json"
    before = hashlib.sha256(recorded.read_bytes()).digest()
    done = bench("S5", "--quick", "--json", "--work", str(tmp_path), cwd=ROOT / "tests")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() >= KEYS
    assert found["ratio"] == pytest.approx(found["ours"] / found["other"])
    assert found["spread"][0] <= found["spread"][1] and found["verdict"] in ("aim", "now", "miss")
    assert "cold_task: " in done.stderr
    assert (tmp_path / "quick" / "results" / "cold_task" / "cold_task.json").exists()
    assert hashlib.sha256(recorded.read_bytes()).digest() == before


SMALL_TABLE = """
[benchmarks.broken]
[benchmarks.whole]
smaller = "one of two"
[targets.A]
what = "a"
benchmark = "broken"
parts = [{ now = "<= 1" }]
[targets.B]
what = "b"
benchmark = "whole"
parts = [{ now = "<= 1 of 2 items", aim = "<= 0.5 of 2 items" }, { label = "rest", now = "<= 1" }]
"""
SMALL_SCRIPTS = {
    "broken": "print('working')\nraise SystemExit('out of ink')\n",
    "whole": "import os, pathlib\npathlib.Path(os.environ['ETCL_RESULTS'], 'whole.json').write_text('{}')\n",
    "figures": """import json, pathlib, sys
from etcl_deploy.bench.targets import Figure
there = pathlib.Path(sys.argv[1], 'whole.json').exists()
figures = [Figure('B', '', 0.7, 'seconds', count=1).as_json()]
print(json.dumps({'whole': {'figures': figures, 'settings': {}}} if there else {}))
""",
}


def test_a_script_that_fails_stops_no_other(tmp_path: Path) -> None:
    """It is reported with its last line, the others go on, and the exit code is 1."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "targets.toml").write_text(SMALL_TABLE)
    for name, text in SMALL_SCRIPTS.items():
        (tmp_path / "benchmarks" / f"{name}.py").write_text(text)
    done = bench("--quick", "--json", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    broken, whole = json.loads(done.stdout)
    assert (broken["verdict"], broken["reason"], broken["ratio"]) == ("failed", "out of ink", None)
    assert "working" in done.stderr
    assert (whole["verdict"], whole["reason"], whole["ratio"]) == ("~ now", "one of two", 0.7)
    assert (whole["parts"][1]["verdict"], whole["parts"][1]["reason"]) == ("skipped", "only in a full run")


def test_recorded_results_give_every_part_of_their_targets_once() -> None:
    """And nothing that no target asks for."""
    found = figures_in(FOLDER / "results")
    assert set(found) >= set(TABLE.benchmarks) - {"devices", "two_hundred"}
    for name, figures in found.items():
        targets = [target for target in TABLE.targets.values() if target.benchmark == name]
        asked = {(target.id, part.label) for target in targets for part in target.parts}
        assert Counter((figure.target, figure.label) for figure in figures) == Counter(asked)


def test_results_of_long_benchmarks_are_read_once_they_are_there(tmp_path: Path) -> None:
    """Two hundred tasks: the run with the recipe's settings counts. Devices: every part, from its networks."""
    about: dict[str, Any] = {"settings": {}, "command": "", "versions": {}, "machine": {}}
    runs = {"recipe": {"acc_first_20": 97.0, "acc_last_20": 95.5}, "another": {"acc_first_20": 9, "acc_last_20": 1}}
    row = {
        "D1": {"items": 10, "same_class": 10, "max_rel_diff": 1e-6},
        "D2": 0.8,
        "D3": {"latency": 0.6, "points_lost": 0.1},
        "D4": {"compact": 0.4, "compact int8": 0.2},
    }
    networks = {f"{network} {density}": row for network in ("fcn3", "devices:vgg") for density in (0.1, 0.4)}
    for name, result in (("two_hundred", {"runs": runs}), ("devices", {"networks": networks})):
        (tmp_path / f"{name}.json").write_text(json.dumps({"result": result, **about}))
    found = figures_in(tmp_path)
    (lost,) = found["two_hundred"]
    assert (lost.target, lost.ratio, lost.count) == ("L8", 1.5, 200)
    assert {(f.target, f.label) for f in found["devices"]} == {
        (target.id, part.label) for target in TABLE.named("devices") for part in target.parts
    }


def test_the_page_is_what_the_recorded_results_give() -> None:
    """docs/benchmarks.md is written by benchmarks/page.py, and shows what misses."""
    done = script("page.py", "--check")
    assert done.returncode == 0, done.stderr
    assert "**miss**" in (ROOT / "docs" / "benchmarks.md").read_text("utf-8")


def test_a_line_holds_on_its_own_side_and_from_its_size_on() -> None:
    """Fractions, sizes and clearness included; what is no line is refused."""
    figure = Figure("X", "", 0.04, "bytes", repeats=3, low=0.03, high=0.05, count=50)
    assert Line.parse("<= 1/20").holds(figure) and not Line.parse("<= 1/26").holds(figure)
    assert Line.parse("> 0 clearly").holds(figure)
    assert not Line.parse("> 0 clearly").holds(Figure("X", "", 0.04, "", repeats=3, low=0.01, high=0.07))
    assert Line.parse("<= 1 of 50 kills").holds(figure)
    large = Line.parse("<= 1 of 1,000 kills")
    assert not large.holds(figure) and large.holds(figure, any_size=True)
    assert Line.parse("= 1 of all bits").size == inf
    with pytest.raises(BenchmarkError, match="is no line"):
        Line.parse("about 3")


def test_a_small_experiment_is_never_more_than_an_indication() -> None:
    """Where size helps, one that misses says nothing; elsewhere a miss is a miss."""
    part = Part("", Line.parse(">= 80"), Line.parse(">= 84"))
    good, bad = (Figure("X", "", value, "%") for value in (85, 60))
    assert (part.judge(good), part.judge(bad)) == ("aim", "miss")
    assert (part.judge(good, smaller=True), part.judge(bad, smaller=True)) == ("~ aim", "miss")
    assert part.judge(bad, smaller=True, grows=True) == "too small"
