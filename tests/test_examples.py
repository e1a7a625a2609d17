"""The example of another server, started as a user would start it and asked over HTTP."""

from __future__ import annotations

import base64
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from conftest import ROOT, Learned
from loopback import expect
from PIL import Image

import etcl_deploy
from etcl_deploy.core.pixels import png
from etcl_deploy.runtime.predictor import Predictor
from etcl_deploy.serve.properties import any_free_port

EXAMPLE = ROOT / "examples" / "litserve_server.py"


@pytest.fixture(scope="module")
def server(learned: Learned, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[psutil.Process, str]]:
    """The example's process and its address; afterwards it is told to stop, and nothing of it may be left."""
    directory = tmp_path_factory.mktemp("litserve")
    port = any_free_port()
    command = [sys.executable, str(EXAMPLE), str(learned.path), str(port)]
    environment = {**os.environ, "PYTHONPATH": str(Path(etcl_deploy.__file__).parent.parent)}
    with (directory / "log").open("wb") as log:
        started = subprocess.Popen(command, cwd=directory, env=environment, stdout=log, stderr=subprocess.STDOUT)
    process = psutil.Process(started.pid)
    family = [process]
    try:
        wait_until_ready(f"http://127.0.0.1:{port}/health", started, directory / "log")
        family += process.children(recursive=True)
        yield process, f"http://127.0.0.1:{port}/predict"
    finally:
        started.terminate()
        _, left = psutil.wait_procs(family, timeout=30)
        for member in left:
            member.kill()
        started.wait()
    assert not left, "the server's workers ended with it"
    assert [path.name for path in directory.iterdir()] == ["log"], "it wrote nothing where it was started"


def wait_until_ready(url: str, started: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(240):
        assert started.poll() is None, log.read_text()
        try:
            if httpx.get(url, trust_env=False).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.25)
    pytest.fail(f"no answer within a minute\n{log.read_text()}")


def ask_all(url: str, questions: list[Any]) -> list[tuple[int, Any]]:
    """Status and JSON of each question, asked at the same time."""

    def ask(question: Any) -> tuple[int, Any]:
        answer = httpx.post(url, json=question, timeout=60, trust_env=False)
        return answer.status_code, answer.json()

    with ThreadPoolExecutor(len(questions)) as pool:
        return list(pool.map(ask, questions))


def question(task: str, image: bytes) -> dict[str, str]:
    return {"task": task, "b64": base64.b64encode(image).decode()}


def test_the_example_is_short() -> None:
    """Another server takes at most 40 lines."""
    assert len(EXAMPLE.read_text("utf-8").splitlines()) <= 40


def test_bad_questions_among_good_ones(learned: Learned, server: tuple[psutil.Process, str], tmp_path: Path) -> None:
    """Asked together: each bad one gets its own 4xx, the good ones the Predictor's answers, for all tasks."""
    _, url = server
    Image.new("1", (8000, 8000)).save(tmp_path / "huge.png")
    bad = [
        (question("nobody", png(learned.tasks[0].test_x[0])), 404, "unknown_task"),
        (question("parity", b"not an image"), 400, "bad_image"),
        (question("parity", b""), 400, "bad_image"),
        (question("parity", (tmp_path / "huge.png").read_bytes()), 413, "too_large"),
    ]
    good = [(task.name, task.test_x[5]) for task in learned.tasks]
    wanted = Predictor(learned.bundle).predict([image for _, image in good], [name for name, _ in good])
    answers = ask_all(url, [body for body, _, _ in bad] + [question(name, png(image)) for name, image in good])
    codes = [(status, answer["error"]["code"]) for status, answer in answers[: len(bad)]]
    assert codes == [(status, code) for _, status, code in bad]
    for (status, answer), expected in zip(answers[len(bad) :], wanted, strict=True):
        assert status == 200
        expect(answer, expected)


def test_a_batch_is_one_call(learned: Learned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that share a batch, of several tasks and with a bad one among them, cost one call of the Predictor."""
    example = runpy.run_path(str(EXAMPLE))
    api = example["BundleAPI"](max_batch_size=16)
    api.bundle = learned.path
    api.setup("cpu")
    calls = []
    answer = api.predictor.answer
    monkeypatch.setattr(api.predictor, "answer", lambda images, tasks: calls.append(tasks) or answer(images, tasks))
    names = ["parity", "nobody", "turned"]
    questions = [example["Question"](**question(name, png(learned.tasks[0].test_x[0]))) for name in names]
    answers = api.predict(api.batch([api.decode_request(asked) for asked in questions]))
    assert calls == [["parity", "turned"]]
    assert [answers[0]["task"], answers[1].status_code, answers[2]["task"]] == ["parity", 404, "turned"]


@pytest.mark.parametrize(
    ("body", "status"),
    [({"b64": ""}, 422), ({"task": 3, "b64": ""}, 422), ([1], 422), ({"task": "parity", "b64": "A" * 6_600_000}, 413)],
    ids=["no task", "a number as task", "a list", "too long"],
)
def test_bodies_of_another_form_are_refused(server: tuple[psutil.Process, str], body: Any, status: int) -> None:
    """With a 4xx, by LitServe itself."""
    assert ask_all(server[1], [body])[0][0] == status


def test_only_loopback_is_bound(server: tuple[psutil.Process, str]) -> None:
    """No process of the example listens on another address."""
    process, _ = server
    listening = [c for p in (process, *process.children(recursive=True)) for c in p.net_connections("inet")]
    assert {c.laddr.ip for c in listening if c.status == psutil.CONN_LISTEN} == {"127.0.0.1"}
