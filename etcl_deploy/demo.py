"""The whole loop on data that ships with a dependency: learn, bundle, serve over real HTTP, export, compare."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch

from etcl_deploy.bundle import bundle as bundles
from etcl_deploy.bundle.summary import separate_bytes
from etcl_deploy.core.pixels import png
from etcl_deploy.core.task import Task, load
from etcl_deploy.export.parity import session
from etcl_deploy.export.to_mar import archive
from etcl_deploy.export.to_onnx import export_task
from etcl_deploy.learn.events import Report
from etcl_deploy.learn.trainer import predict
from etcl_deploy.runs.session import Session, hearing, train
from etcl_deploy.runs.task_loading import find_tasks
from etcl_deploy.runs.to_bundle import bundle_run
from etcl_deploy.runtime.predictor import Predictor
from etcl_deploy.serve.process import serving
from etcl_deploy.serve.properties import any_free_port
from etcl_deploy.serve.server import Server
from etcl_deploy.settings import load_recipe

MODEL = "demo"

Classes = dict[str, list[int]]  # task -> the class chosen for each test item


@dataclass(frozen=True)
class DemoTask:
    """One row of the demo's table: accuracy then and now, and for how many items each way agrees with the network."""

    name: str
    after_learning: float | None
    at_end: float | None
    items: int
    same: dict[str, int]

    @property
    def agree(self) -> bool:
        """All four ways chose the same class for every item."""
        return all(count == self.items for count in self.same.values())


@dataclass(frozen=True)
class DemoResult:
    """The result of the demo."""

    tasks: tuple[DemoTask, ...]
    bundle: int
    separate: int
    largest_batch: int
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """The document that `etcl demo --json` prints."""
        return {
            "tasks": [{**asdict(task), "agree": task.agree} for task in self.tasks],
            "bytes": {"bundle": self.bundle, "separate": self.separate},
            "largest_batch": self.largest_batch,
            "seconds": self.seconds,
        }


def run_demo(workdir: Path, report: Report, stage: Callable[[str], None]) -> DemoResult:
    """Do everything once, in `workdir`; `stage` hears what is going on. No process is left behind."""
    started = time.monotonic()
    with hearing((signal.SIGTERM, signal.SIGHUP), _interrupt):
        config = load_recipe("digits")
        found = find_tasks(config, None)
        stored = train(config, workdir / "run", session=Session(report=report), tasks=found)
        tasks, run = found.tasks, stored.run
        stage("bundling")
        path = workdir / f"{MODEL}.etcl"
        bundle_run(stored, path)
        bundle = bundles.load_bundle(path)
        network = {t.name: predict(run.network, t.name, t.test_x).argmax(1).tolist() for t in tasks}
        ways = {"Predictor": _ask_predictor(Predictor(bundle), tasks)}
        stage("building the archive and starting TorchServe")
        archive(path, MODEL, workdir / "model_store")
        with serving(MODEL, workdir / "model_store", any_free_port()) as server:
            stage("asking TorchServe over HTTP")
            ways["TorchServe"] = _ask_server(server, tasks)
            largest_batch = server.describe(customized=True)["customizedMetadata"]["batches"]["largest"]
        stage("exporting to ONNX")
        ways["ONNX"] = {t.name: _ask_onnx(bundle, t, workdir / f"{t.name}.onnx") for t in tasks}
    rows = tuple(
        DemoTask(
            task.name,
            run.matrix[i][i],
            run.matrix[-1][i],
            len(task.test_y),
            {way: _same(classes[task.name], network[task.name]) for way, classes in ways.items()},
        )
        for i, task in enumerate(tasks)
    )
    seconds = time.monotonic() - started
    return DemoResult(rows, path.stat().st_size, separate_bytes(bundle), largest_batch, seconds)


def _same(classes: list[int], expected: list[int]) -> int:
    return sum(a == b for a, b in zip(classes, expected, strict=True))


def _ask_predictor(predictor: Predictor, tasks: list[Task]) -> Classes:
    return {
        task.name: [
            answer.index for answer in predictor.predict(list(load(task.test_x)), [task.name] * len(task.test_x))
        ]
        for task in tasks
    }


def _ask_server(server: Server, tasks: list[Task]) -> Classes:
    """Every test item of every task as a PNG, tasks taking turns so that they share batches."""
    queues = [[(task.name, image) for image in load(task.test_x)] for task in tasks]
    mixed = [item for item in chain(*zip_longest(*queues)) if item is not None]

    classes: Classes = {task.name: [] for task in tasks}
    with server.client() as client:
        answers = client.predict_many([png(image) for _, image in mixed], [name for name, _ in mixed])
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
        classes[answer.task].append(answer.index)
    return classes


def _ask_onnx(bundle: bundles.Bundle, task: Task, path: Path) -> list[int]:
    images = load(task.test_x)
    export_task(bundle, task.name, path, images)
    _, logits = session(path).run(None, {"image": images.numpy()})
    return torch.from_numpy(logits).argmax(1).tolist()


def _interrupt(number: int, frame: object) -> None:
    """Turn a polite request to end into an exception, so that the server is stopped on the way out."""
    raise KeyboardInterrupt
