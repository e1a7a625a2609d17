"""Tasks in onnxruntime: one graph for all of them, and for every task that is ready a buffer with its numbers."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from etcl_deploy.bundle.bundle import Bundle
from etcl_deploy.bundle.layout import split
from etcl_deploy.runtime.arrangement import FEATURES, EngineError, Place, arrange, open_session
from etcl_deploy.runtime.shared_table import TaskRow, open_table
from etcl_deploy.runtime.subnet import Folding, select

BLOCK_WEIGHTS = 1 << 18  # weights written together: few enough to be still in the processor's cache when read again
TILE = 512  # weights in a row that are multiplied by scales at once
MAX_TOGETHER = 8  # images that run together, where that changes no bit
MAX_WIDTH = 64  # output channels side by side in a block
BYTE_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.float32)


class Slot:
    """Room for the numbers of one task, bound to the graph's inputs once and for all."""

    def __init__(self, session: onnxruntime.InferenceSession, places: list[Place]) -> None:
        self.buffer = np.empty(sum(place.source.size for place in places), np.float32)
        self.binding: Any = session.io_binding()
        self.lock = threading.Lock()
        at = 0
        for place in places:
            part = self.buffer[at : at + place.source.size].reshape(place.shape)
            self.binding.bind_ortvalue_input(place.name, onnxruntime.OrtValue.ortvalue_from_numpy(part))
            at += place.source.size


@dataclass(frozen=True)
class Filled:
    """A task that is ready: the slot that holds its numbers, and its head."""

    slot: Slot
    head: np.ndarray
    bias: np.ndarray | None

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return self.slot.buffer.nbytes + self.head.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass(frozen=True)
class WeightBlock:
    """Weights in the buffer that are scaled together: their place, as rows of tiles, and the place of their scales."""

    span: slice
    blocks: tuple[int, int, int]  # groups of output channels, tiles in each, numbers in a tile
    tiles: slice
    tile: tuple[int, int, int] | None  # None: the weights have no scale


