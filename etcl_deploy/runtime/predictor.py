"""Predictor: a mixed batch of (image, task) to answers."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from etcl_deploy.bundle.bundle import Bundle
from etcl_deploy.prediction import Prediction
from etcl_deploy.runtime.images import MAX_PIXELS, ImageInput, prepare
from etcl_deploy.runtime.subnet import Subnet, materialize

DEFAULT_CACHE_BYTES = 256 * 1024 * 1024
AT_ONCE = 64  # items in one pass through a network


class Predictor:
    """Answers for every task of a bundle; keeps recently used tasks ready within `cache_bytes`.

    May be used from several threads at once. An answer does not depend on the other items of its batch.
    """

    def __init__(self, bundle: Bundle, cache_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        self.bundle = bundle
        self.cache_bytes = cache_bytes
        self._cache: OrderedDict[str, Subnet] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self, source: ImageInput, max_pixels: int = MAX_PIXELS) -> Tensor:
        """The pixels the network takes, from an image. Raises InputError for what is not one, or too large."""
        return prepare(source, self.bundle.preprocessing, max_pixels)

    def predict(self, inputs: Sequence[ImageInput], tasks: Sequence[str]) -> list[Prediction]:
        """One answer per input, in order; `tasks` names the task of each."""
        if len(inputs) != len(tasks):
            raise ValueError(f"{len(inputs)} inputs and {len(tasks)} tasks: each needs one")
        positions: dict[str, list[int]] = {}
        for position, name in enumerate(tasks):
            self.bundle.task(name)
            positions.setdefault(name, []).append(position)
        pixels = [self.prepare(source) for source in inputs]
        answers: dict[int, Prediction] = {}
        for name, members in positions.items():
            logits = self.logits(name, torch.stack([pixels[i] for i in members]))
            answers |= zip(members, self._explain(name, logits), strict=True)
        return [answers[i] for i in range(len(inputs))]

    @torch.inference_mode()
    def logits(self, name: str, pixels: Tensor) -> Tensor:
        """Logits of one task for prepared images, `[batch, classes]`; memory does not grow with the batch."""
        subnet = self._subnet(name)
        return torch.cat([subnet(part) for part in torch.split(pixels, AT_ONCE)])

    def cached(self) -> dict[str, int]:
        """Bytes of each task that is ready, least recently used first."""
        with self._lock:
            return {name: subnet.nbytes for name, subnet in self._cache.items()}

    def _explain(self, name: str, logits: Tensor) -> list[Prediction]:
        classes = self.bundle.task(name).classes
        chosen = logits.argmax(1).tolist()
        return [
            Prediction(name, classes[index], index, dict(zip(classes, row, strict=True)))
            for index, row in zip(chosen, logits.softmax(1).tolist(), strict=True)
        ]

    def _subnet(self, name: str) -> Subnet:
        with self._lock:
            subnet = self._cache.pop(name, None) or materialize(self.bundle, name)
            self._cache[name] = subnet
            while len(self._cache) > 1 and self._cached_bytes() > self.cache_bytes:
                self._cache.popitem(last=False)
        return subnet

    def _cached_bytes(self) -> int:
        return sum(subnet.nbytes for subnet in self._cache.values())
