"""What is said of coverage and mutants is what benchmarks/cover.py recorded."""

from __future__ import annotations

import json
import re

from conftest import ROOT

from etcl_deploy.settings import tomllib

RESULT = json.loads((ROOT / "benchmarks" / "results" / "cover.json").read_text("utf-8"))["result"]
SURVIVORS = tomllib.loads((ROOT / "benchmarks" / "survivors.toml").read_text("utf-8"))["survivors"]


def test_every_survivor_has_a_reason_and_every_reason_a_survivor() -> None:
    """And its line is still in its file: one that changed takes another run."""
    for row in SURVIVORS:
        lines = [line.strip() for line in (ROOT / row["file"]).read_text("utf-8").splitlines()]
        assert row["line"] in lines and row["line"] not in row["becomes"], row
    reasons = {(row["file"], line): row["why"] for row in SURVIVORS for line in row["becomes"]}
    found = {(name, one["becomes"]): one["why"] for name, row in RESULT["mutants"].items() for one in row["survivors"]}
    assert found == reasons


def test_contributing_has_every_recorded_figure() -> None:
    """A row for each package, and for each file with mutants."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    rows = dict(line.split(" | ") for line in re.findall(r"^\| (`.*) \|$", text, re.MULTILINE))
    expected = {}
    for name, row in RESULT["coverage"].items():
        counts = [f"{row[f'{what}_reached']} of {row[what]} {what}" for what in ("lines", "branches")]
        expected[f"`{name}/`"] = f"{' and '.join(counts)} reached: {row['percent']} %"
    for name, row in RESULT["mutants"].items():
        counts = f"{row['killed']} of {row['mutants']} mutants noticed, {row['killed_by_time']} of them by their time"
        expected[f"`{name.removeprefix('etcl_deploy/')}`"] = f"{counts}; {len(row['survivors'])} explained"
    assert rows == expected
