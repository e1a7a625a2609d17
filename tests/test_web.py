"""The page in a real browser: it draws, drops, switches tasks, and answers as onnxruntime does in Python."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsing import needs_browser, needs_npm, served_folder, started_browser
from conftest import Learned

from etcl_deploy.core.pixels import png
from etcl_deploy.edge import Model
from etcl_deploy.errors import ExportError
from etcl_deploy.export.web import runtime
from etcl_deploy.export.web.site import write_site


@pytest.fixture(scope="module")
def site(learned: Learned, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("web") / "a page"
    write_site(learned.bundle, folder, "Digits <1> & more", force=False)
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with served_folder(site) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started_browser() as found:
        yield found


@pytest.fixture
def tab(browser: Any, address: str) -> Iterator[Any]:
    """The page once it is ready; it must not complain, nor ask anybody else for anything."""
    page = browser.new_page(viewport={"width": 1000, "height": 800})
    heard: list[str] = []
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on(
        "request",
        lambda request: None if request.url.startswith((address, "blob:", "data:")) else heard.append(request.url),
    )
    page.goto(address)
    until(page, "document.getElementById('status').textContent.includes(' ms ')")
    yield page
    assert heard == []
    page.close()


def until(page: Any, what: str) -> None:
    """Wait in the page, whose policy forbids what Playwright has for that."""
    page.evaluate(f"async () => {{ while (!({what})) await new Promise((go) => setTimeout(go, 20)); }}")


def freeze(page: Any) -> tuple[np.ndarray, list[float], str]:
    """What the network sees once all is answered, the page's scores for it, and the class it shows."""
    seen = page.evaluate("import('./app.js').then(async (app) => (await app.answer(), Array.from(app.pixels())))")
    scores = json.loads(page.get_attribute("#scores", "data-scores"))
    return np.array(seen, np.uint8).reshape(16, 16, 1), scores, page.inner_text("#label")


def check(page: Any, model: Model, task: str) -> np.ndarray:
    """The page gives what onnxruntime gives in Python."""
    seen, scores, label = freeze(page)
    right = model.predict([seen], task)[0]
    assert label == right.label
    np.testing.assert_allclose(scores, list(right.scores.values()), atol=1e-4)
    return seen


@needs_browser
@needs_npm
def test_a_drawn_digit_is_recognized_as_in_python(tab: Any, site: Path) -> None:
    """With the mouse; every task by the keyboard, without loading again; cleared."""
    model = Model(site / "tasks.onnx")
    assert tab.title() == tab.inner_text("h1") == "Digits <1> & more"
    box = tab.locator("#pad").bounding_box()
    x, y, side = box["x"], box["y"], box["width"]
    tab.mouse.move(x + side / 2, y + side / 6)
    tab.mouse.down()
    tab.mouse.move(x + side / 2, y + 5 * side / 6, steps=8)
    tab.mouse.up()
    seen = check(tab, model, model.tasks[0])
    assert seen[:, 8].max() > 120 and seen[:, 1].max() < 50
    tab.evaluate("window.here = 1")
    tab.focus("#task")
    for task in model.tasks[1:]:
        tab.keyboard.press("ArrowDown")
        assert np.array_equal(check(tab, model, task), seen)
    assert tab.evaluate("window.here") == 1
    tab.click("#clear")
    assert check(tab, model, model.tasks[-1]).max() == 0
    tab.check("#light")
    assert check(tab, model, model.tasks[-1]).min() == 255


@needs_browser
@needs_npm
def test_the_pen_moves_with_the_keyboard(tab: Any, site: Path) -> None:
    """Space lowers it, arrows move it, Escape clears."""
    tab.focus("#pad")
    for key in [" ", *["ArrowUp"] * 12, *["ArrowLeft"] * 6]:
        tab.keyboard.press(key)
    assert check(tab, Model(site / "tasks.onnx"), "upright-a").max() > 120
    marker, pad = (tab.locator(name).bounding_box() for name in ("#pen", "#pad"))
    assert tab.is_visible("#pen.down")
    assert abs(marker["x"] + marker["width"] / 2 - pad["x"] - pad["width"] * (168 - 48) / 336) < 2
    tab.keyboard.press("Escape")
    assert not tab.is_visible("#pen.down")
    assert freeze(tab)[0].max() == 0


