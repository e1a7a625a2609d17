"""Batches of requests and their replies, whichever server passes them on."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Learned

from etcl_deploy.core.pixels import png
from etcl_deploy.errors import CacheError
from etcl_deploy.runtime import engine as engines
from etcl_deploy.runtime.counters import Meter
from etcl_deploy.runtime.predictor import Predictor
from etcl_deploy.runtime.service import Received, Service, open_service

LIMIT = 1_000_000


@pytest.fixture
def service(learned: Learned) -> Service:
    meter = Meter()
    return Service(Predictor(learned.bundle, observe=meter.observe), meter)


@pytest.fixture
def image(learned: Learned) -> bytes:
    return png(learned.tasks[0].test_x[0])


def replies(service: Service, *requests: tuple[dict[str, str], bytes], limit: int = LIMIT) -> list[tuple[int, Any]]:
    """Status and body for each of these headers and bodies."""
    batch = [Received({"body": bytearray(body)}, headers) for headers, body in requests]
    return [(reply.status, json.loads(reply.body)) for reply in service.reply(batch, "m", limit)]


def test_a_task_that_fails_fails_alone(service: Service, image: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a mistake of ours in one task's network leaves the other requests of the batch their answers."""
    real = service.predictor.engine.materialize

    def materialize(name: str) -> Any:
        if name == "turned":
            raise RuntimeError("broken")
        return real(name)

    monkeypatch.setattr(service.predictor.engine, "materialize", materialize)
    (first, one), (second, two), (third, three) = replies(
        service, *(({"X-ETCL-Task": name}, image) for name in ("upright-a", "turned", "parity"))
    )
    assert (first, second, third) == (200, 500, 200)
    assert (one["task"], three["task"]) == ("upright-a", "parity")
    assert two["error"]["code"] == "internal_error"
    assert "broken" not in two["error"]["message"], "what went wrong inside is for the log"


def test_a_reply_that_is_too_long_is_refused(service: Service, image: bytes) -> None:
    """All of a batch share the limit; a description loses its tasks."""
    request = {"X-ETCL-Task": "upright-a"}, image
    assert replies(service, request, limit=700)[0][0] == 200
    for status, body in replies(service, *[request] * 10, limit=700):
        assert (status, body["error"]["code"]) == (413, "too_large")
    ((status, described),) = replies(service, ({"describe": "True"}, b""), limit=700)
    assert (status, described["tasks"]) == (200, 5)


def test_a_description_is_a_reply_like_others(service: Service, image: bytes, learned: Learned) -> None:
    """A client may ask for it in the middle of a batch."""
    requests = ({"X-ETCL-Task": "parity"}, image), ({"describe": "True"}, b""), ({"X-ETCL-Task": "turned"}, image)
    (_, first), (status, described), (_, last) = replies(service, *requests)
    assert (first["task"], status, last["task"]) == ("parity", 200, "turned")
    assert [task["name"] for task in described["tasks"]] == list(learned.bundle.tasks)
    assert described["batches"] == {"count": 1, "largest": 3}


def test_every_item_fails_alone_and_is_counted(service: Service, image: bytes) -> None:
    """One bad item of a list has its error in its place; of tensors, or where all are bad, the request has it."""
    good = base64.b64encode(image).decode()

    def ask(body: dict[str, Any]) -> tuple[int, Any]:
        headers = {"content-type": "application/json", "x-etcl-task": "parity"}
        return replies(service, (headers, json.dumps(body).encode()))[0]

    tensor = {"name": "image", "shape": [2], "datatype": "BYTES"}
    status, (first, second, third) = ask({"instances": [{"b64": good}, {"b64": "eA=="}, {"nothing": 1}]})
    assert (status, first["task"]) == (200, "parity")
    assert (second["error"]["code"], third["error"]["code"]) == ("bad_image", "bad_request")
    for refused in ({"inputs": [{**tensor, "data": [good, "eA=="]}]}, {"instances": [{"b64": "eA=="}, {"nothing": 1}]}):
        status, body = ask(refused)
        assert (status, body["error"]["code"]) == (400, "bad_image")
    status, found = ask({"inputs": [{**tensor, "data": [good, good]}]})
    assert (status, [output["shape"] for output in found["outputs"]]) == (200, [[2], [2], [2, 2]])
    sums = {(name, labels): value for name, labels, value in service.meter.drain()}
    assert sums["etcl_requests_total", ("parity",)] == 4 and sums["etcl_items_total", ("parity",)] == 9
    assert sums["etcl_errors_total", ("bad_request",)] == 1
    assert sums["etcl_errors_total", ("bad_image",)] == 3, "what the sender is told, once"


def test_what_is_no_request_is_answered_by_name(service: Service, image: bytes) -> None:
    """A task there is not, no task, an empty body, a page of a browser: each with its own status, beside an answer."""
    parity = {"x-etcl-task": "parity"}
    unknown = {"x-etcl-task": "größe".encode().decode("latin-1")}  # as HTTP hands on UTF-8
    bodies = (unknown, image), ({}, image), (parity, b""), ({**parity, "content-type": "text/html"}, image)
    found = replies(service, *bodies, (parity, image))
    assert [status for status, _ in found] == [404, 400, 400, 415, 200]
    codes = [answer["error"]["code"] for _, answer in found[:4]]
    assert codes == ["unknown_task", "missing_task", "bad_request", "unsupported_media"]
    assert "größe" in found[0][1]["error"]["message"]


@pytest.mark.parametrize("fastest", ["torch", "onnxruntime"])
def test_either_engine_answers_like_the_predictor(
    learned: Learned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fastest: str
) -> None:
    """Whichever is faster here; engine and predictor hold one bundle."""
    monkeypatch.setattr(engines, "seconds_of", lambda engine, ready, pixels: float(engine.name != fastest))
    service = open_service(learned.path, tmp_path, {})
    assert service.predictor.engine.name == fastest
    assert service.predictor.engine.bundle is service.predictor.bundle
    for task in learned.tasks:
        expected = Predictor(learned.bundle).predict([task.test_x[0]], [task.name])[0]
        ((status, found),) = replies(service, ({"x-etcl-task": task.name}, png(task.test_x[0])))
        assert (status, found["task"], found["label"]) == (200, task.name, expected.label)
        assert found["scores"] == pytest.approx(expected.scores, abs=1e-5)


def test_tasks_are_made_ready_as_the_settings_say(learned: Learned, tmp_path: Path) -> None:
    """Pinned ones stay, others as far as they fit; nothing is made ready unasked."""
    names = list(learned.bundle.tasks)

    def cached(**settings: Any) -> tuple[list[str], list[str]]:
        described = open_service(learned.path, tmp_path, settings).describe()
        return [task["name"] for task in described.tasks if task["cached"]], described.cache["pinned"]

    assert cached() == ([], [])
    assert cached(prefetch=True) == (names, [])
    assert cached(pinned=["parity", "turned"]) == (["turned", "parity"], ["parity", "turned"])
    with pytest.raises(CacheError, match="'parity' cannot be kept ready"):
        cached(pinned=["parity"], cacheBytes=1000)
