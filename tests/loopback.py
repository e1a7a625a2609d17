"""Servers on loopback that answer as a test tells them to, and answers as they must be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from etcl_deploy.core.prediction import Prediction


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server that answers as the handler does, for the time of a `with` block."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def expect(answer: dict[str, Any], expected: Prediction) -> None:
    """The JSON of an answer holds a prediction, but for rounding."""
    wanted = {**expected.as_json(), "scores": pytest.approx(expected.scores, abs=1e-5)}
    assert {key: answer.get(key) for key in wanted} == wanted, answer
