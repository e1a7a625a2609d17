"""How small masks and bundles are, and how fast a task is decoded (B1, B2, B3), on runs that were really learned.

    python benchmarks/bundle_size.py --work DIR         learns what DIR does not hold yet (two hours on two cores)
    python benchmarks/bundle_size.py --work DIR --runs femnist1-0.4

B1: all that is coded of the masks, tables and headers included / the entropy of the model it is coded by: given layer
and owners for what is claimed; given layer, age of the owner and reference for what is used again. B2: the bundle / as
many dense networks in fp32. B3: decoding one task (mask with all it refers to, normalization, head) / a dense forward
at batch 1 (torch, one thread), the median over tasks; the two are timed in turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from record import Figure, learned, new_parser, say, show, write_result

from etcl_deploy.bundle import float_coding as values
from etcl_deploy.bundle import format
from etcl_deploy.bundle.bundle import Bundle, load_bundle
from etcl_deploy.bundle.delta import write_delta
from etcl_deploy.bundle.mask_coding import WeightOwners
from etcl_deploy.bundle.masks import CodedMasks
from etcl_deploy.bundle.precision import PRECISIONS
from etcl_deploy.bundle.summary import summarize
from etcl_deploy.runs.store import StoredRun
from etcl_deploy.runs.task_loading import tasks_of
from etcl_deploy.runs.to_bundle import bundle_run
from etcl_deploy.runtime.subnet import materialize
from etcl_deploy.settings import load_recipe

SHORT = {"epochs": 10, "learning_rate": 0.001}  # of F-EMNIST-1: a third of the recipe's epochs
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "femnist1": ("femnist1", {}),
    **{f"femnist1-{density}": ("femnist1", {**SHORT, "density": density}) for density in (0.1, 0.2, 0.4, 0.5)},
    **{f"pmnist-{density}": ("pmnist", {"density": density}) for density in (0.1, 0.2, 0.4, 0.5)},
}
UPDATED, BEFORE = "femnist1-0.4", ("femnist1", {**SHORT, "density": 0.4, "tasks": 9})  # what a delta is measured on


def entropy_of(masks: Sequence[np.ndarray], references: Sequence[int | None], layers: Sequence[int]) -> float:
    """Bytes that the model needs for these masks if nothing is lost: for what is claimed, by layer; for where they
    differ from their references in what is used again, by layer and age of the owner."""
    owner = WeightOwners.of(masks, len(masks), layers).owner.astype(np.int64)
    layer = np.repeat(np.arange(len(layers)), layers)
    bits = 0.0
    for task, mask in enumerate(masks):
        free = owner >= task
        bits += _entropy(layer[free], (owner == task)[free])
        other = references[task]
        coded = mask if other is None else mask ^ masks[other]
        doubled = np.frexp(np.maximum(task - owner, 1))[1]
        bits += _entropy((layer * 32 + doubled)[~free], coded[~free])
    return bits / 8


def _entropy(context: np.ndarray, bits: np.ndarray) -> float:
    sizes = np.bincount(context)
    share = np.bincount(context, weights=bits, minlength=len(sizes)) / np.maximum(sizes, 1)
    logs = (p * np.log2(np.where(p > 0, p, 1)) for p in (share, 1 - share))
    return float(-(sizes * sum(logs)).sum())


def seconds(function: Callable[[], object]) -> float:
    """The time of a call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def decoding(path: Path) -> list[Callable[[], object]]:
    """For every task, a call that decodes it: the owners being known, the masks it refers to not."""
    bundle = load_bundle(path)
    _, sections, _ = format.from_bytes(path.read_bytes())
    masks = bundle.masks
    if isinstance(masks, CodedMasks):
        _ = masks.owners.order, masks.owners.bounds

    def decode(number: int) -> None:
        if isinstance(masks, CodedMasks):
            masks._ready.clear()
            for name, section in sections.items():
                if name.startswith((f"task/{number}/norm", f"task/{number}/head")):
                    values.decode(section.numpy().data, torch.float32, range(1 << 30))
        _ = masks[number]

    return [partial(decode, number) for number in range(len(bundle.tasks))]


def times(bundle: Bundle, paths: dict[str, Path], rounds: int = 15) -> dict[str, Any]:
    """B3, in milliseconds and as a ratio."""
    image = torch.zeros(1, *bundle.preprocessing.shape, dtype=torch.uint8)
    subnet = materialize(bundle, next(iter(bundle.tasks)))
    decoders = {name: decoding(path) for name, path in paths.items()}
    forward: list[float] = []
    decode_times: dict[str, list[list[float]]] = {name: [] for name in decoders}
    with torch.inference_mode():
        for _ in range(rounds):
            forward += [seconds(lambda: subnet(image)) for _ in range(10)]
            for name, calls in decoders.items():
                decode_times[name].append([seconds(call) for call in calls])
    decoded = {name: median(map(median, zip(*rows, strict=True))) for name, rows in decode_times.items()}
    return {
        "forward_ms": 1000 * median(forward),
        "decode_ms": {name: 1000 * value for name, value in decoded.items()},
        "B3": {name: value / median(forward) for name, value in decoded.items()},
    }


