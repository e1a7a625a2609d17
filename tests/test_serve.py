"""A real TorchServe, asked over real HTTP."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from conftest import Learned
from loopback import expect
from PIL import Image

from etcl_deploy.bundle.bundle import load_bundle, save
from etcl_deploy.core.pixels import png
from etcl_deploy.errors import ServeError
from etcl_deploy.export.to_mar import archive
from etcl_deploy.runtime.predictor import Predictor
from etcl_deploy.serve.process import serving
from etcl_deploy.serve.properties import any_free_port
from etcl_deploy.serve.server import Server
from etcl_deploy.serve.start import ServeOptions, serve_bundle

pytestmark = pytest.mark.torchserve

BATCH = 8


@pytest.fixture(scope="module")
def server(learned: Learned, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that waits long enough for requests sent together to share a batch."""
    store = tmp_path_factory.mktemp("store")
    archive(learned.path, "digits", store, {"batchSize": BATCH, "maxBatchDelay": 400})
    with serving("digits", store, any_free_port()) as running:
        yield running


def ask(
    server: Server,
    body: bytes | None,
    path: str = "",
    token: str | None = None,
    form: tuple[str, bytes] | None = None,
    **headers: str,
) -> tuple[int, Any]:
    """Status and JSON of one request; header names are written with underscores, a form has a task and an image."""
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    used = server.token() if token is None else token
    sent |= {"Authorization": f"Bearer {used}"} if used else {}
    task, files = ({"task": form[0]}, {"data": form[1]}) if form else (None, None)
    answer = httpx.post(
        server.inference_url + path, content=body, data=task, files=files, headers=sent, timeout=60, trust_env=False
    )
    return answer.status_code, answer.json()


def describe(server: Server) -> Any:
    return server.describe(customized=True)["customizedMetadata"]


def test_every_way_to_name_a_task(learned: Learned, server: Server) -> None:
    """Field, header and path; body, multipart, base64 and pixels: all give the Predictor's answer."""
    task = learned.tasks[4]
    image = task.test_x[0]
    expected = Predictor(learned.bundle).predict([image], [task.name])[0]
    data = png(image)
    instances = [{"b64": base64.b64encode(data).decode()}, {"pixels": image.tolist()}]
    document = json.dumps({"task": task.name, "instances": instances}).encode()

    for status, answer in (
        ask(server, data, X_ETCL_Task=task.name, Content_Type="image/png"),
        ask(server, data, x_etcl_task=task.name, Content_Type="application/octet-stream"),
        ask(server, data, path=f"/1.0/{task.name}", Content_Type="image/png"),
        ask(server, None, form=(task.name, data)),
    ):
        assert status == 200
        expect(answer, expected)
    for media in ("application/json", "application/json; charset=utf-8"):
        status, answers = ask(server, document, Content_Type=media)
        assert (status, len(answers)) == (200, 2)
        for answer in answers:
            expect(answer, expected)
    for spelled, status in (("p%61rity", 200), ("p%2561rity", 404)):  # decoded once
        assert ask(server, data, path=f"/1.0/{spelled}", Content_Type="image/png")[0] == status


def test_the_field_wins_over_the_header_and_the_header_over_the_path(learned: Learned, server: Server) -> None:
    """One documented order of precedence."""
    data = png(learned.tasks[0].test_x[0])
    _, answer = ask(server, None, path="/1.0/parity", form=("turned", data), X_ETCL_Task="negative")
    assert answer["task"] == "turned"
    _, answer = ask(server, data, path="/1.0/parity", X_ETCL_Task="negative", Content_Type="image/png")
    assert answer["task"] == "negative"


def bomb(count: int) -> bytes:
    """A small request that unpacks to many pixels."""
    buffer = io.BytesIO()
    Image.new("RGBA", (16000, 2499), (1, 2, 3, 4)).save(buffer, "WEBP", lossless=True)
    instance = {"b64": base64.b64encode(buffer.getvalue()).decode()}
    return json.dumps({"task": "parity", "instances": [instance] * count}).encode()


PNG, JSON = "image/png", "application/json"
SOUND = png(torch.zeros(16, 16, 1, dtype=torch.uint8))
# Four bad requests at a time, with the status and code of each.
BAD_REQUESTS: list[list[tuple[bytes, dict[str, str], int, str]]] = [
    [
        (SOUND, {"X_ETCL_Task": "nobody", "Content_Type": PNG}, 404, "unknown_task"),
        (SOUND, {"Content_Type": PNG}, 400, "missing_task"),
        (b"not an image", {"X_ETCL_Task": "parity", "Content_Type": PNG}, 400, "bad_image"),
        (b"", {"X_ETCL_Task": "parity", "Content_Type": PNG}, 400, "bad_request"),
    ],
    [
        (json.dumps({"task": "\ue000" * 1_000_000}).encode(), {"Content_Type": JSON}, 400, "bad_request"),
        (
            json.dumps({"task": "\ue000" * 700_000, "instances": [{"pixels": [[1]]}]}, ensure_ascii=False).encode(),
            {"Content_Type": JSON},
            404,
            "unknown_task",
        ),
        (bomb(1), {"Content_Type": JSON}, 413, "too_large"),
        (bomb(256), {"Content_Type": JSON}, 413, "too_large"),
    ],
]


