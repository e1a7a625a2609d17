"""How small masks and bundles are, and how fast a task is decoded (B1, B2, B3), on runs that were really learned.

    python benchmarks/bundle_size.py --work DIR         learns what DIR does not hold yet (two hours on two cores)
    python benchmarks/bundle_size.py --work DIR --runs femnist1-0.4

B1: all that is coded of the masks, tables and headers included / the entropy of the model it is coded by, given
layers, owners and references. B2: the bundle / as many dense networks in fp32. B3: decoding one task / a dense forward
at batch 1 (torch, one thread), the median over the tasks. Beside them what others take for the same masks: one bit a
weight, zstd and lzma on these bits at their best, and Huffman codes of seven masks at once (as in Winning SubNetworks,
ICML 2022), with their tables, one table for all layers or one for each, whichever is smaller.
"""

from __future__ import annotations

import argparse
import heapq
import lzma
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import zstandard
from record import write_result

from etcl_deploy.bundle import coded, entropy
from etcl_deploy.bundle.bundle import Bundle, load_bundle
from etcl_deploy.bundle.masks import CodedMasks
from etcl_deploy.bundle.summary import summarize
from etcl_deploy.deploy import bundle_run
from etcl_deploy.learn.directory import load
from etcl_deploy.runtime.subnet import materialize
from etcl_deploy.settings import load_recipe
from etcl_deploy.train import resume, train

DENSITIES = {"femnist1": (0.1, 0.2, 0.4, 0.5), "pmnist": (0.1, 0.2, 0.4)}
CHANGED: dict[str, dict[str, object]] = {"femnist1": {"epochs": 10, "learning_rate": 0.001}, "pmnist": {"epochs": 2}}
RUNS = [f"{recipe}-{density}" for recipe, densities in DENSITIES.items() for density in densities]


def learned(name: str, work: Path, say: Callable[[str], None]) -> Path:
    """The directory of a run, learned first if it is not there."""
    recipe, _, density = name.rpartition("-")
    directory = work / name
    config = load_recipe(recipe).with_values({**CHANGED[recipe], "density": float(density)})
    if not directory.exists():
        say(f"learning {name} ...")
        train(config, None, directory, "cpu", lambda event: None)
    elif load(directory, finished=False).waiting:
        resume(directory, "cpu", lambda event: None)
    return directory


def entropy_of(masks: Sequence[np.ndarray], references: Sequence[int | None], layers: Sequence[int]) -> float:
    """Bytes that the model needs for these masks if nothing is lost: for what is claimed, by layer; for what is used
    again, by layer, age of the owner and the reference."""
    owners = coded.Owners.of(masks, layers)
    layer = np.repeat(np.arange(len(layers)), layers)
    bits = 0.0
    for task, mask in enumerate(masks):
        free = owners.owner >= task
        bits += _entropy(layer[free], (owners.owner == task)[free])
        other = references[task]
        seen = np.zeros(len(mask), np.int64) if other is None else masks[other].astype(np.int64)
        doubled = np.frexp(np.maximum(task - owners.owner.astype(np.int64), 1))[1]
        bits += _entropy(((layer * 2 + seen) * 32 + doubled)[~free], mask[~free])
    return bits / 8


def _entropy(context: np.ndarray, bits: np.ndarray) -> float:
    sizes = np.bincount(context)
    return entropy.cost(np.bincount(context, weights=bits, minlength=len(sizes)), sizes)


def huffman(masks: Sequence[np.ndarray], layers: Sequence[int]) -> int:
    """Bytes of Huffman codes of up to seven masks at once, with a byte for every code length in the tables."""
    total = 0
    edges = np.cumsum([0, *layers])
    for first in range(0, len(masks), 7):
        group = masks[first : first + 7]
        symbols = sum(mask.astype(np.int64) << place for place, mask in enumerate(group))
        assert isinstance(symbols, np.ndarray)
        whole = _huffman_bytes(symbols, 1 << len(group))
        by_layer = sum(_huffman_bytes(symbols[start:end], 1 << len(group)) for start, end in pairwise(edges))
        total += min(whole, by_layer)
    return total


