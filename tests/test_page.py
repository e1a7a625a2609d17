"""Reports in a real browser: wide and narrow, light and dark, printed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsing import needs_browser, started_browser

from etcl_deploy.config import Config
from etcl_deploy.report.write import write_report
from etcl_deploy.runs.compare import compare
from etcl_deploy.runs.session import Session, train

pytestmark = needs_browser
SMALL = {"backbone": "fcn3", "width": 8, "size": 8, "channels": 1, "epochs": 1, "batch_size": 8, "similar": "all"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started_browser() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages of a run of five tasks, one of thirty-five, one of a single task, and of a comparison."""
    root = tmp_path_factory.mktemp("pages")
    chance = np.random.default_rng(0)
    images, labels = chance.integers(0, 256, (60, 8, 8)).astype(np.uint8), np.arange(60) % 3
    np.savez(root / "mnist.npz", train_x=images, train_y=labels, test_x=images[:20], test_y=labels[:20])
    made = {}
    for name, tasks in (("single", 1), ("five", 5), ("many", 35)):
        table = {"permute": "mnist", "tasks": tasks}
        config = Config().with_values({**SMALL, "sequence": table})
        train(config, root / name, session=Session("cpu", data_root=root))
        write_report(root / name, root / f"{name}.html")
        made[name] = root / f"{name}.html"
    config = Config().with_values({**SMALL, "sequence": {"permute": "mnist", "tasks": 3}})
    configs = {method: config.with_values({"method": method}) for method in ("one", "naive", "wsn", "etcl")}
    compare(configs, root / "side", seeds=2, session=Session("cpu", data_root=root))
    write_report(root / "side", root / "side.html")
    return {**made, "side": root / "side.html"}


def opened(browser: Any, page: Path, width: int, scheme: str) -> tuple[Any, list[str]]:
    """The page, and what it asked the network for or complained about."""
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    heard: list[str] = []
    tab.on("request", lambda request: heard.append(request.url))
    tab.on("console", lambda message: heard.append(message.text))
    tab.goto(page.as_uri())
    return tab, [text for text in heard if text != page.as_uri()]


@pytest.mark.parametrize("name", ["single", "five", "many", "side"])
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (360, "dark")])
def test_a_page_is_drawn(browser: Any, pages: dict[str, Path], name: str, width: int, scheme: str) -> None:
    """Nothing sticks out, every picture has a size, and its words stand out from the page."""
    tab, heard = opened(browser, pages[name], width, scheme)
    assert heard == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    sizes = tab.evaluate("[...document.querySelectorAll('svg')].map(s => [s.clientWidth, s.clientHeight])")
    assert sizes and all(wide > 200 and high > 60 for wide, high in sizes)
    ink, paper = tab.evaluate(
        "[getComputedStyle(document.querySelector('svg text')).fill, getComputedStyle(document.body).backgroundColor]"
    )
    shades = [sum(map(int, colour.removeprefix("rgb(").rstrip(")").split(","))) for colour in (ink, paper)]
    assert abs(shades[0] - shades[1]) > 400
    assert (shades[1] > 600) == (scheme == "light")
    tab.close()


def texts(tab: Any, section: str) -> list[str]:
    found: list[str] = tab.evaluate(f"[...document.querySelectorAll('#{section} svg text')].map(t => t.textContent)")
    return found


def test_the_matrix_is_drawn_as_it_is(browser: Any, pages: dict[str, Path]) -> None:
    """A cell with a number for every task learned so far, after every task; the table says the same."""
    tab, _ = opened(browser, pages["five"], 1200, "light")
    rows = tab.evaluate(
        "[...document.querySelectorAll('#accuracy tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    assert [row[0] for row in rows] == [f"{n + 1} permutation-0{n + 1}" for n in range(5)]
    numbers = [f"{float(cell):.0f}" for row in rows for cell in row[1:] if cell]
    assert len(numbers) == 15
    drawn = texts(tab, "accuracy")
    for number in set(numbers):
        assert drawn.count(number) >= numbers.count(number)
    assert "permutation-03" in texts(tab, "over-time")
    assert {"backbone", "masks", "heads", "norms"} <= set(texts(tab, "sizes"))
    assert {"new task", "held against"} <= set(texts(tab, "similarity"))
    tab.close()


def test_many_tasks_still_read_well(browser: Any, pages: dict[str, Path]) -> None:
    """Names that can be read, and none on top of another."""
    tab, _ = opened(browser, pages["many"], 1200, "light")
    boxes = tab.evaluate(
        "[...document.querySelectorAll('#accuracy svg text')].filter(t => t.textContent.includes('permutation'))"
        ".map(t => t.getBoundingClientRect()).map(b => [b.top, b.bottom])"
    )
    assert len(boxes) == 35
    tops = sorted(boxes)
    assert all(later[0] >= earlier[1] - 2.5 for earlier, later in pairwise(tops))
    assert min(bottom - top for top, bottom in boxes) >= 6
    tab.close()


def test_a_comparison_names_every_method(browser: Any, pages: dict[str, Path]) -> None:
    """In the table, in the bars, and beside the lines; forward transfer only where it is known."""
    tab, _ = opened(browser, pages["side"], 1200, "light")
    names = ["one", "naive", "wsn", "etcl"]
    assert tab.evaluate("[...document.querySelectorAll('#table tbody tr')].map(r => r.cells[0].textContent)") == names
    assert set(names) <= set(texts(tab, "acc")) and set(names) <= set(texts(tab, "over-time"))
    assert set(names[1:]) <= set(texts(tab, "fwt")) and "one" not in texts(tab, "fwt")
    tab.close()


def test_a_page_can_be_printed(browser: Any, pages: dict[str, Path]) -> None:
    """On paper of the usual size."""
    tab, _ = opened(browser, pages["five"], 1200, "light")
    assert tab.pdf(format="A4").startswith(b"%PDF")
    tab.close()