@pytest.mark.parametrize("bad", BAD_REQUESTS, ids=["plain", "hostile"])
def test_bad_requests_inside_a_shared_batch_harm_nobody(
    learned: Learned, server: Server, bad: list[tuple[bytes, dict[str, str], int, str]]
) -> None:
    """Eight requests in one batch, four of them bad: each bad one gets its own 4xx, the others are right.

    Whether eight requests arrive within one delay is up to a busy machine, so they are sent until they do.
    """
    good = [(task.name, task.test_x[3]) for task in learned.tasks[:4]]
    predictor = Predictor(learned.bundle)
    expected = [predictor.predict([image], [name])[0] for name, image in good]
    requests = [(png(image), {"X_ETCL_Task": name, "Content_Type": PNG}) for name, image in good]
    requests += [(body, headers) for body, headers, _, _ in bad]
    gate = threading.Barrier(BATCH)

    def send(request: tuple[bytes, dict[str, str]]) -> tuple[int, Any]:
        gate.wait()
        return ask(server, request[0], **request[1])

    for _ in range(20):
        before = describe(server)["batches"]["count"]
        with ThreadPoolExecutor(BATCH) as threads:
            answers = list(threads.map(send, requests))
        for (status, answer), wanted in zip(answers[:4], expected, strict=True):
            assert status == 200
            expect(answer, wanted)
        codes = [(status, answer["error"]["code"]) for status, answer in answers[4:]]
        assert codes == [(status, code) for _, _, status, code in bad]
        assert all(len(answer["error"]["message"]) < 1000 for _, answer in answers[4:])
        if describe(server)["batches"]["count"] == before + 2:  # one batch for them, one for asking
            return
    pytest.fail("the eight requests never shared a batch")


def test_as_many_items_as_are_allowed_fit_an_answer(server: Server) -> None:
    """256 items of ten classes in one request."""
    document = {"task": "upright-a", "instances": [{"pixels": [[0] * 16] * 16}] * 256}
    status, answers = ask(server, json.dumps(document).encode(), Content_Type=JSON)
    assert (status, len(answers)) == (200, 256)


@pytest.mark.parametrize(
    ("body", "media", "status", "code"),
    [
        (b"x=1", "application/x-www-form-urlencoded", 415, "unsupported_media"),
        (b"hello", "text/plain", 415, "unsupported_media"),
        (b"{", "application/json", 400, "bad_request"),
        (b"[" * 100_000, "application/json", 400, "bad_request"),
        ('{"instances": [{"b64": "\u00e9"}]}'.encode(), "application/json", 400, "bad_image"),
        (b'{"instances": [{"pixels": [[1e999]]}]}', "application/json", 400, "bad_image"),
        (json.dumps({"instances": [{"pixels": [[1]]}] * 257}).encode(), "application/json", 413, "too_large"),
    ],
)
def test_each_kind_of_bad_request_has_its_code(server: Server, body: bytes, media: str, status: int, code: str) -> None:
    """Status, code and a message, never a 5xx."""
    answered, answer = ask(server, body, X_ETCL_Task="parity", Content_Type=media)
    assert (answered, answer["error"]["code"]) == (status, code)
    assert answer["error"]["message"]


def test_a_boundary_may_contain_any_word(learned: Learned, server: Server) -> None:
    """Only the media type itself says what a body is."""
    form, media = ("parity", png(learned.tasks[4].test_x[0])), "multipart/form-data; boundary=BjsonB"
    status, answer = ask(server, None, form=form, Content_Type=media)
    assert (status, answer["task"]) == (200, "parity")


def test_only_loopback_is_bound(server: Server) -> None:
    """No port of the server or its workers listens on another address."""
    process = server.process()
    assert process is not None
    listening = [c for p in (process, *process.children(recursive=True)) for c in p.net_connections("inet")]
    addresses = {c.laddr.ip.removeprefix("::ffff:") for c in listening if c.status == psutil.CONN_LISTEN}
    assert addresses == {"127.0.0.1"}


