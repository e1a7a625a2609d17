"""TorchServe handler: HTTP in, Predictor, HTTP out.

TorchServe imports this file by its base name from the extracted archive and expects exactly one class in it.
Every request of a batch gets its own answer or its own error; none of them can fail its neighbours.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from etcl_deploy.bundle.bundle import load_bundle
from etcl_deploy.errors import (
    BadImageError,
    EtclError,
    InputError,
    MissingTaskError,
    TooLargeError,
    UnknownTaskError,
    UnsupportedMediaError,
    shortened,
)
from etcl_deploy.runtime.predictor import Predictor

logger = logging.getLogger(__name__)

MAX_INSTANCES = 256  # items in one request
MAX_PIXELS = 16_000_000  # of all the images in one request together: a full batch decodes well before it times out
BATCH_ANSWER_BYTES = 6_000_000  # of a batch; TorchServe's own limit is 6,553,500
IMAGE_FIELDS = ("data", "body")
MEDIA = ("image/", "application/json", "application/octet-stream", "multipart/form-data")

# Error -> HTTP status, its standard phrase, our code. The first that matches counts.
STATUS: tuple[tuple[type[Exception], int, str, str], ...] = (
    (UnknownTaskError, 404, "Not Found", "unknown_task"),
    (TooLargeError, 413, "Payload Too Large", "too_large"),
    (UnsupportedMediaError, 415, "Unsupported Media Type", "unsupported_media"),
    (BadImageError, 400, "Bad Request", "bad_image"),
    (MissingTaskError, 400, "Bad Request", "missing_task"),
    (InputError, 400, "Bad Request", "bad_request"),
    (Exception, 500, "Internal Server Error", "internal_error"),
)


class EtclHandler:
    """All tasks of one bundle behind one model name."""

    def __init__(self) -> None:
        self.predictor: Predictor | None = None
        self.batches = 0
        self.largest_batch = 0

    def initialize(self, context: Any) -> None:
        """Load the bundle of the extracted archive."""
        directory = Path(context.system_properties["model_dir"])
        bundle = load_bundle(directory / context.manifest["model"]["serializedFile"])
        self.predictor = Predictor(bundle)
        logger.info("loaded %d tasks: %s", len(bundle.tasks), ", ".join(bundle.tasks))

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
        """One answer per request, in order."""
        assert self.predictor is not None
        self.batches += 1
        self.largest_batch = max(self.largest_batch, len(data))
        answers: list[Any] = [None] * len(data)
        tasks: list[str] = []
        pixels: list[Any] = []
        spans: dict[int, tuple[int, int, bool]] = {}
        for index, row in enumerate(data):
            try:
                headers = _lowered(context.get_all_request_header(index))
                if headers.get("describe") == "True":
                    answers[index] = self.describe_handle()
                    continue
                task, images, several = _read(row, headers)
                self.predictor.bundle.task(task)
                limit = MAX_PIXELS // len(images)
                prepared = [self.predictor.prepare(image, limit) for image in images]
            except Exception as error:
                answers[index] = _refuse(error, index, context)
                continue
            spans[index] = (len(pixels), len(pixels) + len(prepared), several)
            tasks += [task] * len(prepared)
            pixels += prepared
        for index, predictions in self._predict(spans, pixels, tasks, context):
            answers[index] = predictions
        return [self._encode(answer, index, context) for index, answer in enumerate(answers)]

    def _predict(
        self, spans: dict[int, tuple[int, int, bool]], pixels: list[Any], tasks: list[str], context: Any
    ) -> Iterator[tuple[int, Any]]:
        """The answer of each request: all in one go or, should that fail, one by one to spare the innocent."""
        assert self.predictor is not None
        try:
            found = self.predictor.predict(pixels, tasks)
        except Exception:
            found = None
        for index, (start, stop, several) in spans.items():
            try:
                own = found[start:stop] if found else self.predictor.predict(pixels[start:stop], tasks[start:stop])
            except Exception as error:
                yield index, _refuse(error, index, context)
                continue
            yield index, [p.as_json() for p in own] if several else own[0].as_json()

    def _encode(self, answer: Any, index: int, context: Any) -> str:
        """An answer as JSON; one too long for TorchServe's frame would cost the whole batch, so it is refused."""
        context.set_response_content_type(index, "application/json")
        limit = BATCH_ANSWER_BYTES // int(context.system_properties["batch_size"] or 1)
        text = json.dumps(answer)
        if len(text) <= limit:
            return text
        error = TooLargeError(
            f"the answer has {len(text)} bytes, at most {limit} are sent; ask for fewer items at once"
        )
        return json.dumps(_refuse(error, index, context))

    def describe_handle(self) -> dict[str, Any]:
        """What `GET /models/NAME?customized=true` adds: tasks, classes, bytes, cache, batches."""
        assert self.predictor is not None
        bundle, cached = self.predictor.bundle, self.predictor.cached()
        return {
            "bundle": bundle.digest,
            "tasks": [
                {
                    "name": task.name,
                    "classes": list(task.classes),
                    "accuracy": task.accuracy,
                    "bytes": sum(bundle.bytes_of(task.name).values()),
                    "cached": task.name in cached,
                }
                for task in bundle.tasks.values()
            ],
            "cache": {"bytes": sum(cached.values()), "limit": self.predictor.cache_bytes},
            "batches": {"count": self.batches, "largest": self.largest_batch},
        }