def measure(run: str, stored: StoredRun, folder: Path) -> dict[str, Any]:
    """Everything of one run."""
    tests = {task.name: task.test for task in tasks_of(stored, lambda line: None, None)}
    bundles: dict[str, Any] = {}
    paths = {}
    for encoding, precision in [("coded", precision) for precision in PRECISIONS] + [("packed", "fp32")]:
        name = f"{encoding}-{precision}"
        path = paths[name] = folder / f"{run}-{name}.etcl"
        bundle_run(stored, path, encoding, precision, tests)
        info = summarize(load_bundle(path), path)
        accuracy = fmean(task["accuracy"] for task in info["tasks"])
        bundles[name] = {
            "bytes": info["bytes"],
            "ratio": info["bytes"]["total"] / info["separate"],
            "accuracy": accuracy,
        }
    small, large = load_bundle(paths["coded-fp32"]), load_bundle(paths["packed-fp32"])
    layers = small.layout.layers
    masks = [large.masks[number].numpy() for number in range(len(large.tasks))]
    assert isinstance(small.masks, CodedMasks)
    bound = entropy_of(masks, small.masks.references, layers)
    ours = bundles["coded-fp32"]["bytes"]["masks"]
    return {
        "config": stored.config.as_json(),
        "tasks": len(masks),
        "weights": small.layout.weight_count,
        "claimed": float(np.any(masks, axis=0).mean()),
        "bundles": bundles,
        "masks": {
            "coded": ours,
            "entropy": bound,
            "packed": sum(-(-len(mask) // 8) for mask in masks),
        },
        "bits_per_weight": 8 * ours / len(masks) / small.layout.weight_count,
        "B1": ours / bound,
        "B2": bundles["coded-fp32"]["ratio"],
        **times(large, {name.removesuffix("-fp32"): paths[name] for name in ("coded-fp32", "packed-fp32")}),
    }


def measure_deltas(before: StoredRun, after: StoredRun, folder: Path) -> dict[str, Any]:
    """The size of the tenth task with all that it changed, beside a dense model of its own."""
    deltas = {}
    for precision in PRECISIONS:
        paths = [folder / f"{name}-{precision}.etcl" for name in ("before", "after")]
        for stored, path in zip((before, after), paths, strict=True):
            bundle_run(stored, path, "coded", precision)
        delta = folder / f"{precision}.delta"
        write_delta(*paths, delta)
        info = summarize(load_bundle(paths[1]), paths[1])
        _, sections, _ = format.from_bytes(delta.read_bytes(), format.DELTA)
        last = f"task/{len(info['tasks']) - 1}/"
        parts = {"new": 0, "heads of earlier tasks": 0, "weights": sections["weight"].nbytes}
        for name, section in sections.items():
            if name != "weight":
                earlier = name.startswith("task/") and not name.startswith(last)
                parts["heads of earlier tasks" if earlier else "new"] += section.nbytes
        deltas[precision] = {
            "bytes": delta.stat().st_size,
            "bundle": paths[1].stat().st_size,
            "of_dense": delta.stat().st_size / (info["separate"] / len(info["tasks"])),
            "parts": parts,
        }
    return deltas


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """The recorded results, held against their targets."""
    runs = results["bundles"]["runs"]
    ratios = [row["B1"] for row in runs.values()]
    what = "coded masks / entropy of the declared model, bytes, the worst run"
    yield Figure("B1", what, max(ratios), "<= 1.05", "<= 1.01", ratios, f"{len(runs)} runs")
    for run, label in (("femnist1", "F-EMNIST-1, resnet18"), ("pmnist-0.4", "PMNIST, fcn3")):
        row = runs[run]
        total = row["bundles"]["coded-fp32"]["bytes"]["total"]
        what = f"bundle of 10 tasks at density 0.4 / 10 dense fp32 models, bytes: {label}"
        yield Figure("B2", what, row["B2"], "<= 0.15", "<= 0.10", note=f"{total:,} bytes")
        for encoding, ratio in row["B3"].items():
            what = f"decode one task / one dense forward at batch 1 (torch), time: {encoding}, {label}"
            note = f"{row['decode_ms'][encoding]:.3g} and {row['forward_ms']:.3g} ms"
            yield Figure("B3", what, ratio, "<= 1", "<= 0.25", note=note)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="where runs and bundles are kept")
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=RUNS)
    arguments = parser.parse_args()
    work: Path = arguments.work
    stored = {name: _learned(work / name, *RUNS[name]) for name in arguments.runs}
    torch.set_num_threads(1)
    runs: dict[str, Any] = {}
    for name, run in stored.items():
        runs[name] = row = measure(name, run, work)
        say(
            f"{name}: {show(B1=row['B1'], B2=row['B2'], B3=row['B3'], bits=row['bits_per_weight'], masks=row['masks'])}"
        )
    result: dict[str, Any] = {"runs": runs}
    if UPDATED in stored:
        result["deltas"] = measure_deltas(_learned(work / f"{UPDATED}-before", *BEFORE), stored[UPDATED], work)
        for precision, row in result["deltas"].items():
            say(f"delta of one task, {precision}: {row['bytes'] / 1e3:.0f} kB, {row['of_dense']:.3f} of a dense model")
    if arguments.record:
        write_result("bundle_size", "bundles", result, {})


def _learned(directory: Path, recipe: str, changed: dict[str, Any]) -> StoredRun:
    return learned(directory, load_recipe(recipe).with_values(changed))


if __name__ == "__main__":
    main()
