"""What benchmarks of serving share: a bundle made up for them, mixes of tasks, a load from another process."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import load
import numpy as np
import psutil
import torch
from torch import Tensor

from etcl_deploy.bundle.bundle import Bundle, BundledTask
from etcl_deploy.bundle.layout import Layout, split
from etcl_deploy.bundle.precision import reduced_head
from etcl_deploy.core.operations import NORMS, apply_weight, normalize
from etcl_deploy.core.pixels import png
from etcl_deploy.core.plan import Step
from etcl_deploy.core.preprocessing import Preprocessing
from etcl_deploy.network.backbones import BACKBONES
from etcl_deploy.serve.server import Server

CLASSES = tuple(f"class {number}" for number in range(10))
SIDE = 32
MIXES = ("identical", "zipf", "uniform", "distinct")
IMAGES = 50


class MadeMasks:
    """Masks of 0.4 of the weights, drawn when they are asked for: ten thousand of them fit nowhere."""

    def __init__(self, weights: int, seed: int) -> None:
        self._weights = weights
        self._seed = seed

    def __getitem__(self, number: int) -> Tensor:
        chance = np.random.default_rng([self._seed, number])
        return torch.from_numpy(chance.random(self._weights, dtype=np.float32) < 0.4)


def made_bundle(tasks: int, seed: int = 0, precision: str = "fp32") -> Bundle:
    """resnet18 of width 20 with so many tasks of ten classes; nothing was learned, everything is there."""
    chance = torch.Generator().manual_seed(seed)
    plan = BACKBONES["resnet18"]((3, SIDE, SIDE), 20)
    layout = Layout(plan)
    weights = torch.randn(layout.weight_count, generator=chance) / 8
    made = {}
    for number in range(tasks):
        name = f"task-{number}"
        head = {key: torch.randn(shape, generator=chance) / 8 for key, shape in plan.head_shapes(len(CLASSES)).items()}
        norm = torch.rand(layout.norm_count, generator=chance) / 2 + 0.25
        made[name] = BundledTask(name, CLASSES, 0.4, 90.0, 90.0, norm, reduced_head(head, precision))
    stored = weights if precision == "fp32" else weights.half()
    about = {"made": "up"}
    preprocessing = Preprocessing(SIDE, SIDE, 3)
    return Bundle("resnet18", plan, preprocessing, stored, None, made, MadeMasks(layout.weight_count, seed), about)


def write_made(path: Path, tasks: int, seed: int = 0, precision: str = "fp32") -> Path:
    """The file of such a bundle."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(made_bundle(tasks, seed, precision).to_bytes("packed"))
    return path


def images(count: int = IMAGES) -> list[Tensor]:
    """Prepared images: smooth shapes with noise."""
    chance = torch.Generator().manual_seed(1)
    coarse = torch.rand(count, 3, 4, 4, generator=chance)
    smooth = torch.nn.functional.interpolate(coarse, (SIDE, SIDE), mode="bilinear")
    noisy = 255 * (0.8 * smooth + 0.2 * torch.rand(count, 3, SIDE, SIDE, generator=chance))
    return list(noisy.to(torch.uint8).permute(0, 2, 3, 1).contiguous())


def order_of(mix: str, count: int, tasks: int, seed: int = 0) -> list[int]:
    """Which task each request is for."""
    chance = np.random.default_rng(seed)
    if mix == "identical":
        return [0] * count
    if mix == "distinct":  # none twice in a row of all tasks
        rounds = [chance.permutation(tasks) for _ in range(-(-count // tasks))]
        return np.concatenate(rounds)[:count].tolist()
    shares = 1 / np.arange(1, tasks + 1) if mix == "zipf" else np.ones(tasks)
    return chance.choice(tasks, count, p=shares / shares.sum()).tolist()


def requests_for(server: Server, tasks: Iterable[int], first: int = 0) -> list[bytes]:
    """A request for each task, with images in turn from `first` on."""
    files = [png(image) for image in images()]
    path = f"/predictions/{server.name}"
    token = server.token()
    return [
        load.request(
            path, files[(task + first) % IMAGES], token, {"X-ETCL-Task": f"task-{task}", "Content-Type": "image/png"}
        )
        for task in tasks
    ]


def apply_load(
    server: Server, requests: Sequence[bytes], order: Sequence[int], connections: int, seconds: float = 1e9
) -> load.Load:
    """Send requests in an order from another process."""
    return load.measure_apart(server.port, requests, order, connections, seconds)


def workers_of(server: Server) -> list[psutil.Process]:
    """The processes that answer."""
    process = server.process()
    assert process is not None
    found = []
    for child in process.children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            if "model_service_worker" in " ".join(child.cmdline()):
                found.append(child)
    return found


def pss(process: psutil.Process) -> int:
    """Bytes a process takes, with its share of what it shares."""
    return int(process.memory_full_info().pss)


def metrics(server: Server) -> dict[str, float]:
    """All metrics by name and labels, as Prometheus reads them."""
    import httpx

    time.sleep(6)  # the handler tells every five seconds what it counted
    text = httpx.get(server.metrics_url, trust_env=False).text
    rows = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in rows}


def show(**figures: Any) -> str:
    """Figures in one line."""
    return "  ".join(f"{key} {json.dumps(value)}" for key, value in figures.items())


def plain_scores(bundle: Bundle, name: str, pixels: Tensor) -> Tensor:
    """Probabilities from a plain masked network, computed apart: weight times mask, normalization as a step."""
    layout, task = bundle.layout, bundle.task(name)
    weights = split(bundle.weights * bundle.mask(name), layout.weights)
    norms = split(task.norm, layout.norms)

    def apply(step: Step, x: Tensor) -> Tensor:
        if step.op in NORMS:
            return normalize(step.op, step.settings, x, *norms[step.name])
        return apply_weight(step.op, step.settings, x, weights[step.name])

    features = bundle.plan.run(bundle.preprocessing.normalize(pixels), apply)
    head = task.head_values()
    return torch.nn.functional.linear(features, head["weight"], head.get("bias")).softmax(1)
