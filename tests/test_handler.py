"""The handler's last lines of defence, with TorchServe's own context; test_serve.py asks it over HTTP."""

from __future__ import annotations

import base64
import gc
import json
import os
import re
import shutil
import threading
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Learned
from ts.context import Context, RequestProcessor
from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl

from etcl_deploy.bundle.bundle import load_bundle
from etcl_deploy.core.pixels import png
from etcl_deploy.errors import CacheError
from etcl_deploy.handlers import etcl_handler
from etcl_deploy.handlers.etcl_handler import EtclHandler
from etcl_deploy.runtime import counters as meter
from etcl_deploy.runtime import engine as engines
from etcl_deploy.runtime.predictor import Predictor


def handler_for(learned: Learned, directory: Path, metrics: Any = None, **settings: Any) -> EtclHandler:
    shutil.copy(learned.path, directory / "bundle.etcl")
    handler = EtclHandler()
    context = context_for(directory, [])
    context.metrics, context.model_yaml_config = metrics, {"etcl": settings} if settings else None
    handler.initialize(context)
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


@pytest.mark.parametrize("fastest", ["torch", "onnxruntime"])
def test_either_engine_answers_from_the_archive(
    learned: Learned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fastest: str
) -> None:
    """Whichever is faster here: the handler's answer is the Predictor's, and both hold one bundle."""
    monkeypatch.setattr(engines, "_seconds", lambda engine, ready, pixels: float(engine.name != fastest))
    handler = handler_for(learned, tmp_path)
    assert handler.predictor is not None and handler.predictor.engine.name == fastest
    assert handler.predictor.engine.bundle is handler.predictor.bundle
    for task in learned.tasks:
        image = task.test_x[0]
        expected = Predictor(learned.bundle).predict([image], [task.name])[0]
        ((status, found),) = answers(handler, context_for(tmp_path, [{"x-etcl-task": task.name}]), [png(image)])
        assert (status, found["task"], found["label"]) == (200, task.name, expected.label)
        assert found["scores"] == pytest.approx(expected.scores, abs=1e-5)


def test_tasks_are_made_ready_as_the_settings_say(learned: Learned, tmp_path: Path) -> None:
    """Pinned ones stay, others as far as they fit; nothing is made ready unasked."""
    names = list(learned.bundle.tasks)

    def cached(**settings: Any) -> tuple[list[str], list[str]]:
        described = handler_for(learned, tmp_path, **settings).describe_handle()
        return [task["name"] for task in described["tasks"] if task["cached"]], described["cache"]["pinned"]

    assert cached() == ([], [])
    assert cached(prefetch=True) == (names, [])
    assert cached(pinned=["parity", "turned"]) == (["turned", "parity"], ["parity", "turned"])
    with pytest.raises(CacheError, match="'parity' cannot be kept ready"):
        handler_for(learned, tmp_path, pinned=["parity"], cacheBytes=1000)


def test_items_fail_alone_and_are_counted(learned: Learned, tmp_path: Path) -> None:
    """One bad item of a list has its error in its place; of tensors, or where all are bad, the request has it."""
    handler = handler_for(learned, tmp_path)
    good = base64.b64encode(png(learned.tasks[0].test_x[0])).decode()

    def ask(body: dict[str, Any]) -> tuple[int, Any]:
        context = context_for(tmp_path, [{"content-type": "application/json", "x-etcl-task": "parity"}])
        (found,) = answers(handler, context, [json.dumps(body).encode()])
        return found

    tensor = {"name": "image", "shape": [2], "datatype": "BYTES"}
    status, (first, second, third) = ask({"instances": [{"b64": good}, {"b64": "eA=="}, {"nothing": 1}]})
    assert (status, first["task"]) == (200, "parity")
    assert (second["error"]["code"], third["error"]["code"]) == ("bad_image", "bad_request")
    status, refused = ask({"inputs": [{**tensor, "data": [good, "eA=="]}]})
    assert (status, refused["error"]["code"]) == (400, "bad_image")
    status, refused = ask({"instances": [{"b64": "eA=="}, {"nothing": 1}]})
    assert (status, refused["error"]["code"]) == (400, "bad_image")
    status, found = ask({"inputs": [{**tensor, "data": [good, good]}]})
    assert (status, [output["shape"] for output in found["outputs"]]) == (200, [[2], [2], [2, 2]])
    sums = {(name, labels): value for name, labels, value in handler.meter.drain()}
    assert sums["etcl_requests_total", ("parity",)] == 4 and sums["etcl_items_total", ("parity",)] == 9
    assert sums["etcl_errors_total", ("bad_request",)] == 1
    assert sums["etcl_errors_total", ("bad_image",)] == 3, "what the sender is told, once"


