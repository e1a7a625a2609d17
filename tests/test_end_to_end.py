"""learn -> bundle -> server, device, browser: all give the same answers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsing import CHROMIUM, served_folder, started_browser
from conftest import Learned
from torch import Tensor

from etcl_deploy.core.pixels import png
from etcl_deploy.edge import Model
from etcl_deploy.export.parity import session
from etcl_deploy.export.to_mar import archive
from etcl_deploy.export.to_multitask import export_multitask
from etcl_deploy.export.to_onnx import OnnxOptions, export_task
from etcl_deploy.export.web.site import write_site
from etcl_deploy.learn.trainer import predict
from etcl_deploy.runtime.predictor import Predictor
from etcl_deploy.serve.process import serving
from etcl_deploy.serve.properties import any_free_port

ITEMS = 10


@contextmanager
def opened_page(learned: Learned, folder: Path) -> Iterator[Any]:
    """The page in a browser; None without a browser, or without npm."""
    if CHROMIUM is None or shutil.which("npm") is None:
        yield None
        return
    write_site(learned.bundle, folder, "all", force=False)
    with served_folder(folder) as address, started_browser() as browser:
        page = browser.new_page()
        page.goto(address)
        page.evaluate("import('./app.js').then((app) => app.ready)")
        yield page


def in_browser(page: Any, images: Tensor, number: int) -> np.ndarray:
    asked = "([image, task]) => import('./app.js').then((app) => app.ask(Uint8Array.from(image), task))"
    scores = [page.evaluate(asked, [image.flatten().tolist(), number])["scores"] for image in images]
    return np.array(scores, np.float32)


@pytest.mark.torchserve
def test_the_same_image_gets_the_same_answer_everywhere(learned: Learned, tmp_path: Path) -> None:
    """Every way to ask gives the class of the network, and its scores within 1e-5."""
    archive(learned.path, "digits", tmp_path)
    export_multitask(learned.bundle, tmp_path / "all.onnx")
    predictor, whole, switched = Predictor(learned.bundle), session(tmp_path / "all.onnx"), Model(tmp_path / "all.onnx")
    with ExitStack() as stack:
        server = stack.enter_context(serving("digits", tmp_path, any_free_port()))
        client = stack.enter_context(server.client())
        page = stack.enter_context(opened_page(learned, tmp_path / "page"))
        for number, task in enumerate(learned.tasks):
            images = task.test_x[:ITEMS]
            pixels, files = images.numpy(), [png(image) for image in images]
            expected = predict(learned.run.network, task.name, images).softmax(1).numpy()
            for name in ("plain", "compact"):
                export_task(
                    learned.bundle, task.name, tmp_path / f"{name}.onnx", options=OnnxOptions(compact=name == "compact")
                )
            answers = {
                "Predictor": predictor.predict(list(images), [task.name] * ITEMS),
                "TorchServe": [client.predict(file, task.name) for file in files],
                "edge": Model(tmp_path / "plain.onnx").predict(files),
                "edge, switched": switched.predict(files, task.name),
            }
            ways = {way: np.array([list(one.scores.values()) for one in given]) for way, given in answers.items()}
            ways["ONNX"] = session(tmp_path / "plain.onnx").run(None, {"image": pixels})[0]
            ways["compact"] = session(tmp_path / "compact.onnx").run(None, {"image": pixels})[0]
            ways["multitask"] = whole.run(None, {"image": pixels, "task_id": np.array(number)})[0]
            if page:
                ways["browser"] = in_browser(page, images, number)
            for way, scores in ways.items():
                np.testing.assert_allclose(scores, expected, atol=1e-5, err_msg=way)
                assert (scores.argmax(1) == expected.argmax(1)).all(), way
    if page is None:
        pytest.skip("all agree, but the browser was not asked: no chromium, or no npm")
