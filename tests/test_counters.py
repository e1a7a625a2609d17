from __future__ import annotations

import pytest
from conftest import Learned

from etcl_deploy.runtime import counters
from etcl_deploy.runtime.counters import Meter, report_forever
from etcl_deploy.runtime.predictor import Predictor


def test_sums_are_drained_once() -> None:
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


def test_only_so_many_tasks_have_a_series_of_their_own(learned: Learned, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is counted together, so that ten thousand tasks do not drown a monitor, and has no bytes of its own."""
    monkeypatch.setattr(counters, "MAX_TASK_LABELS", 2)
    counted = Meter()
    assert [counted.label(name) for name in ("a", "b", "c", "a", "d")] == [
        "a",
        "b",
        counters.OTHER,
        "a",
        counters.OTHER,
    ]

    class StopError(Exception): ...

    sizes: list[tuple[str, ...]] = []

    def update(name: str, value: int, labels: tuple[str, ...]) -> None:
        if name != "etcl_task_bytes":
            raise StopError
        sizes.append(labels)

    with pytest.raises(StopError):
        report_forever(Meter(), Predictor(learned.bundle), update)
    assert sizes == [("upright-a",), ("upright-b",)]
