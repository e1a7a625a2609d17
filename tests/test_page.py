"""Report pages in a real browser: wide and narrow, light and dark."""

from __future__ import annotations

import json
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
    with started_browser() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages of runs with one, five and thirty-five tasks, and of a comparison."""
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
    """The page, its requests to the network and its messages on the console."""
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    heard: list[str] = []
    tab.on("request", lambda request: heard.append(request.url))
    tab.on("console", lambda message: heard.append(message.text))
    tab.goto(page.as_uri())
    return tab, [text for text in heard if text != page.as_uri()]


@pytest.mark.parametrize("name", ["single", "five", "many", "side"])
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (360, "dark")])
def test_a_page_is_drawn(browser: Any, pages: dict[str, Path], name: str, width: int, scheme: str) -> None:
    """Nothing is wider than the page, every chart has a size, and text contrasts with the background."""
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


def test_the_table_holds_the_matrix(browser: Any, pages: dict[str, Path]) -> None:
    """A row for each task, with its accuracy after every task since it was learned."""
    tab, _ = opened(browser, pages["five"], 1200, "light")
    rows = tab.evaluate(
        "[...document.querySelectorAll('#accuracy tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    )
    matrix = json.loads((pages["five"].with_suffix("") / "run.json").read_text("utf-8"))["matrix"]
    assert [row[0] for row in rows] == [f"{n + 1} permutation-0{n + 1}" for n in range(5)]
    assert [row[n + 1 :] for n, row in enumerate(rows)] == [
        [f"{later[n]:.1f}" for later in matrix[n:]] for n in range(5)
    ]
    tab.close()


def test_many_tasks_still_read_well(browser: Any, pages: dict[str, Path]) -> None:
    """Names are large enough to read, and none overlaps another."""
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
