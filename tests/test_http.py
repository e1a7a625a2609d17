"""What a request asks for, whoever serves it."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
import torch
from conftest import Learned

from etcl_deploy.core.pixels import png
from etcl_deploy.core.prediction import Prediction
from etcl_deploy.errors import (
    BadImageError,
    EtclError,
    InputError,
    MissingTaskError,
    TooLargeError,
    UnsupportedMediaError,
)
from etcl_deploy.runtime.http import MAX_INSTANCES, Request, answer, error_body, read_request, status_of
from etcl_deploy.runtime.predictor import Predictor

JSON = {"Content-Type": "application/json"}
FOUND = [Prediction("t", "b", 1, {"a": 0.25, "b": 0.75}), Prediction("t", "a", 0, {"a": 0.5, "b": 0.5})]


def v2(data: Any, shape: Any, datatype: Any = "UINT8", **more: Any) -> dict[str, Any]:
    tensor = {"name": "image", "shape": shape, "datatype": datatype, "data": data}
    return {"inputs": [tensor], "parameters": {"task": "t"}, **more}


@pytest.mark.parametrize(
    ("shape", "items", "each"),
    [([2, 4, 3, 1], 2, [4, 3, 1]), ([4, 2, 3], 1, [4, 2, 3]), ([2, 3, 4], 2, [3, 4, 1]), ([6, 4], 1, [6, 4])],
)
def test_tensors_of_pixels_are_images(shape: list[int], items: int, each: list[int]) -> None:
    """Flat or nested, with or without the dimensions of items and channels."""
    values = torch.arange(24)
    for data in (values.tolist(), values.view(shape).tolist()):
        request = read_request({"body": v2(data, shape, "FP32")}, JSON)
        assert (request.task, request.form, len(request.images)) == ("t", "v2", items)
        assert [list(image.shape) for image in request.images] == [each] * items
        assert torch.cat([image.flatten() for image in request.images]).tolist() == values.tolist()


def test_tensors_of_bytes_are_image_files(learned: Learned) -> None:
    """In base64; one that is none is the error of its item."""
    image = learned.tasks[0].test_x[0]
    text = base64.b64encode(png(image)).decode()
    request = read_request({"body": v2([text, "?"], [2], "BYTES", id="seven")}, JSON)
    assert request.id == "seven"
    assert torch.equal(Predictor(learned.bundle).prepare(request.images[0]), image)
    assert isinstance(request.images[1], BadImageError)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (v2([1], [1, 1], "FLOAT"), "datatype 'FLOAT' is not read"),
        (v2([1], [1, 0]), "needs 'shape'"),
        (v2([1], [True, 1]), "needs 'shape'"),
        (v2([1], [1] * 5), "needs 'shape'"),
        (v2("abc", [1, 1]), "needs 'shape'"),
        (v2([1, 2], [1, 1]), "has 2 numbers, but 'shape' says 1"),
        (v2([1], [1 << 30, 1 << 30]), "has 1 numbers"),
        (v2([1], [10**3000, 1]), "needs 'shape'"),
        (v2([1], [1], [["BYTES"]]), "datatype 'list' is not read"),
        (v2(["x"], [1, 1]), "must be numbers"),
        (v2([[1], [2, 3]], [3, 1]), "must be numbers"),
        (v2([5], [1], "BYTES"), "must be 1 texts"),
        (v2([1] * 300, [300, 1, 1, 1]), "300 items; at most 256"),
        (v2([1], [1]), "pixels have the shape"),
        ({"inputs": [], "task": "t"}, "list of one tensor"),
        ({"inputs": {"a": 1}, "task": "t"}, "list of one tensor"),
        ({"inputs": [1], "task": "t"}, "list of one tensor"),
        ({"task": "t"}, "needs 'instances'"),
        ({"task": "t", "instances": [{}] * (MAX_INSTANCES + 1)}, "257 items"),
        ({"task": 5, "instances": [{}]}, "'task' must be text, not int"),
        ({"instances": [{}]}, "names no task"),
    ],
)
def test_what_is_no_request_is_refused_by_name(body: Any, reason: str) -> None:
    """The message says what was found and what would be right."""
    with pytest.raises(InputError, match=reason):
        read_request({"body": json.dumps(body).encode()}, JSON)


@pytest.mark.parametrize(
    ("row", "media", "kind", "reason"),
    [
        ({"body": b"x"}, "text/html; charset=utf-8", UnsupportedMediaError, "content type 'text/html' is not read"),
        ({"body": "a text"}, "", UnsupportedMediaError, "the image arrived as text"),
        ({"body": b""}, "image/png", InputError, "has no image"),
        ({}, "image/png", InputError, "has no image"),
        ({"body": b"{"}, "application/json", InputError, "the body is not JSON"),
        ({"body": b"[" * 100_000}, "application/json", InputError, "the body is not JSON"),
        ({"body": b"[1]"}, "application/json", InputError, "must be an object with 'task' and 'instances'"),
        ({"body": [1]}, "", InputError, "must be an object with 'task' and 'instances'"),
        ({}, "application/json", InputError, "must be an object with 'task' and 'instances'"),
    ],
)
def test_bodies_that_are_no_image_are_refused(row: dict[str, Any], media: str, kind: type, reason: str) -> None:
    """Each by what it is, whatever a server has made of it."""
    with pytest.raises(kind, match=reason):
        read_request(row, {"content-type": media, "x-etcl-task": "t"})


def test_an_image_is_a_request() -> None:
    """As the body, or as a field of a form, which comes first."""
    for row in ({"body": bytearray(b"png")}, {"data": b"png", "body": b"other"}):
        assert read_request(row, {"X-ETCL-Task": "t", "Content-Type": "IMAGE/PNG"}) == Request("t", [b"png"], "one")


def test_instances_are_images_each_with_its_own_error() -> None:
    """Base64 and pixels; what is neither spoils no other."""
    rows = [{"b64": "YWJj"}, {"pixels": [[1]]}, {"b64": "?"}, {"b64": 5}, {"pixels": "x"}, 7]
    request = read_request({"body": {"task": "t", "instances": rows}}, JSON)
    assert (request.form, request.images[:2]) == ("list", [b"abc", [[1]]])
    assert [type(image) for image in request.images[2:]] == [BadImageError, InputError, InputError, InputError]
    assert [str(image).split()[1] for image in request.images[2:]] == ["2", "3", "4", "5"]


@pytest.mark.parametrize("name", ["größe", "大"])
def test_a_header_in_any_letters_is_read(name: str) -> None:
    """As UTF-8 where it is that, and as it came where it is not."""
    for sent in (name, name.encode().decode("latin-1")):
        assert read_request({"body": b"x"}, {"x-etcl-task": sent}).task == name


def test_parameters_name_the_task_before_headers() -> None:
    """`task` of the body, of its parameters, of a form, of the header, of the path: in this order."""
    body = v2([1], [1, 1])
    headers = {**JSON, "x-etcl-task": "h", "url_path": "p q"}
    assert read_request({"body": {**body, "task": "b"}}, headers).task == "b"
    assert read_request({"body": body, "task": b"f"}, headers).task == "t"
    plain = {**body, "parameters": None}
    assert read_request({"body": plain, "task": b"f"}, headers).task == "f"
    assert read_request({"body": plain}, headers).task == "h"
    assert read_request({"body": plain}, {**JSON, "url_path": "p%20q/"}).task == "p%20q", "the server has decoded it"
    with pytest.raises(MissingTaskError):
        read_request({"body": plain}, JSON)
    with pytest.raises(MissingTaskError):
        read_request({"body": {**plain, "task": ""}}, {**JSON, "url_path": "/"})


def test_each_form_has_its_answer() -> None:
    """One object, a list with errors in their places, or tensors with what the plain form says beside them."""
    single, several, tensors = (Request("t", [1, 2], form, "id") for form in ("one", "list", "v2"))
    assert answer(single, FOUND[:1], "m") == FOUND[0].as_json()
    error = BadImageError("broken")
    assert answer(several, [FOUND[0], error], "m") == [FOUND[0].as_json(), error_body(error)]
    found = answer(tensors, FOUND, "m")
    assert (found["model_name"], found["id"], found["parameters"]["task"]) == ("m", "id", "t")
    assert [(o["name"], o["datatype"], o["shape"], o["data"]) for o in found["outputs"]] == [
        ("label", "BYTES", [2], ["b", "a"]),
        ("index", "INT64", [2], [1, 0]),
        ("scores", "FP32", [2, 2], [0.25, 0.75, 0.5, 0.5]),
    ]
    assert answer(tensors, FOUND[:1], "m")["label"] == "b"
    with pytest.raises(BadImageError):
        answer(tensors, [FOUND[0], error], "m")


def test_our_own_mistakes_are_not_shown() -> None:
    """An error that is none of ours is a 500, and its text is for the log."""
    assert status_of(TooLargeError("x")) == (413, "Payload Too Large", "too_large")
    assert status_of(EtclError("x"))[0] == 500
    body = error_body(RuntimeError("secret"))
    assert body["error"]["code"] == "internal_error" and "secret" not in json.dumps(body)