def test_no_proxy_comes_between(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy named by the environment neither blocks our own requests nor sees their tokens."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert server.describe()["modelName"] == "digits"


def test_describe_lists_tasks_and_cache(server: Server, learned: Learned, tmp_path: Path) -> None:
    """Tasks with classes and bytes, what is cached, how batches are filled; which bundle it is, as it is served."""
    described = describe(server)
    packed = tmp_path / "packed.etcl"
    save(packed, learned.bundle.to_bytes("packed"))
    assert [task["name"] for task in described["tasks"]] == [task.name for task in learned.tasks]
    assert described["tasks"][4]["classes"] == ["even", "odd"]
    assert all(task["bytes"] > 0 for task in described["tasks"])
    assert described["bundle"] == load_bundle(packed).digest


def test_a_second_start_is_refused(learned: Learned, server: Server) -> None:
    """The running server is not disturbed, nor its archive."""
    store = server.store
    stamp = (store / "digits.mar").stat().st_mtime_ns
    with pytest.raises(ServeError, match="already served at"):
        serve_bundle(learned.path, "digits", store, ServeOptions(server.port))
    assert (store / "digits.mar").stat().st_mtime_ns == stamp
    assert server.process() is not None


def test_tensors_of_the_open_inference_protocol(learned: Learned, server: Server) -> None:
    """Pixels or image files as one tensor, the task among the parameters; outputs as tensors, one item also plain."""
    task = learned.tasks[1]
    images = task.test_x[:3]
    expected = Predictor(learned.bundle).predict(list(images), [task.name] * 3)
    pixels = {"name": "image", "shape": list(images.shape), "datatype": "UINT8", "data": images.flatten().tolist()}
    files = [base64.b64encode(png(image)).decode() for image in images]
    for tensor in (pixels, {"name": "image", "shape": [3], "datatype": "BYTES", "data": files}):
        body = {"id": "7", "inputs": [tensor], "parameters": {"task": task.name}}
        status, answer = ask(server, json.dumps(body).encode(), Content_Type="application/json")
        assert (status, answer["id"], answer["model_name"]) == (200, "7", "digits")
        outputs = {output["name"]: output for output in answer["outputs"]}
        assert outputs["label"]["data"] == [prediction.label for prediction in expected]
        assert outputs["scores"]["shape"] == [3, 10]
        scores = [score for prediction in expected for score in prediction.scores.values()]
        assert outputs["scores"]["data"] == pytest.approx(scores, abs=1e-5)
    one = {"name": "image", "shape": [1], "datatype": "BYTES", "data": files[:1]}
    body = {"inputs": [one], "parameters": {"task": task.name}}
    status, answer = ask(server, json.dumps(body).encode(), Content_Type="application/json")
    assert status == 200
    expect(answer, expected[0])


def test_metrics_tell_what_happens(learned: Learned, server: Server) -> None:
    """In Prometheus format: requests and stages by task, errors by code, the cache, tasks and their bytes."""
    before = metrics(server)
    data = png(learned.tasks[3].test_x[0])
    for _ in range(3):
        assert ask(server, data, X_ETCL_Task="negative", Content_Type="image/png")[0] == 200
    assert ask(server, data, X_ETCL_Task="nobody", Content_Type="image/png")[0] == 404
    after = metrics(server)

    def grown(name: str, *labels: str) -> float:
        names = [key for key in after if key.startswith(f"{name}{{") and all(label in key for label in labels)]
        assert names, (name, labels)
        return sum(after[key] - before.get(key, 0) for key in names)

    assert grown("etcl_requests_total", 'task="negative"') == 3
    assert grown("etcl_items_total", 'task="negative"') == 3
    assert grown("etcl_errors_total", 'code="unknown_task"') == 1
    assert grown("etcl_cache_hits_total") + grown("etcl_cache_misses_total") == 3
    for stage in ("decode", "infer"):
        assert 0 < grown("etcl_stage_microseconds_total", 'task="negative"', f'stage="{stage}"') < 60e6
    assert sum(value for key, value in after.items() if key.startswith("etcl_tasks{")) == 5
    assert after[next(key for key in after if key.startswith('etcl_task_bytes{task="negative"'))] > 1000
    assert any(key.startswith("ts_inference_latency_microseconds") for key in after)


def metrics(server: Server) -> dict[str, float]:
    time.sleep(6.5)  # sums are told every five seconds
    text = httpx.get(server.metrics_url, trust_env=False).text
    rows = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in rows}


@pytest.mark.parametrize("token", ["", "wrong"])
def test_nothing_is_answered_without_the_right_token(learned: Learned, server: Server, token: str) -> None:
    """Neither predictions nor anything on the management port, and not with the token of the other."""
    data = png(learned.tasks[0].test_x[0])
    for used in (token, server.token("management")):
        status, answer = ask(server, data, token=used, X_ETCL_Task="parity", Content_Type="image/png")
        assert (status, answer["type"]) == (400, "InvalidKeyException")
    for method, path in (("GET", "/models"), ("PUT", "/models/digits?min_worker=3"), ("DELETE", "/models/digits")):
        for used in (token, server.token()):
            headers = {"Authorization": f"Bearer {used}"} if used else {}
            answer = httpx.request(method, server.management_address + path, headers=headers, trust_env=False)
            assert answer.status_code in (400, 405), answer.text
    assert server.describe()["minWorkers"] == 1
