"""A request read from its body and headers, and its answer as JSON. Knows HTTP, but no server."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from etcl_deploy.core.prediction import Prediction
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

MAX_INSTANCES = 256  # items in one request
IMAGE_FIELDS = ("data", "body")
MEDIA = ("image/", "application/json", "application/octet-stream", "multipart/form-data")
DATATYPES = ("BYTES", "UINT8", "INT8", "INT16", "INT32", "INT64", "UINT16", "UINT32", "UINT64", "FP32", "FP64")

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

Outcome = Prediction | Exception


@dataclass(frozen=True)
class Request:
    """The task, the images, and the form of the answer: "one", "list" or "v2"."""

    task: str
    images: list[Any]
    form: str
    id: str | None = None  # what a v2 request calls itself


def read_request(row: Mapping[str, Any], headers: Mapping[str, Any]) -> Request:
    """A request from its fields (`body`, or those of a form) and its headers, whose names may be in any case."""
    headers = {name.lower(): value for name, value in headers.items()}
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
        return Request(task, [bytes(body)], "one")
    if "inputs" in document and "instances" not in document:
        name = document.get("id")
        return Request(task, _tensor_items(document["inputs"]), "v2", name if isinstance(name, str) else None)
    instances = document.get("instances")
    if not isinstance(instances, list) or not instances:
        raise InputError(
            "a JSON body needs 'instances': a list of {\"b64\": ...} or {\"pixels\": ...}; or 'inputs', as in the "
            "Open Inference Protocol"
        )
    _check_count(len(instances))
    return Request(task, [_instance(position, item) for position, item in enumerate(instances)], "list")


def answer(request: Request, outcomes: Sequence[Outcome], model: str) -> Any:
    """The body for a request of which at least one item has an answer; other items have an error in their place."""
    shown = [outcome.as_json() if isinstance(outcome, Prediction) else error_body(outcome) for outcome in outcomes]
    if request.form == "one":
        return shown[0]
    return shown if request.form == "list" else _tensors(request, outcomes, shown, model)


def status_of(error: Exception) -> tuple[int, str, str]:
    """HTTP status, phrase and our code of an error."""
    return next((status, phrase, code) for kind, status, phrase, code in STATUS if isinstance(error, kind))


def error_body(error: Exception) -> dict[str, Any]:
    """The body for an error. The message of an error that is not ours stays in the log."""
    message = str(error) if isinstance(error, EtclError) else "this request failed; the server's log says why"
    return {"error": {"code": status_of(error)[2], "message": message}}


def _task(row: Mapping[str, Any], document: Mapping[str, Any] | None, headers: Mapping[str, Any]) -> str:
    """The first task named by: JSON or multipart field `task`, header X-ETCL-Task, path (decoded) after the version."""
    path = headers.get("url_path")
    parameters = (document or {}).get("parameters")
    candidates = (
        (document or {}).get("task"),
        parameters.get("task") if isinstance(parameters, dict) else None,
        row.get("task"),
        _utf8(headers.get("x-etcl-task")),
        path.strip("/") if isinstance(path, str) else None,
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
    """A header's text, if it was sent as UTF-8: HTTP reads its bytes as Latin-1."""
    try:
        return header.encode("latin-1").decode("utf-8") if isinstance(header, str) else header
    except UnicodeError:
        return header


def _json(body: Any) -> Mapping[str, Any]:
    """The JSON object of a body, whether the server has parsed it or not."""
    if isinstance(body, bytes | bytearray | str):
        try:
            body = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise InputError(f"the body is not JSON: {shortened(str(error))}") from None
    if not isinstance(body, dict):
        raise InputError("a JSON body must be an object with 'task' and 'instances'")
    return body


def _check_count(count: int) -> None:
    if count > MAX_INSTANCES:
        raise TooLargeError(f"{count} items; at most {MAX_INSTANCES} in one request")


def _instance(position: int, item: Any) -> Any:
    """An image as bytes or as nested lists of pixels, or the error of this item alone."""
    if isinstance(item, dict) and isinstance(item.get("b64"), str):
        return _decoded(f"instance {position}", item["b64"])
    if isinstance(item, dict) and isinstance(item.get("pixels"), list):
        return item["pixels"]
    return InputError(f"instance {position} needs 'b64' (text) or 'pixels' (nested lists)")


def _decoded(what: str, text: str) -> bytes | BadImageError:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        return BadImageError(f"{what} is not base64: {error}")


def _tensor_items(inputs: Any) -> list[Any]:
    """The images of a v2 request: one tensor of pixels, or of texts (BYTES) that are image files in base64."""
    if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
        raise InputError('\'inputs\' must be a list of one tensor: {"name", "shape", "datatype", "data"}')
    tensor: dict[str, Any] = inputs[0]
    kind, shape, data = tensor.get("datatype"), tensor.get("shape"), tensor.get("data")
    if not isinstance(kind, str) or kind not in DATATYPES:
        shown = shortened(kind) if isinstance(kind, str) else type(kind).__name__
        raise InputError(f"datatype {shown!r} is not read; known: {', '.join(DATATYPES)}")
    if not isinstance(shape, list) or not _are_sizes(shape) or not isinstance(data, list):
        raise InputError("a tensor needs 'shape', 1 to 4 whole numbers from 1, and 'data', a list")
    if kind == "BYTES":
        if len(data) != prod(shape) or not all(isinstance(text, str) for text in data):
            raise InputError(f"'data' must be {prod(shape)} texts, as 'shape' says")
        _check_count(len(data))
        return [_decoded(f"item {position}", text) for position, text in enumerate(data)]
    grey = len(shape) == 3 and shape[2] not in (1, 3)
    shape = shape if len(shape) == 4 else [*shape, 1] if grey else [1, *shape]
    if len(shape) not in (3, 4):
        raise InputError("pixels have the shape [items, height, width, channels], or less where that is clear")
    _check_count(shape[0])
    try:
        values = torch.tensor(data, dtype=torch.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise BadImageError(f"'data' must be numbers: {shortened(str(error))}") from None
    if values.numel() != prod(shape):
        raise InputError(f"'data' has {values.numel()} numbers, but 'shape' says {prod(shape)}")
    return list(values.view(shape))


def _are_sizes(shape: list[Any]) -> bool:
    return 1 <= len(shape) <= 4 and all(type(n) is int and 0 < n < 1 << 31 for n in shape)


def _tensors(request: Request, outcomes: Sequence[Outcome], shown: list[Any], model: str) -> dict[str, Any]:
    """An answer of the Open Inference Protocol; for a single item with the fields of a plain answer beside it."""
    done = [outcome for outcome in outcomes if isinstance(outcome, Prediction)]
    if len(done) < len(outcomes):
        raise next(outcome for outcome in outcomes if isinstance(outcome, Exception))
    classes = list(done[0].scores)
    columns: dict[str, tuple[str, list[int], list[Any]]] = {
        "label": ("BYTES", [len(done)], [one.label for one in done]),
        "index": ("INT64", [len(done)], [one.index for one in done]),
        "scores": ("FP32", [len(done), len(classes)], [score for one in done for score in one.scores.values()]),
    }
    return {
        **(shown[0] if len(done) == 1 else {}),
        "model_name": model,
        **({"id": request.id} if request.id is not None else {}),
        "parameters": {"task": request.task, "classes": classes},
        "outputs": [
            {"name": name, "datatype": kind, "shape": shape, "data": data}
            for name, (kind, shape, data) in columns.items()
        ],
    }
