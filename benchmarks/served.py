"""For benchmarks of serving: a bundle made up for them, mixes of tasks, a server, a load from another process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import load
import numpy as np
import psutil
import torch
from torch import Tensor

from etcl_deploy.bundle.bundle import Bundle, BundledTask
from etcl_deploy.bundle.layout import Layout
from etcl_deploy.bundle.precision import reduced_head
from etcl_deploy.core.pixels import png
from etcl_deploy.core.preprocessing import Preprocessing
from etcl_deploy.export.to_mar import archive
from etcl_deploy.network.backbones import BACKBONES
from etcl_deploy.serve.process import serving
from etcl_deploy.serve.properties import any_free_port
from etcl_deploy.serve.server import Server
from etcl_deploy.serve.start import ServeOptions

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


@contextmanager
def served(bundle: Path, name: str, store: Path, **options: Any) -> Iterator[Server]:
    """A server with the bundle, as `etcl serve` starts it with these options."""
    settings = ServeOptions(**options).settings()
    archive(bundle, name, store, settings)
    with serving(name, store, any_free_port(), settings["minWorkers"]) as server:
        yield server


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
    workers = []
    for child in process.children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            if "model_service_worker" in " ".join(child.cmdline()):
                workers.append(child)
    return workers


def pss(process: psutil.Process) -> int:
    """Bytes a process takes, with its share of what it shares."""
    return int(process.memory_full_info().pss)
