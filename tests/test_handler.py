"""The handler's last lines of defence, with TorchServe's own context; test_serve.py asks it over HTTP."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import Learned
from ts.context import Context, RequestProcessor

from etcl_deploy.handlers import etcl_handler
from etcl_deploy.handlers.etcl_handler import EtclHandler
from etcl_deploy.runtime.images import png


def handler_for(learned: Learned, directory: Path) -> EtclHandler:
    shutil.copy(learned.path, directory / "bundle.etcl")
    handler = EtclHandler()
    handler.initialize(context_for(directory, []))
    return handler


def context_for(directory: Path, headers: list[dict[str, str]], batch_size: int = 8) -> Context:
    """What TorchServe would pass for a batch of requests with these headers."""
    context = Context("m", str(directory), {"model": {"serializedFile": "bundle.etcl"}}, batch_size, None, "0.12.0")
    context.request_processor = [RequestProcessor(header) for header in headers]
    return context


def answers(handler: EtclHandler, context: Context, bodies: list[bytes]) -> list[tuple[int, Any]]:
    found = handler.handle([{"body": bytearray(body)} for body in bodies], context)
    return [(context.get_response_status(i)[0], json.loads(text)) for i, text in enumerate(found)]


def test_a_task_that_fails_fails_alone(learned: Learned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a mistake of ours in one task's network leaves the other requests of the batch their answers."""
    handler = handler_for(learned, tmp_path)
    assert handler.predictor is not None
    real = handler.predictor.engine.materialize

    def materialize(name: str) -> Any:
        if name == "turned":
            raise RuntimeError("broken")
        return real(name)

    monkeypatch.setattr(handler.predictor.engine, "materialize", materialize)
    image = png(learned.tasks[0].test_x[0])
    context = context_for(tmp_path, [{"X-ETCL-Task": name} for name in ("upright-a", "turned", "parity")])
    (first, one), (second, two), (third, three) = answers(handler, context, [image] * 3)
    assert (first, second, third) == (200, 500, 200)
    assert (one["task"], three["task"]) == ("upright-a", "parity")
    assert two["error"]["code"] == "internal_error"
    assert "broken" not in two["error"]["message"], "what went wrong inside is for the log"


def test_an_answer_too_long_for_the_frame_is_refused(
    learned: Learned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is a share of TorchServe's frame, so that all answers of a batch fit; a description loses its tasks."""
    handler = handler_for(learned, tmp_path)
    image = png(learned.tasks[0].test_x[0])
    monkeypatch.setattr(etcl_handler, "BATCH_ANSWER_BYTES", 700)
    headers = {"X-ETCL-Task": "upright-a"}
    ((status, _),) = answers(handler, context_for(tmp_path, [headers]), [image])
    assert status == 200
    context = context_for(tmp_path, [headers] * 10)
    for status, answer in answers(handler, context, [image] * 10):
        assert (status, answer["error"]["code"]) == (413, "too_large")
    ((status, described),) = answers(handler, context_for(tmp_path, [{"describe": "True"}]), [b""])
    assert (status, described["tasks"]) == (200, 5)


def test_a_header_in_utf_8_is_read_as_meant(learned: Learned, tmp_path: Path) -> None:
    """HTTP hands bytes on as Latin-1; the message shows the name as it was typed."""
    handler = handler_for(learned, tmp_path)
    typed = "größe"
    context = context_for(tmp_path, [{"x-etcl-task": typed.encode().decode("latin-1")}])
    ((status, answer),) = answers(handler, context, [png(learned.tasks[0].test_x[0])])
    assert (status, answer["error"]["code"]) == (404, "unknown_task")
    assert typed in answer["error"]["message"]


def test_describe_is_answered_per_request(learned: Learned, tmp_path: Path) -> None:
    """A client may ask for it in the middle of a batch."""
    handler = handler_for(learned, tmp_path)
    image = png(learned.tasks[0].test_x[0])
    context = context_for(tmp_path, [{"X-ETCL-Task": "parity"}, {"describe": "True"}])
    (_, prediction), (status, described) = answers(handler, context, [image, b""])
    assert prediction["task"] == "parity"
    assert status == 200
    assert [task["name"] for task in described["tasks"]] == list(learned.bundle.tasks)
