"""What the handler makes of TorchServe's calls, with TorchServe's own context; test_serve.py asks it over HTTP."""

from __future__ import annotations

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
import yaml
from conftest import ROOT, Learned
from ts.context import Context, RequestProcessor
from ts.metrics.metric_cache_yaml_impl import MetricsCacheYamlImpl

from etcl_deploy.bundle.bundle import load_bundle
from etcl_deploy.core.pixels import png
from etcl_deploy.handlers.etcl_handler import EtclHandler
from etcl_deploy.runtime import counters


def handler_for(learned: Learned, directory: Path, metrics: Any = None, **settings: Any) -> EtclHandler:
    shutil.copy(learned.path, directory / "bundle.etcl")
    handler = EtclHandler()
    context = context_for(directory, [])
    context.metrics, context.model_yaml_config = metrics, {"etcl": settings} if settings else None
    handler.initialize(context)
    return handler


def context_for(directory: Path, headers: list[dict[str, str]]) -> Context:
    """What TorchServe would pass for a batch of requests with these headers."""
    context = Context("m", str(directory), {"model": {"serializedFile": "bundle.etcl"}}, 8, None, "0.12.0")
    context.request_processor = [RequestProcessor(header) for header in headers]
    return context


def test_every_request_has_its_own_body_and_status(learned: Learned, tmp_path: Path) -> None:
    """Set for each by its place in the batch; one that is answered keeps TorchServe's own."""
    handler = handler_for(learned, tmp_path)
    context = context_for(tmp_path, [{"x-etcl-task": "nobody"}, {"x-etcl-task": "parity"}])
    bodies = handler.handle([{"body": bytearray(png(learned.tasks[0].test_x[0]))}] * 2, context)
    assert [context.get_response_status(place) for place in (0, 1)] == [(404, "Not Found"), (200, None)]
    types = [context.get_response_headers(place)["content-type"] for place in (0, 1)]
    assert types == ["application/json", "application/json"]
    assert json.loads(bodies[0])["error"]["code"] == "unknown_task" and json.loads(bodies[1])["task"] == "parity"


def test_every_metric_is_declared() -> None:
    """With the same unit and dimensions: TorchServe drops what its file does not name."""
    declared = yaml.safe_load((ROOT / "handlers" / "metrics.yaml").read_text())["model_metrics"]
    for kind, ours in (("counter", counters.COUNTERS), ("gauge", counters.GAUGES)):
        found = {row["name"]: (row["unit"], row["dimensions"]) for row in declared[kind] if "etcl" in row["name"]}
        assert found == ours


def server_metrics() -> MetricsCacheYamlImpl:
    """What TorchServe makes of our file, nothing of it declared yet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        found = MetricsCacheYamlImpl(ROOT / "handlers" / "metrics.yaml")
        gc.collect()  # it leaves the file open
    return found


class Clock:
    """Time, but that the next report comes when a test says so."""

    perf_counter = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.reported = threading.Semaphore(0)
        self.go = threading.Semaphore(0)

    def sleep(self, seconds: float) -> None:
        if seconds == counters.REPORT_SECONDS:
            self.reported.release()
            self.go.acquire()  # after the test for ever: the thread ends with the process


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(counters, "time", made)
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
def test_what_is_counted_is_reported_once(
    learned: Learned, tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, declared: bool
) -> None:
    """Sums since the last time, to TorchServe's own metrics, whether it has read metrics.yaml or not."""
    caplog.set_level("INFO", "ts.metrics.caching_metric")
    metrics = server_metrics()
    if declared:
        metrics.initialize_cache()
    handler = handler_for(learned, tmp_path, metrics, pinned=["turned"])
    assert handler.service and clock.reported.acquire(timeout=60)
    worker, size = f"{{worker:{os.getpid()}}}", handler.service.describe().cache["bytes"]
    begun = lines(caplog)
    bundle = load_bundle(tmp_path / "bundle.etcl")
    for name in bundle.tasks:
        assert begun[f"etcl_task_bytes{{task:{name}}}"] == sum(bundle.bytes_of(name).values())
    assert begun[f"etcl_tasks{worker}"] == 5 and begun[f"etcl_tasks_ready{worker}"] == 1
    assert begun[f"etcl_cache_bytes{worker}"] == size > 0
    assert begun[f"etcl_cache_misses_total{worker}"] == 1
    assert begun["etcl_stage_microseconds_total{task:turned,stage:materialize}"] > 0
    asked = [{"x-etcl-task": name} for name in ("turned", "turned", "parity", "nobody")]
    handler.handle([{"body": png(learned.tasks[0].test_x[0])}] * 4, context_for(tmp_path, asked))
    clock.go.release()
    assert clock.reported.acquire(timeout=60)
    found = lines(caplog)
    assert found["etcl_requests_total{task:turned}"] == found["etcl_items_total{task:turned}"] == 2
    assert found["etcl_requests_total{task:parity}"] == found["etcl_errors_total{code:unknown_task}"] == 1
    assert found[f"etcl_cache_hits_total{worker}"] == found[f"etcl_cache_misses_total{worker}"] == 1
    assert found["etcl_stage_microseconds_total{task:parity,stage:infer}"] > 0
    assert found[f"etcl_tasks_ready{worker}"] == 2
    clock.go.release()
    assert clock.reported.acquire(timeout=60)
    assert set(lines(caplog)) == {f"etcl_tasks_ready{worker}", f"etcl_cache_bytes{worker}"}, "nothing happened since"