def _read(row: Mapping[str, Any], headers: Mapping[str, Any]) -> tuple[str, list[Any], bool]:
    """The task a request names, its images, and whether the answer is a list."""
    media = str(headers.get("content-type", "")).lower().partition(";")[0].strip()
    if media and not media.startswith(MEDIA):
        raise UnsupportedMediaError(
            f"content type {shortened(media)!r} is not read; send the image itself with -T FILE or "
            "--data-binary @FILE -H 'Content-Type: image/png', or JSON, or multipart/form-data"
        )
    body = next((row[field] for field in IMAGE_FIELDS if field in row), None)
    document = _json(body) if isinstance(body, dict | list) or media == "application/json" else None
    task = _task(row, document, headers)
    if document is None:
        if not body:
            raise InputError("the request has no image: send it as the body or in the field 'data'")
        if not isinstance(body, bytes | bytearray):
            raise UnsupportedMediaError("the image arrived as text; send it as image/png or the like")
        return task, [bytes(body)], False
    instances = document.get("instances")
    if not isinstance(instances, list) or not instances:
        raise InputError('a JSON body needs \'instances\': a list of {"b64": ...} or {"pixels": ...}')
    if len(instances) > MAX_INSTANCES:
        raise TooLargeError(f"{len(instances)} instances; at most {MAX_INSTANCES} in one request")
    return task, [_instance(position, item) for position, item in enumerate(instances)], True


def _task(row: Mapping[str, Any], document: Mapping[str, Any] | None, headers: Mapping[str, Any]) -> str:
    """In order of precedence: JSON or multipart field `task`, header X-ETCL-Task, path after the version."""
    path = headers.get("url_path")
    candidates = (
        (document or {}).get("task"),
        row.get("task"),
        _utf8(headers.get("x-etcl-task")),
        unquote(path).strip("/") if isinstance(path, str) else None,
    )
    for candidate in candidates:
        if isinstance(candidate, bytes | bytearray):
            candidate = candidate.decode("utf-8", "replace")
        if isinstance(candidate, str) and candidate:
            return candidate
        if candidate is not None and not isinstance(candidate, str):
            raise InputError(f"'task' must be text, not {type(candidate).__name__}")
    raise MissingTaskError(
        "the request names no task: use the field 'task', the header X-ETCL-Task, or /predictions/NAME/1.0/TASK"
    )


def _utf8(header: Any) -> Any:
    """A header as its sender meant it: HTTP reads bytes as Latin-1, a terminal writes UTF-8."""
    try:
        return header.encode("latin-1").decode("utf-8") if isinstance(header, str) else header
    except UnicodeError:
        return header


def _json(body: Any) -> Mapping[str, Any]:
    """The JSON object of a body, whether TorchServe has parsed it or not."""
    if isinstance(body, bytes | bytearray | str):
        try:
            body = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise InputError(f"the body is not JSON: {shortened(str(error))}") from None
    if not isinstance(body, dict):
        raise InputError("a JSON body must be an object with 'task' and 'instances'")
    return body


def _instance(position: int, item: Any) -> Any:
    """An image as bytes or as nested lists of pixels."""
    if isinstance(item, dict) and isinstance(item.get("b64"), str):
        try:
            return base64.b64decode(item["b64"], validate=True)
        except ValueError as error:
            raise BadImageError(f"instance {position} is not base64: {error}") from None
    if isinstance(item, dict) and isinstance(item.get("pixels"), list):
        return item["pixels"]
    raise InputError(f"instance {position} needs 'b64' (text) or 'pixels' (nested lists)")


def _refuse(error: Exception, index: int, context: Any) -> dict[str, Any]:
    """Set the status of one request and give its body."""
    status, phrase, code = next(rest for kind, *rest in STATUS if isinstance(error, kind))
    known = isinstance(error, EtclError)
    if not known:
        logger.error("request failed", exc_info=error)
    context.set_response_status(status, phrase, index)
    message = str(error) if known else "this request failed; the server's log says why"
    return {"error": {"code": code, "message": message}}


def _lowered(headers: Mapping[str, Any]) -> dict[str, Any]:
    return {name.lower(): value for name, value in headers.items()}
