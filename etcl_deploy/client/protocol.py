"""The protocol between a client and a server: requests, answers, tokens."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import httpx

from etcl_deploy.core.prediction import Prediction
from etcl_deploy.errors import ClientError, RequestError, TokenError, shortened

KEY_FILE = "key_file.json"  # where TorchServe writes its tokens


class Listable(Protocol):
    """An array or a tensor."""

    def tolist(self) -> Any:
        """Its numbers as nested lists."""


Image = bytes | bytearray | memoryview | str | PathLike[str] | Sequence[Any] | Listable
Answer = Prediction | RequestError


def encode(image: Image, task: str) -> tuple[bytes, dict[bytes, bytes]]:
    """Body and headers of a request: an image file as it is, pixels as JSON."""
    if isinstance(image, str | PathLike):
        image = read_image(Path(image))
    instance: dict[str, Any]
    if isinstance(image, bytes | bytearray | memoryview):
        # A header carries no control characters, and loses the spaces around its value.
        if task.isprintable() and task == task.strip():
            return bytes(image), {b"Content-Type": b"application/octet-stream", b"X-ETCL-Task": task.encode()}
        instance = {"b64": base64.b64encode(image).decode()}
    else:
        instance = {"pixels": image if isinstance(image, Sequence) or not hasattr(image, "tolist") else image.tolist()}
    try:
        document = json.dumps({"task": task, "instances": [instance]}, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(None, "bad_image", f"neither an image file nor lists of pixels: {error}") from None
    return document.encode(), {b"Content-Type": b"application/json"}


def read(response: httpx.Response) -> Answer:
    """The prediction in an answer (a list of one if pixels were sent), or the error of our handler or of TorchServe."""
    status = response.status_code
    try:
        document = json.loads(response.content)
    except (ValueError, RecursionError):
        document = None
    match document[0] if isinstance(document, list) and len(document) == 1 else document:
        case {"task": str(task), "label": str(label), "index": int(index), "scores": dict(scores)} if status == 200:
            if all(isinstance(score, int | float) for score in scores.values()):
                return Prediction(task, label, index, scores)
        case {"error": {"code": str(code), "message": str(message)}}:
            return RequestError(status, code, message)
        case {"type": str(kind), "message": str(message)}:  # ModelNotFoundException is model_not_found
            return RequestError(status, re.sub(r"\B[A-Z]", r"_\g<0>", kind.removesuffix("Exception")).lower(), message)
    if status == 413:  # TorchServe says no more than that
        return RequestError(status, "too_large", f"the server takes no {len(response.request.content)} bytes at once")
    message = f"{response.url} answers neither a prediction nor an error: {shortened(response.text)!r}"
    return RequestError(status, "unexpected_answer", message)


def read_image(path: Path) -> bytes:
    """The bytes of an image file."""
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(None, "bad_image", f"cannot read {path}: {reason}") from None


def read_keys(path: Path) -> dict[str, Any]:
    """The entries of a server's key file by kind of key: "inference", "management", "API" (which makes the others)."""
    try:
        keys = json.loads(path.read_bytes())
    except OSError as error:
        raise TokenError(f"cannot read the token file {path}: {error.strerror}; is the server running?") from None
    except (ValueError, RecursionError):
        keys = None
    if not isinstance(keys, dict):
        raise TokenError(f"{path} holds no tokens; it should be a server's {KEY_FILE}")
    return keys


def read_token(path: Path, kind: str = "inference") -> str:
    """The token of that kind in a server's key file."""
    try:
        token = read_keys(path)[kind]["key"]
    except (LookupError, TypeError):
        raise TokenError(f"{path} holds no {kind} token; it should be a server's {KEY_FILE}") from None
    return checked_token(token, f"the {kind} token in {path}")


def checked_token(token: Any, name: str) -> str:
    """The token, if a header can carry it."""
    if not isinstance(token, str) or not re.fullmatch(r"[!-~]+", token):
        raise TokenError(f"{name} is none: it must be text without spaces and line ends")
    return token


def checked_url(url: str) -> str:
    """The URL, if one can ask there."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL()
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ClientError(f"{shortened(url)!r} is no URL to ask; http://127.0.0.1:8080/predictions/NAME would be")
    return url
