from __future__ import annotations

from etcl_deploy.runtime import counters as meter
from etcl_deploy.runtime.counters import Meter


def test_sums_are_told_once() -> None:
    """What was counted since the last time, by name and labels."""
    counted = Meter()
    counted.add("requests", ("a",))
    counted.add("requests", ("a",), 2)
    counted.add("requests", ("b",), 0.5)
    assert sorted(counted.drain()) == [("requests", ("a",), 3), ("requests", ("b",), 0.5)]
    assert list(counted.drain()) == []


def test_names_of_tasks_cannot_break_a_line_of_metrics() -> None:
    """What separates parts of such a line is replaced; letters of any alphabet stay."""
    assert Meter().label("größe|#x:1,\n{}") == "größe__x_1____"


def test_only_so_many_tasks_have_a_series_of_their_own() -> None:
    """The rest is counted together, so that ten thousand tasks do not drown a monitor."""
    counted = Meter()
    labels = {counted.label(f"t{number}") for number in range(meter.MOST_TASKS + 50)}
    assert len(labels) == meter.MOST_TASKS + 1
    assert counted.label("t0") == "t0" and meter.OTHER in labels
