"""Predictor: a mixed batch of (image, task) to answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from etcl_deploy.bundle.bundle import Bundle
from etcl_deploy.core.pictures import MAX_PIXELS
from etcl_deploy.core.pixels import ImageInput, prepare
from etcl_deploy.core.prediction import Prediction
from etcl_deploy.errors import BundleError
from etcl_deploy.runtime.cache import Cache, CacheState
from etcl_deploy.runtime.engine import Engine, TorchEngine

DEFAULT_CACHE_BYTES = 512_000_000

Observer = Callable[[str, str, float], None]  # task, stage, seconds


class Predictor:
    """Answers for every task of a bundle; keeps recently used tasks ready within `cache_bytes`.

    May be used from several threads at once. An answer does not depend on the other items of its batch. `engine` is
    torch unless another is given (`etcl_deploy.runtime.engine.choose_engine` finds the fastest here); `observe` is
    called with the seconds each task took in the stages `materialize` and `infer`.
    """

    def __init__(
        self,
        bundle: Bundle,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        engine: Engine | None = None,
        observe: Observer = lambda task, stage, seconds: None,
    ) -> None:
        self.bundle = bundle
        self.engine = engine or TorchEngine(bundle)
        self._observe = observe
        self._cache = Cache(cache_bytes, self._materialize, self.engine.release)

    def prepare(self, source: ImageInput, max_pixels: int = MAX_PIXELS) -> Tensor:
        """The pixels the network takes, from an image. Raises InputError if it is no image or too large."""
        return prepare(source, self.bundle.preprocessing, max_pixels)

    def predict(self, inputs: Sequence[ImageInput], tasks: Sequence[str]) -> list[Prediction]:
        """One answer per input, in order; `tasks` names the task of each."""
        if len(inputs) != len(tasks):
            raise ValueError(f"{len(inputs)} inputs and {len(tasks)} tasks: each needs one")
        for name in tasks:  # before the work of decoding
            self.bundle.task(name)
        return self.answer([self.prepare(source) for source in inputs], tasks)

    def answer(self, pixels: Sequence[Tensor], tasks: Sequence[str]) -> list[Prediction]:
        """One answer per image that `prepare` gave, in order; `tasks` names the task of each."""
        positions: dict[str, list[int]] = {}
        for position, name in enumerate(tasks):
            positions.setdefault(name, []).append(position)
        answers: dict[int, Prediction] = {}
        for name, members in positions.items():
            logits = self.logits(name, torch.stack([pixels[i] for i in members]))
            answers |= zip(members, self._explain(name, logits), strict=True)
        return [answers[i] for i in range(len(pixels))]

    def logits(self, name: str, pixels: Tensor) -> Tensor:
        """Logits of one task for prepared images, `[batch, classes]`; memory does not grow with the batch."""
        with self._cache.use(name) as ready:
            began = time.perf_counter()
            logits = self.engine.logits(ready, pixels)
            self._observe(name, "infer", time.perf_counter() - began)
        return logits

    def pin(self, name: str) -> None:
        """Keep a task ready until it is unpinned. Raises CacheError if the cache is too small for that."""
        self.bundle.task(name)
        self._cache.pin(name)

    def unpin(self, name: str) -> None:
        """Let a task leave the cache again."""
        self._cache.unpin(name)

    def prefetch(self, names: Iterable[str]) -> list[str]:
        """Make tasks ready in this order, as many as fit in the cache; gives the names of those that are ready."""
        wanted = list(names)
        for name in wanted:
            self.bundle.task(name)
        return self._cache.prefetch(wanted)

    def cache(self) -> CacheState:
        """The state of the cache."""
        return self._cache.state()

    def _materialize(self, name: str) -> Any:
        began = time.perf_counter()
        ready = self.engine.materialize(name)
        self._observe(name, "materialize", time.perf_counter() - began)
        return ready

    def _explain(self, name: str, logits: Tensor) -> list[Prediction]:
        classes = self.bundle.task(name).classes
        predictions = []
        for values, scores in zip(logits.tolist(), logits.softmax(1).tolist(), strict=True):
            if not isfinite(sum(scores)):
                raise BundleError(f"task {name!r} has no answer for this image: its numbers grow beyond all bounds")
            index = values.index(max(values))
            predictions.append(Prediction(name, classes[index], index, dict(zip(classes, scores, strict=True))))
        return predictions
