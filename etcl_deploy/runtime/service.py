"""All tasks of one bundle behind one name: a batch of requests in, a reply for each out. Knows HTTP, but no server.

Every request of a batch gets its own answer or its own error; none of them can fail its neighbours.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from etcl_deploy.bundle.bundle import load_bundle, reload_bundle
from etcl_deploy.errors import EtclError, TooLargeError
from etcl_deploy.runtime.counters import Meter
from etcl_deploy.runtime.engine import choose_engine, trim_memory
from etcl_deploy.runtime.http import Outcome, Request, answer, error_body, read_request, status_of
from etcl_deploy.runtime.predictor import DEFAULT_CACHE_BYTES, Predictor

logger = logging.getLogger(__name__)

REQUEST_PIXELS = 16_000_000  # of all images of a request: a full batch decodes before it times out


@dataclass(frozen=True)
class Received:
    """A request as a server has it: the fields of its body, see `read_request`, and its headers."""

    fields: Mapping[str, Any]
    headers: Mapping[str, Any]


@dataclass(frozen=True)
class Decoded:
    """A request whose images are decoded: for each its pixels, or the error it gave."""

    request: Request
    items: list[Tensor | Exception]


@dataclass(frozen=True)
class Description:
    """A bundle's tasks, and the state of the process that serves them."""

    bundle: str  # digest
    engine: str
    worker: int  # process id
    tasks: list[dict[str, Any]]
    cache: dict[str, Any]
    batches: dict[str, int]

    def as_json(self, limit: int) -> str:
        """At most `limit` bytes, if need be with the number of tasks in their place."""
        text = json.dumps(vars(self))  # no asdict: it copies every name of a class
        return text if len(text) <= limit else json.dumps({**vars(self), "tasks": len(self.tasks)})


@dataclass(frozen=True)
class Reply:
    """An HTTP status with its phrase, and the body as JSON."""

    status: int
    phrase: str
    body: str


def open_service(path: Path, shared: Path, settings: Mapping[str, Any]) -> Service:
    """The service of a bundle's file, with the fastest engine and the tasks that `settings` want ready.

    Processes with the same `shared` directory share the engine's files in it.
    """
    meter, bundle = Meter(), load_bundle(path)
    engine = choose_engine(bundle, shared)
    if engine.name == "onnxruntime":
        # It has a file of its own with all masks. Loaded again, the bundle lets go of those that were read to make it.
        bundle = engine.bundle = reload_bundle(path, bundle.digest)
    predictor = Predictor(bundle, settings.get("cacheBytes", DEFAULT_CACHE_BYTES), engine, meter.observe)
    trim_memory()
    for name in settings.get("pinned", ()):
        predictor.pin(name)
    if settings.get("prefetch"):
        predictor.prefetch(bundle.tasks)
    logger.info("loaded %d tasks, %s", len(bundle.tasks), engine.name)
    return Service(predictor, meter)


class Service:
    """Answers requests with a predictor, and counts them."""

    def __init__(self, predictor: Predictor, meter: Meter) -> None:
        self.predictor = predictor
        self.meter = meter
        self._batches = 0
        self._largest_batch = 0

    def reply(self, batch: Sequence[Received], model: str, limit: int) -> list[Reply]:
        """One reply for each request, in order, with at most `limit` bytes of bodies together."""
        self._batches += 1
        self._largest_batch = max(self._largest_batch, len(batch))
        asked = [self._read(received) for received in batch]
        predictions = self._predict([one for one in asked if isinstance(one, Decoded)])
        return [self._reply(one, predictions, model, limit // len(batch)) for one in asked]

    def describe(self) -> Description:
        """The tasks, their classes and bytes, the cache, and how requests came in batches."""
        bundle, cache = self.predictor.bundle, self.predictor.cache()
        tasks = [
            {
                "name": task.name,
                "classes": list(task.classes),
                "accuracy": task.accuracy,
                "bytes": sum(bundle.bytes_of(task.name).values()),
                "cached": task.name in cache.tasks,
            }
            for task in bundle.tasks.values()
        ]
        state = {
            "bytes": sum(cache.tasks.values()),
            "limit": cache.limit,
            "pinned": cache.pinned,
            "hits": cache.hits,
            "misses": cache.misses,
            "evictions": cache.evictions,
        }
        batches = {"count": self._batches, "largest": self._largest_batch}
        return Description(bundle.digest, self.predictor.engine.name, os.getpid(), tasks, state, batches)

    def _read(self, received: Received) -> Decoded | Description | Exception:
        """A request with its images decoded, or the error it gave; or a description, if a header asks for it."""
        try:
            if any(name.lower() == "describe" and value == "True" for name, value in received.headers.items()):
                return self.describe()
            request = read_request(received.fields, received.headers)
            self.predictor.bundle.task(request.task)
            return Decoded(request, self._decode(request))
        except Exception as error:
            return error

    def _decode(self, request: Request) -> list[Tensor | Exception]:
        """The pixels of every item, or its own error."""
        label = self.meter.label(request.task)
        self.meter.add("etcl_requests_total", (label,))
        self.meter.add("etcl_items_total", (label,), len(request.images))
        limit = REQUEST_PIXELS // len(request.images)
        began = time.perf_counter()
        items: list[Tensor | Exception] = []
        for image in request.images:
            try:
                items.append(image if isinstance(image, Exception) else self.predictor.prepare(image, limit))
            except Exception as error:
                items.append(error)
        self.meter.observe(request.task, "decode", time.perf_counter() - began)
        return items

    def _predict(self, decoded: Sequence[Decoded]) -> Iterator[Outcome]:
        """The outcome of each item with pixels, in order: all at once or, if that fails, one by one."""
        items = [(item, one.request.task) for one in decoded for item in one.items if not isinstance(item, Exception)]
        try:
            return iter(self.predictor.answer([pixels for pixels, _ in items], [task for _, task in items]))
        except Exception:
            return iter([self._predict_one(pixels, task) for pixels, task in items])

    def _predict_one(self, pixels: Tensor, task: str) -> Outcome:
        try:
            return self.predictor.answer([pixels], [task])[0]
        except Exception as error:
            return error

    def _reply(
        self, asked: Decoded | Description | Exception, predictions: Iterator[Outcome], model: str, limit: int
    ) -> Reply:
        """The reply to one request, which takes as many of the predictions as it has items with pixels."""
        try:
            if isinstance(asked, Exception):
                raise asked
            done = asked.as_json(limit) if isinstance(asked, Description) else self._answer(asked, predictions, model)
            reply = Reply(200, "OK", done)
        except Exception as error:
            reply = self._refuse(error)
        if len(reply.body) <= limit:
            return reply
        size = len(reply.body)
        message = f"the answer has {size} bytes, at most {limit} are sent; ask for fewer items at once"
        return self._refuse(TooLargeError(message))

    def _answer(self, decoded: Decoded, predictions: Iterator[Outcome], model: str) -> str:
        outcomes = [item if isinstance(item, Exception) else next(predictions) for item in decoded.items]
        errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if len(errors) == len(outcomes):
            raise errors[0]
        body = answer(decoded.request, outcomes, model)
        for error in errors:
            self.meter.add("etcl_errors_total", (status_of(error)[2],))
        return json.dumps(body)

    def _refuse(self, error: Exception) -> Reply:
        """The reply that tells an error; one that is our own mistake is also logged."""
        status, phrase, code = status_of(error)
        if not isinstance(error, EtclError):
            logger.error("request failed", exc_info=error)
        self.meter.add("etcl_errors_total", (code,))
        return Reply(status, phrase, json.dumps(error_body(error)))
