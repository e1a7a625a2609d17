"""The engines that run a task's network: torch, or onnxruntime where it is there and faster."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from etcl_deploy.bundle.bundle import Bundle
from etcl_deploy.runtime.subnet import Subnet, materialize

logger = logging.getLogger(__name__)

ITEMS = 8  # images that engines are compared on
ROUNDS = 9
CHOICE = "engine.txt"
MAX_RELATIVE_DIFFERENCE = 1e-4
BATCH_SIZE = 64  # items in one pass through a network


class Engine(Protocol):
    """Makes tasks ready, each with its `nbytes`, and runs them; `release` takes back one that is no longer used."""

    name: str
    bundle: Bundle

    def materialize(self, name: str) -> Any: ...
    def logits(self, ready: Any, pixels: Tensor) -> Tensor: ...
    def release(self, ready: Any) -> None: ...


class TorchEngine:
    """Networks of torch, on the CPU or a GPU."""

    def __init__(self, bundle: Bundle, device: str = "cpu") -> None:
        self.name = "torch" if device == "cpu" else f"torch ({device})"
        self.bundle = bundle
        self._device = device

    def materialize(self, name: str) -> Subnet:
        """A task made ready."""
        return materialize(self.bundle, name, self._device)

    @torch.inference_mode()
    def logits(self, ready: Subnet, pixels: Tensor) -> Tensor:
        """Logits of prepared images; memory does not grow with their number."""
        parts = torch.split(pixels, BATCH_SIZE)
        return torch.cat([ready(part.to(self._device)).cpu() for part in parts])

    def release(self, ready: Subnet) -> None:
        """Nothing: its memory goes with it."""


def choose_engine(bundle: Bundle, directory: Path | None = None) -> Engine:
    """The fastest engine here of those that answer like torch.

    Processes with the same `directory` share files in it and take the engine that the first of them chose. So their
    answers are the same to the bit, even if one of them starts while the machine is busy.
    """
    torch_engine = TorchEngine(bundle)
    name = next(iter(bundle.tasks))
    pixels = _images(bundle)
    expected = torch_engine.logits(torch_engine.materialize(name), pixels)
    usable: dict[str, tuple[float, Engine]] = {}
    for make in _makers(bundle, directory, torch_engine):
        try:
            engine = make()
            ready = engine.materialize(name)
            answers = engine.logits(ready, pixels)
        except Exception as error:  # any fault of one engine leaves another
            logger.warning("an engine is not used: %s: %s", type(error).__name__, error)
            continue
        if engine is not torch_engine and not agree(answers, expected):
            logger.warning("%s is not used: it does not answer like torch", engine.name)
            continue
        usable[engine.name] = seconds_of(engine, ready, pixels[:1]), engine
        engine.release(ready)
    best = min(usable, key=lambda name: usable[name][0])
    if directory is not None:
        agreed = _agreed(directory / CHOICE, best)
        best = agreed if agreed in usable else best
    listed = ", ".join(f"{name} {1000 * seconds:.2f} ms" for name, (seconds, _) in usable.items())
    logger.info("engine: %s (one image: %s)", best, listed)
    return usable[best][1]


def _agreed(path: Path, choice: str) -> str:
    """The choice of the first process, in a file; `choice`, where this process is the first."""
    own = path.with_name(f".{path.name}-{os.getpid()}")
    own.write_text(choice)
    with suppress(FileExistsError):
        os.link(own, path)  # never half written, and only if there is none
    own.unlink()
    return path.read_text()


def agree(answers: Tensor, expected: Tensor) -> bool:
    """Whether logits are the same but for rounding."""
    return relative_difference(answers, expected) <= MAX_RELATIVE_DIFFERENCE


def relative_difference(answers: Tensor, expected: Tensor) -> float:
    """The largest error of a logit, relative to the largest expected logit of its item; nan if a logit is nan."""
    scale = expected.abs().amax(1, keepdim=True).clamp_min(1e-6)
    return float(((answers - expected).abs() / scale).max())


def _makers(bundle: Bundle, directory: Path | None, torch_engine: TorchEngine) -> list[Callable[[], Engine]]:
    def onnx_engine() -> Engine:
        from etcl_deploy.runtime.onnx_engine import OnnxEngine  # a server may lack onnx and onnxruntime

        return OnnxEngine(bundle, directory)

    makers: list[Callable[[], Engine]] = [lambda: torch_engine, onnx_engine]
    if torch.cuda.is_available():
        makers.append(lambda: TorchEngine(bundle, "cuda"))
    return makers


def trim_memory() -> None:
    """Give memory that comparing engines took back to the system, where the C library is one that keeps it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _images(bundle: Bundle) -> Tensor:
    """Images of noise, the same every time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (ITEMS, *bundle.preprocessing.shape), generator=generator, dtype=torch.uint8)


def seconds_of(engine: Engine, ready: Any, pixels: Tensor) -> float:
    """The least time an engine took for these images in a few rounds."""
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        engine.logits(ready, pixels)
        times.append(time.perf_counter() - began)
    return min(times)  # other work on the machine only adds to it