def test_what_is_no_request_is_answered_by_name(learned: Learned, tmp_path: Path) -> None:
    """A task there is not, no task, an empty body, a page of a browser: each with its own status, beside an answer."""
    handler = handler_for(learned, tmp_path)
    image = png(learned.tasks[0].test_x[0])
    headers = [{"x-etcl-task": "nobody"}, {}, *({"x-etcl-task": "parity"} for _ in range(3))]
    headers[3] = {**headers[3], "content-type": "text/html"}
    context = context_for(tmp_path, headers)
    found = answers(handler, context, [image, image, b"", image, image])
    assert [status for status, _ in found] == [404, 400, 400, 415, 200]
    codes = [answer["error"]["code"] for _, answer in found[:4]]
    assert codes == ["unknown_task", "missing_task", "bad_request", "unsupported_media"]
    described = handler.describe_handle()
    assert described["batches"] == {"count": 1, "largest": 5}


def server_metrics() -> MetricsCacheYamlImpl:
    """What TorchServe makes of our file, nothing of it declared yet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        found = MetricsCacheYamlImpl(ROOT / "handlers" / "metrics.yaml")
        gc.collect()  # it leaves the file open
    return found


class Clock:
    """Time as the handler knows it, but that what it counts is told when a test says so."""

    perf_counter = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.told = threading.Semaphore(0)
        self.go = threading.Semaphore(0)

    def sleep(self, seconds: float) -> None:
        if seconds == etcl_handler.FLUSH_SECONDS:
            self.told.release()
            self.go.acquire()  # after the test for ever: the thread ends with the process


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(etcl_handler, "time", made)
    return made


def lines(caplog: pytest.LogCaptureFixture) -> Counter[str]:
    """What TorchServe's metrics wrote since the last time: `name{labels}` and the sum."""
    found: Counter[str] = Counter()
    for record in caplog.records:
        row = re.match(r"\[METRICS\](\w+)\.\w+:([\d.]+)\|#(.*)\|#type:(\w+)\|", record.getMessage())
        if row:
            found[f"{row[1]}{{{row[3]}}}"] += int(row[2])
    caplog.clear()
    return found


@pytest.mark.parametrize("declared", [True, False])
def test_what_is_counted_is_told_once(
    learned: Learned, tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, declared: bool
) -> None:
    """Sums since the last time, to TorchServe's own metrics, whether it has read metrics.yaml or not."""
    caplog.set_level("INFO", "ts.metrics.caching_metric")
    metrics = server_metrics()
    if declared:
        metrics.initialize_cache()
    handler = handler_for(learned, tmp_path, metrics, pinned=["turned"])
    assert clock.told.acquire(timeout=60)
    worker, size = f"{{worker:{os.getpid()}}}", handler.describe_handle()["cache"]["bytes"]
    begun = lines(caplog)
    bundle = load_bundle(tmp_path / "bundle.etcl")
    for name in bundle.tasks:
        assert begun[f"etcl_task_bytes{{task:{name}}}"] == sum(bundle.bytes_of(name).values())
    assert begun[f"etcl_tasks{worker}"] == 5 and begun[f"etcl_tasks_ready{worker}"] == 1
    assert begun[f"etcl_cache_bytes{worker}"] == size > 0
    assert begun[f"etcl_cache_misses_total{worker}"] == 1
    assert begun["etcl_stage_microseconds_total{task:turned,stage:materialize}"] > 0
    image = png(learned.tasks[0].test_x[0])
    asked = [{"x-etcl-task": name} for name in ("turned", "turned", "parity", "nobody")]
    answers(handler, context_for(tmp_path, asked), [image] * 4)
    clock.go.release()
    assert clock.told.acquire(timeout=60)
    found = lines(caplog)
    assert found["etcl_requests_total{task:turned}"] == found["etcl_items_total{task:turned}"] == 2
    assert found["etcl_requests_total{task:parity}"] == found["etcl_errors_total{code:unknown_task}"] == 1
    assert found[f"etcl_cache_hits_total{worker}"] == found[f"etcl_cache_misses_total{worker}"] == 1
    assert found["etcl_stage_microseconds_total{task:parity,stage:infer}"] > 0
    assert found[f"etcl_tasks_ready{worker}"] == 2
    clock.go.release()
    assert clock.told.acquire(timeout=60)
    assert set(lines(caplog)) == {f"etcl_tasks_ready{worker}", f"etcl_cache_bytes{worker}"}, "nothing happened since"


def test_only_tasks_with_a_series_of_their_own_have_bytes(
    learned: Learned,
    tmp_path: Path,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rest would overwrite each other under one name."""
    monkeypatch.setattr(meter, "MOST_TASKS", 2)
    caplog.set_level("INFO", "ts.metrics.caching_metric")
    handler_for(learned, tmp_path, server_metrics())
    assert clock.told.acquire(timeout=60)
    told = [name for name in lines(caplog) if name.startswith("etcl_task_bytes")]
    assert told == ["etcl_task_bytes{task:upright-a}", "etcl_task_bytes{task:upright-b}"]