class OnnxEngine:
    """Runs tasks on the CPU; `directory`, where given, holds what several processes share."""

    name = "onnxruntime"

    def __init__(self, bundle: Bundle, directory: Path | None = None) -> None:
        self.bundle = bundle
        self._folding = Folding.of(bundle.plan)
        layout = bundle.layout
        # The numbers of a task: the weights of its layers, then all others. Their shapes are those of any task.
        others = self._others(0)
        shapes = {f"{layer}.weight": layout.weights[layer] for layer in self._folding.chains}
        self._shapes = shapes | {name: tuple(tensor.shape) for name, tensor in others.items()}
        arrangement = arrange(self._folding.plan, bundle.preprocessing, self._shapes)
        self._session = open_session(arrangement.model, torch.get_num_threads())
        count = sum(prod(shape) for shape in shapes.values())
        large = [place for place in arrangement.places if place.source.max() < count]
        small = [place for place in arrangement.places if place.source.max() >= count]
        if any(((place.source >= 0) & (place.source < count)).any() for place in small):
            raise EngineError("onnxruntime put weights and other numbers into one tensor")
        self._places = [*large, *small]
        self._source = np.concatenate([place.source for place in large])
        rest = np.concatenate([np.empty(0, np.int32), *(place.source for place in small)])
        self._parts, self._tiles = self._make_parts(large)
        self._channels = sum(layout.weights[layer][0] for layer in self._folding.chains)
        # The numbers in a task's row: the scale of every channel, all numbers but the weights of layers, and a 0.
        self._rest = np.where(rest < 0, -1, rest - count + self._channels)
        few = self._channels + sum(tensor.numel() for tensor in others.values()) + 1
        content = f"{bundle.digest} {few}".encode() + arrangement.model + self._source.tobytes()
        key = hashlib.sha256(content).hexdigest()[:16]
        path = None if directory is None else directory / f"ready-{key}.bin"
        counts = len(self._source), few, len(bundle.tasks)
        self._table = open_table(path, counts, self._make_weights, self._make_row)
        self._lock = threading.Lock()
        self._free: list[Slot] = []
        self._together = self._find_together()

    def materialize(self, name: str) -> Filled:
        """A task made ready."""
        head = self.bundle.task(name).head_values()
        bias = head.get("bias")
        number = self.bundle.number(name)
        with self._lock:
            slot = self._free.pop() if self._free else Slot(self._session, self._places)
            self._fill(slot.buffer, self._table.masks[number], self._table.numbers[number])
        return Filled(slot, head["weight"].numpy(), None if bias is None else bias.numpy())

    def release(self, ready: Filled) -> None:
        """Take back the slot of a task that is no longer used."""
        with self._lock:
            self._free.append(ready.slot)

    def logits(self, ready: Filled, pixels: Tensor) -> Tensor:
        """Logits of prepared images; those of an image are the same to the bit, whatever other images are there."""
        logits = np.empty((len(pixels), len(ready.head)), np.float32)
        for first in range(0, len(pixels), self._together):
            part = pixels[first : first + self._together]
            for number, features in enumerate(self._features(ready.slot, part.numpy()), first):
                np.dot(ready.head, features, out=logits[number])  # one by one: a product of matrices rounds otherwise
        if ready.bias is not None:
            logits += ready.bias
        return torch.from_numpy(logits)

    def _features(self, slot: Slot, pixels: np.ndarray) -> np.ndarray:
        features = np.empty((len(pixels), self.bundle.plan.features), np.float32)
        with slot.lock:
            slot.binding.bind_cpu_input("image", pixels)
            slot.binding.bind_ortvalue_output(FEATURES, onnxruntime.OrtValue.ortvalue_from_numpy(features))
            self._session.run_with_iobinding(slot.binding)
        return features

    def _find_together(self) -> int:
        """How many images may run together. In networks of convolutions each gets the same bits as by itself, with
        linear layers it does not."""
        slot = self.materialize(next(iter(self.bundle.tasks))).slot
        shape = (MAX_TOGETHER, *self.bundle.preprocessing.shape)
        pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        alone = np.concatenate([self._features(slot, pixels[n : n + 1]) for n in range(MAX_TOGETHER)])
        same = all(
            np.array_equal(self._features(slot, pixels[:many]), alone[:many]) for many in range(2, MAX_TOGETHER + 1)
        )
        self._free.append(slot)
        return MAX_TOGETHER if same else 1

    def _fill(self, buffer: np.ndarray, bits: np.ndarray, numbers: np.ndarray) -> None:
        """Write a task's numbers: the weights it selects, times the scales of their channels; then all others."""
        # First the mask is written in the place of the weights, a byte as eight numbers, so that nothing has to be
        # converted. Weights are finite, so 0 times a weight is 0.
        count = len(self._source)
        whole = count - count % 8
        np.take(BYTE_BITS, bits[: whole // 8], axis=0, out=buffer[:whole].reshape(-1, 8), mode="wrap")
        buffer[whole:count] = BYTE_BITS[bits[whole // 8 :]].ravel()[: count - whole]
        tiles = numbers[self._tiles]
        for part in self._parts:
            weights = buffer[part.span]
            np.multiply(weights, self._table.weights[part.span], out=weights)
            if part.tile:
                rows = weights.reshape(part.blocks)
                np.multiply(rows, tiles[part.tiles].reshape(part.tile), out=rows)
        np.take(numbers, self._rest, out=buffer[count:], mode="wrap")

    def _make_weights(self) -> np.ndarray:
        """The backbone's weights in the order in which they lie in a buffer."""
        weights = split(self.bundle.weights, self.bundle.layout.weights)
        flat = [weights[layer].flatten() for layer in self._folding.chains]
        return self._laid_out(torch.cat(flat).numpy())

    def _make_row(self, number: int) -> TaskRow:
        """A task's mask in the order of the weights in a buffer, and its own numbers."""
        layout = self.bundle.layout
        masks = split(self.bundle.masks[number], layout.weights)
        flat = torch.cat([masks[layer].flatten() for layer in self._folding.chains])
        bits = np.packbits(self._laid_out(flat.numpy()), bitorder="little")
        scales = self._folding.scales(self._norms(number))
        ones = {layer: torch.ones(layout.weights[layer][0]) for layer in self._folding.chains}
        numbers = [*(ones | scales).values(), *self._others(number).values(), torch.zeros(1)]
        return TaskRow(bits, torch.cat([part.flatten() for part in numbers]).numpy())

    def _laid_out(self, flat: np.ndarray) -> np.ndarray:
        """Numbers of all weights in the order of a buffer, 0 where it has none of them."""
        ordered: np.ndarray = np.append(flat, np.zeros(1, flat.dtype))[self._source]
        return ordered

    def _norms(self, number: int) -> dict[str, Tensor]:
        task = [*self.bundle.tasks.values()][number]
        return split(task.norm, self.bundle.layout.norms)

    def _others(self, number: int) -> dict[str, Tensor]:
        """The numbers of a task that are no layer's weight."""
        bundle, layout = self.bundle, self.bundle.layout
        steps = [step for step in layout.weights if step not in self._folding.chains]
        selected = {}
        if steps:
            weights, masks = (split(flat, layout.weights) for flat in (bundle.weights, bundle.masks[number]))
            selected = {step: select(weights[step], masks[step]) for step in steps}
        return self._folding.others(selected, self._norms(number))

    def _make_parts(self, places: list[Place]) -> tuple[list[WeightBlock], np.ndarray]:
        """The blocks of weights that are scaled together, and the channel of every number in all tiles."""
        parts, channels, at, behind = [], [], 0, 0
        for place in places:
            layer, (groups, tiles, width), tile_channels = self._blocks(place)
            scaled = any(step.op == "norm" for step in self._folding.chains[layer])
            many = max(1, BLOCK_WEIGHTS // (tiles * width))
            for first in range(0, groups, many):
                own = tile_channels[first : first + many]
                span = slice(at, at + len(own) * tiles * width)
                tile = own.shape if scaled else None
                parts.append(WeightBlock(span, (len(own), tiles, width), slice(behind, behind + own.size), tile))
                channels.append(own.ravel())
                at, behind = span.stop, behind + own.size
        return parts, np.concatenate(channels)

    def _blocks(self, place: Place) -> tuple[str, tuple[int, int, int], np.ndarray]:
        """The layer of a weight, its shape as [groups, tiles, numbers], and the channels of a tile of each group.

        Output channels lie one after another, or side by side in blocks of some of them.
        """
        first, channel = 0, 0  # of the layer the weight belongs to
        for layer in self._folding.chains:
            shape = self.bundle.layout.weights[layer]
            if place.source.max() < first + prod(shape):
                break
            first, channel = first + prod(shape), channel + shape[0]
        known = place.source >= 0
        if place.source[known].min() < first:
            raise EngineError("onnxruntime put the weights of two layers into one tensor")
        of = (place.source - first) // prod(shape[1:])
        rows, size = place.shape[0], place.source.size
        for width in (width for width in range(1, MAX_WIDTH + 1) if rows % width == 0):
            repeated = size // rows
            expected = np.arange(rows).reshape(rows // width, 1, width)
            apart = of.reshape(rows // width, repeated, width)
            if ((apart == expected) | ~known.reshape(apart.shape)).all():
                break
        else:
            raise EngineError("onnxruntime laid out weights in an order without blocks of output channels")
        inside = channel + np.minimum(expected, shape[0] - 1)
        if width == 1:
            return layer, (rows, 1, repeated), inside
        many = max(n for n in range(1, max(1, TILE // width) + 1) if repeated % n == 0)
        return layer, (rows // width, repeated // many, width * many), np.tile(inside, (1, 1, many))