def _huffman_bytes(symbols: np.ndarray, alphabet: int) -> int:
    heap = [int(count) for count in np.bincount(symbols) if count]
    heapq.heapify(heap)
    bits = len(symbols) if len(heap) == 1 else 0
    while len(heap) > 1:
        joined = heapq.heappop(heap) + heapq.heappop(heap)
        bits += joined
        heapq.heappush(heap, joined)
    return -(-bits // 8) + alphabet


def seconds(function: Callable[[], object], repeats: int = 7) -> float:
    """The median time of a call."""
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        found.append(time.perf_counter() - began)
    return median(found)


def decode_seconds(bundle: Bundle, name: str) -> float:
    """To get the mask of one task, the owners being known, those it refers to not."""
    number = list(bundle.tasks).index(name)
    masks = bundle.masks
    if not isinstance(masks, CodedMasks):
        return seconds(lambda: masks[number])
    _ = masks.owners.order, masks.owners.bounds

    def decode() -> None:
        masks.forget()
        _ = masks[number]

    return seconds(decode)


def measure(directory: Path, folder: Path) -> dict[str, Any]:
    """Everything of one run."""
    stored = load(directory)
    found: dict[str, Any] = {}
    bundles = {}
    for encoding in ("coded", "packed"):
        path = folder / f"{directory.name}-{encoding}.etcl"
        bundle_run(stored.run, stored.config, path, encoding)
        bundles[encoding] = load_bundle(path)
        info = summarize(bundles[encoding], path)
        found[encoding] = {"bytes": info["bytes"], "ratio": info["bytes"]["total"] / info["separate"]}
    small, large = bundles["coded"], bundles["packed"]
    layers = small.layout.layers
    masks = [large.masks[number].numpy() for number in range(len(large.tasks))]
    assert isinstance(small.masks, CodedMasks)
    bound = entropy_of(masks, small.masks.references, layers)
    bits = b"".join(np.packbits(mask, bitorder="little").tobytes() for mask in masks)
    ours = found["coded"]["bytes"]["masks"]
    image = torch.zeros(1, *small.preprocessing.shape, dtype=torch.uint8)
    with torch.inference_mode():
        subnet = materialize(large, next(iter(large.tasks)))
        forward = seconds(lambda: subnet(image), 50)
    times = {name: [decode_seconds(bundle, task) for task in bundle.tasks] for name, bundle in bundles.items()}
    return {
        "tasks": len(masks),
        "weights": small.layout.weight_count,
        "claimed": float(np.any(masks, axis=0).mean()),
        **found,
        "masks": {
            "coded": ours,
            "entropy": bound,
            "packed": len(bits),
            "zstd": len(zstandard.ZstdCompressor(level=22).compress(bits)),
            "lzma": len(lzma.compress(bits, preset=9 | lzma.PRESET_EXTREME)),
            "huffman": huffman(masks, layers),
        },
        "bits_per_weight": 8 * ours / len(masks) / small.layout.weight_count,
        "B1": ours / bound,
        "B2": found["coded"]["ratio"],
        "B3": {name: median(own) / forward for name, own in times.items()},
        "forward_ms": 1000 * forward,
    }


def main(say: Callable[[str], None]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="where runs and bundles are kept")
    parser.add_argument("--runs", nargs="+", default=RUNS)
    arguments = parser.parse_args()
    directories = {name: learned(name, arguments.work, say) for name in arguments.runs}
    torch.set_num_threads(1)
    results = {}
    for name, directory in directories.items():
        results[name] = row = measure(directory, arguments.work)
        sizes = ", ".join(f"{kind} {size / 1e3:.0f} kB" for kind, size in row["masks"].items())
        say(
            f"{name}: B1 {row['B1']:.4f}  B2 {row['B2']:.3f}  B3 coded {row['B3']['coded']:.2f}, packed "
            f"{row['B3']['packed']:.2f}  {row['bits_per_weight']:.3f} bits a weight and task  ({sizes})"
        )
    if set(results) == set(RUNS):
        write_result("bundle_size", ["B1", "B2", "B3"], results, {"changed": CHANGED})


if __name__ == "__main__":
    main(partial(print, flush=True))