@needs_browser
@needs_npm
@pytest.mark.parametrize("way", ["drop", "choose"])
def test_an_image_file_gets_the_answer_it_gets_in_python(
    tab: Any, site: Path, learned: Learned, tmp_path: Path, way: str
) -> None:
    """At the network's own size not a pixel changes."""
    image = learned.tasks[0].test_x[3]
    if way == "choose":
        (tmp_path / "digit.png").write_bytes(png(image))
        tab.set_input_files("#file", tmp_path / "digit.png")
    else:
        tab.evaluate(
            """(data) => {
                const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
                const held = new DataTransfer();
                held.items.add(new File([bytes], "digit.png", {type: "image/png"}));
                document.dispatchEvent(new DragEvent("drop", {dataTransfer: held, cancelable: true}));
            }""",
            base64.b64encode(png(image)).decode(),
        )
    until(tab, "document.getElementById('pad').getContext('2d').getImageData(0, 0, 336, 336).data.some((v) => v % 255)")
    assert np.array_equal(check(tab, Model(site / "tasks.onnx"), "upright-a"), image.numpy())


@needs_browser
@needs_npm
def test_what_is_no_image_is_said_to_be_none(tab: Any, tmp_path: Path) -> None:
    """And the page goes on."""
    (tmp_path / "x.png").write_bytes(b"nothing")
    tab.set_input_files("#file", tmp_path / "x.png")
    until(tab, "document.getElementById('status').textContent.startsWith('That is not an image')")
    tab.click("#clear")
    until(tab, "document.getElementById('status').textContent.includes(' ms ')")


@needs_browser
@needs_npm
@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1200, "light")])
def test_it_fits_a_phone_and_a_desk(browser: Any, address: str, width: int, scheme: str) -> None:
    """Nothing sticks out; a finger can hit every control; words stand out."""
    page = browser.new_page(viewport={"width": width, "height": 740}, color_scheme=scheme, has_touch=True)
    page.goto(address)
    until(page, "document.getElementById('status').textContent.includes(' ms ')")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for control in ("#task", "#clear", "#choose"):
        assert page.locator(control).bounding_box()["height"] >= 36
    ink, paper = page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    shades = [sum(map(int, colour.removeprefix("rgb(").rstrip(")").split(","))) for colour in (ink, paper)]
    assert abs(shades[0] - shades[1]) > 400
    page.close()


@needs_npm
def test_a_folder_that_is_not_empty_is_left_alone(site: Path, learned: Learned, tmp_path: Path) -> None:
    """Unless asked; a file in the way is named."""
    before = {path.name: path.read_bytes() for path in site.iterdir()}
    with pytest.raises(ExportError, match="is not empty; --force writes into it"):
        write_site(learned.bundle, site, "x", force=False)
    assert {path.name: path.read_bytes() for path in site.iterdir()} == before
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="is a file; a page is a directory"):
        write_site(learned.bundle, tmp_path / "file", "x", force=True)
    write_site(learned.bundle, site, "Digits <1> & more", force=True)
    assert {path.name: path.read_bytes() for path in site.iterdir()} == before


def test_a_runtime_that_was_changed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given by hand, or kept from before; and without npm it says what to do."""
    (tmp_path / "ort.tgz").write_bytes(b"something else")
    with pytest.raises(ExportError, match="as it was published"):
        runtime.runtime_files(tmp_path / "ort.tgz")
    with pytest.raises(ExportError, match="cannot read"):
        runtime.runtime_files(tmp_path / "nowhere.tgz")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ExportError, match="npm is needed once"):
        runtime.runtime_files()
    kept = tmp_path / "etcl_deploy" / f"onnxruntime-web-{runtime.VERSION}.tgz"
    kept.parent.mkdir()
    kept.write_bytes(b"half of it")
    with pytest.raises(ExportError, match="npm is needed once"):  # it is fetched again
        runtime.runtime_files()
