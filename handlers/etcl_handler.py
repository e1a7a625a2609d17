"""TorchServe handler: HTTP in, Predictor, HTTP out.

TorchServe imports this file by its base name from the extracted archive and expects exactly one class in it.
Every request of a batch gets its own answer or its own error; none of them can fail its neighbours.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ts.metrics.metric_type_enum import MetricTypes

from etcl_deploy.bundle.bundle import load_bundle, reload_bundle
from etcl_deploy.errors import EtclError, TooLargeError
from etcl_deploy.runtime.counters import OTHER, Meter
from etcl_deploy.runtime.engine import choose_engine
from etcl_deploy.runtime.http import Outcome, Request, answer, error_body, read_request, status_of
from etcl_deploy.runtime.predictor import DEFAULT_CACHE_BYTES, Predictor

logger = logging.getLogger(__name__)

MAX_PIXELS = 16_000_000  # of an image, divided by how many come with it: a full batch decodes before it times out
BATCH_ANSWER_BYTES = 6_000_000  # of a batch; TorchServe's own limit is 6,553,500
FLUSH_SECONDS = 5
METRICS_A_BREATH, BREATH_SECONDS = 10, 0.005  # metrics that are told before requests have the processor again
# As metrics.yaml declares them: unit, dimensions. TorchServe turns every update into a line of text, so sums of
# some seconds are told, not single requests.
COUNTERS = {
    "etcl_requests_total": ("Count", ["task"]),
    "etcl_items_total": ("Count", ["task"]),
    "etcl_errors_total": ("Count", ["code"]),
    "etcl_stage_microseconds_total": ("Microseconds", ["task", "stage"]),
    "etcl_cache_hits_total": ("Count", ["worker"]),
    "etcl_cache_misses_total": ("Count", ["worker"]),
    "etcl_cache_evictions_total": ("Count", ["worker"]),
}
GAUGES = {
    "etcl_tasks": ("Count", ["worker"]),
    "etcl_tasks_ready": ("Count", ["worker"]),
    "etcl_cache_bytes": ("Bytes", ["worker"]),
    "etcl_task_bytes": ("Bytes", ["task"]),
}


class EtclHandler:
    """All tasks of one bundle behind one model name."""

    def __init__(self) -> None:
        self.predictor: Predictor | None = None
        self.meter = Meter()
        self.batches = 0
        self.largest_batch = 0

    def initialize(self, context: Any) -> None:
        """Load the bundle of the extracted archive, choose the engine, and make pinned tasks ready."""
        directory = Path(context.system_properties["model_dir"])
        settings = (context.model_yaml_config or {}).get("etcl", {})
        path = directory / context.manifest["model"]["serializedFile"]
        bundle = load_bundle(path)
        engine = choose_engine(bundle, directory)
        if engine.name == "onnxruntime":
            # It has a file of its own with all masks: let go of those of the bundle, which were read to make it.
            bundle = engine.bundle = reload_bundle(path, bundle.digest)
        limit = settings.get("cacheBytes", DEFAULT_CACHE_BYTES)
        self.predictor = Predictor(bundle, limit, engine, self._observe)
        _give_back()
        for name in settings.get("pinned", ()):
            self.predictor.pin(name)
        if settings.get("prefetch"):
            self.predictor.prefetch(bundle.tasks)
        logger.info("loaded %d tasks, %s", len(bundle.tasks), self.predictor.engine.name)
        if context.metrics is not None:
            threading.Thread(target=self._tell, args=(context.metrics,), daemon=True).start()

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[Any]:
        """One answer per request, in order."""
        assert self.predictor is not None
        self.batches += 1
        self.largest_batch = max(self.largest_batch, len(data))
        answers: list[Any] = [None] * len(data)
        requests: dict[int, Request] = {}
        outcomes: dict[int, list[Any]] = {}  # of each request, of each item: its pixels, then its answer, or its error
        for index, row in enumerate(data):
            try:
                headers = context.get_all_request_header(index)
                if any(name.lower() == "describe" and value == "True" for name, value in headers.items()):
                    answers[index] = self.describe_handle()
                    continue
                request = requests[index] = read_request(row, headers)
                outcomes[index] = self._decode(request)
            except Exception as error:
                answers[index] = self._refuse(error, index, context)
        self._infer(requests, outcomes)
        for index, found in outcomes.items():
            try:
                errors = [outcome for outcome in found if isinstance(outcome, Exception)]
                if len(errors) == len(found):
                    raise errors[0]
                answers[index] = answer(requests[index], found, context.model_name)
                for own in errors:
                    self.meter.add("etcl_errors_total", (status_of(own)[2],))
            except Exception as error:
                answers[index] = self._refuse(error, index, context)
        limit = BATCH_ANSWER_BYTES // len(data)
        return [self._encode(body, index, limit, context) for index, body in enumerate(answers)]

    def _decode(self, request: Request) -> list[Any]:
        """The pixels of every item, or its own error."""
        assert self.predictor is not None
        self.predictor.bundle.task(request.task)
        label = self.meter.label(request.task)
        self.meter.add("etcl_requests_total", (label,))
        self.meter.add("etcl_items_total", (label,), len(request.images))
        limit = MAX_PIXELS // len(request.images)
        began = time.perf_counter()
        found: list[Any] = []
        for image in request.images:
            try:
                found.append(image if isinstance(image, Exception) else self.predictor.prepare(image, limit))
            except Exception as error:
                found.append(error)
        self._observe(request.task, "decode", time.perf_counter() - began)
        return found

    def _infer(self, requests: dict[int, Request], outcomes: dict[int, list[Any]]) -> None:
        """Put answers in the place of pixels: all in one go or, should that fail, one by one to spare the innocent."""
        places = [
            (index, position)
            for index, found in outcomes.items()
            for position, pixels in enumerate(found)
            if not isinstance(pixels, Exception)
        ]
        pixels = [outcomes[index][position] for index, position in places]
        tasks = [requests[index].task for index, _ in places]
        try:
            found: Sequence[Outcome] = self.predictor.predict(pixels, tasks) if self.predictor else []
        except Exception:
            found = [self._alone(image, task) for image, task in zip(pixels, tasks, strict=True)]
        for (index, position), outcome in zip(places, found, strict=True):
            outcomes[index][position] = outcome

    def _alone(self, pixels: Any, task: str) -> Outcome:
        assert self.predictor is not None
        try:
            return self.predictor.predict([pixels], [task])[0]
        except Exception as error:
            return error

    def _refuse(self, error: Exception, index: int, context: Any) -> dict[str, Any]:
        """Set the status of one request and give its body."""
        status, phrase, code = status_of(error)
        if not isinstance(error, EtclError):
            logger.error("request failed", exc_info=error)
        self.meter.add("etcl_errors_total", (code,))
        context.set_response_status(status, phrase, index)
        return error_body(error)

    def _encode(self, body: Any, index: int, limit: int, context: Any) -> str:
        """An answer as JSON; one too long for TorchServe's frame would cost the whole batch, so it is refused."""
        context.set_response_content_type(index, "application/json")
        text = json.dumps(body)
        if len(text) > limit and isinstance(body, dict) and "engine" in body:  # a description: without its tasks
            text = json.dumps({**body, "tasks": len(body["tasks"])})
        if len(text) <= limit:
            return text
        error = TooLargeError(
            f"the answer has {len(text)} bytes, at most {limit} are sent; ask for fewer items at once"
        )
        return json.dumps(self._refuse(error, index, context))

    def describe_handle(self) -> dict[str, Any]:
        """What `GET /models/NAME?customized=true` adds: tasks, classes, bytes, cache, batches."""
        assert self.predictor is not None
        bundle, cache = self.predictor.bundle, self.predictor.cache()
        return {
            "bundle": bundle.digest,
            "engine": self.predictor.engine.name,
            "worker": os.getpid(),
            "tasks": [
                {
                    "name": task.name,
                    "classes": list(task.classes),
                    "accuracy": task.accuracy,
                    "bytes": sum(bundle.bytes_of(task.name).values()),
                    "cached": task.name in cache.tasks,
                }
                for task in bundle.tasks.values()
            ],
            "cache": {
                "bytes": sum(cache.tasks.values()),
                "limit": cache.limit,
                "pinned": cache.pinned,
                "hits": cache.hits,
                "misses": cache.misses,
                "evictions": cache.evictions,
            },
            "batches": {"count": self.batches, "largest": self.largest_batch},
        }

    def _observe(self, task: str, stage: str, seconds: float) -> None:
        self.meter.add("etcl_stage_microseconds_total", (self.meter.label(task), stage), 1e6 * seconds)

    def _tell(self, metrics: Any) -> None:
        """Tell TorchServe what was counted, now and then, for as long as this worker lives."""
        assert self.predictor is not None
        kinds = {MetricTypes.COUNTER: COUNTERS, MetricTypes.GAUGE: GAUGES}
        known = {
            name: metrics.cache.get(kind, {}).get(name) or metrics.add_metric_to_cache(name, unit, dimensions, kind)
            for kind, declared in kinds.items()
            for name, (unit, dimensions) in declared.items()
        }
        worker = str(os.getpid())
        bundle = self.predictor.bundle
        for name in bundle.tasks:
            label = self.meter.label(name)
            if label != OTHER:
                known["etcl_task_bytes"].add_or_update(sum(bundle.bytes_of(name).values()), [label])
        known["etcl_tasks"].add_or_update(len(bundle.tasks), [worker])
        told = {"hits": 0, "misses": 0, "evictions": 0}
        while True:
            cache = self.predictor.cache()
            for kind, before in told.items():
                told[kind] = getattr(cache, kind)
                self.meter.add(f"etcl_cache_{kind}_total", (worker,), told[kind] - before)
            for number, (name, labels, value) in enumerate(self.meter.drain()):
                if value:
                    known[name].add_or_update(round(value), list(labels))
                if number % METRICS_A_BREATH == 0:
                    time.sleep(BREATH_SECONDS)
            known["etcl_tasks_ready"].add_or_update(len(cache.tasks), [worker])
            known["etcl_cache_bytes"].add_or_update(sum(cache.tasks.values()), [worker])
            time.sleep(FLUSH_SECONDS)


def _give_back() -> None:
    """Memory that comparing engines took goes back to the system, where the C library is one that keeps it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
