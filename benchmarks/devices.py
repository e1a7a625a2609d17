"""Files for devices (D1 to D4), for four backbones and a network of a user's own, at four densities.

    python benchmarks/devices.py --work DIR         what DIR holds of an earlier time is not learned again

Every network learns the five tasks of the recipe `digits` for a few epochs, at 32 x 32 pixels. D1: every task's file
over its whole test set, beside the learned network. D2: latency beside a dense network of the same shape, exported the
same way. D3: 8 bit beside fp32, and the accuracy it costs. D4: bytes beside the dense file, compact, with fp32 values
and with 8 bit. One thread, one image at a time, files taking turns. Last, all tasks of a bundle of a hundred, beside
one of them; and what the runtime of a device takes.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import mean, median
from typing import Any

import onnxruntime
import torch
from record import Figure, learned, new_parser, say, show, write_result
from served import write_made
from torch import nn

from etcl_deploy.bundle.bundle import Bundle, load_bundle
from etcl_deploy.cli.onnx_files import export_all, file_names
from etcl_deploy.export.parity import LIMITS, answers_of, compare, session
from etcl_deploy.export.to_onnx import OnnxOptions, export_task, task_model, write_checked
from etcl_deploy.learn.trainer import predict
from etcl_deploy.runs.task_loading import find_tasks
from etcl_deploy.runs.to_bundle import bundle_run
from etcl_deploy.runtime.subnet import Subnet, materialize
from etcl_deploy.settings import load_recipe

ROOT = Path(__file__).parent.parent
DENSITIES = (0.1, 0.2, 0.4, 0.5)
BACKBONES = {"resnet18": 20, "alexnet": 32, "lenet5": 20, "fcn3": 300, "devices:vgg": 16}
ROUNDS, TIMES = 9, 40
FORMS = {
    "fp32": OnnxOptions(),
    "int8": OnnxOptions(precision="int8"),
    "compact": OnnxOptions(compact=True),
    "compact int8": OnnxOptions(precision="int8", compact=True),
}


def vgg(width: int) -> nn.Module:
    """A network somebody else might have written."""
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(2 * width, 4 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(64 * width, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def dense_file(bundle: Bundle, task: str, path: Path) -> Path:
    """A network of the same shape without a single zero, exported the same way."""
    subnet = materialize(bundle, task)
    chance = torch.Generator().manual_seed(0)
    filled = {
        name: torch.where(tensor == 0, torch.randn(tensor.shape, generator=chance) / 100, tensor)
        for name, tensor in subnet.weights.items()
    }
    write_checked(
        task_model(bundle, task, Subnet(subnet.preprocessing, subnet.plan, filled, subnet.head)), path, "dense"
    )
    return path


def latencies(paths: dict[str, Path], pixels: torch.Tensor) -> dict[str, list[float]]:
    """Milliseconds for one image in every round; files take turns."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    sessions = {
        name: onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"]) for name, path in paths.items()
    }
    image = {"image": pixels[:1].numpy()}
    rounds: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(ROUNDS):
        for name, loaded in sessions.items():
            times = []
            for _ in range(TIMES):
                began = time.perf_counter()
                loaded.run(None, image)
                times.append(1000 * (time.perf_counter() - began))
            rounds[name].append(median(times))
    return rounds


def ratio(times: dict[str, list[float]], one: str, other: str) -> float:
    return median(a / b for a, b in zip(times[one], times[other], strict=True))


def row_of(backbone: str, density: float, work: Path, learning: dict[str, int]) -> dict[str, Any]:
    """All figures of one network at one density."""
    values = {"backbone": backbone, "width": BACKBONES[backbone], "density": density, "size": 32, **learning}
    values["learning_rate"] = 0.001  # with the recipe's 0.003 lenet5 does not learn
    config = load_recipe("digits").with_values(values)
    tasks = find_tasks(config, None).tasks
    work = work / f"{backbone.partition(':')[0]} {density}"
    stored = learned(work / "run", config)
    bundle_run(stored, work / "x.etcl")
    bundle = load_bundle(work / "x.etcl")
    parities, lost, sizes = [], [], {name: [] for name in FORMS}
    channels = [0, 0]
    paths = {"dense": dense_file(bundle, tasks[0].name, work / "dense.onnx")}
    dense = paths["dense"].stat().st_size
    for task in tasks:
        for name, form in FORMS.items():
            path = work / f"{name}.onnx"
            report = export_task(bundle, task.name, path, None, form, task, max_loss=100)
            sizes[name].append(report.bytes / dense)
            if name == "fp32":
                expected = predict(stored.run.network, task.name, task.test_x)
                parities.append(compare(expected, answers_of(session(path), task.test_x), LIMITS["fp32"], path.name))
                channels[0] += sum(layer.kept_outputs for layer in report.layers)
                channels[1] += sum(layer.outputs for layer in report.layers)
            if name == "int8" and report.accuracy:
                lost.append(report.accuracy.before - report.accuracy.after)
            if task is tasks[0]:
                paths[name] = path.rename(work / f"timed {name}.onnx")
    times = latencies(paths, tasks[0].test_x)
    return {
        "accuracy": stored.summary().acc,
        "D1": {
            "items": sum(parity.items for parity in parities),
            "same_class": sum(parity.same_class for parity in parities),
            "max_rel_diff": max(parity.max_rel_diff for parity in parities),
        },
        "D2": ratio(times, "fp32", "dense"),
        "D3": {"latency": ratio(times, "int8", "fp32"), "points_lost": mean(lost), "most_lost": max(lost)},
        "D4": {name: mean(sizes[name]) for name in ("compact", "compact int8")},
        "channels_kept": channels[0] / channels[1],
        "dense_bytes": dense,
        "ms": {name: median(values) for name, values in times.items()},
    }


def hundred(work: Path) -> dict[str, float]:
    """Seconds for one task of a bundle of a hundred, and for all."""
    bundle = load_bundle(write_made(work / "hundred.etcl", 100))
    ones = []
    for _ in range(3):
        began = time.perf_counter()
        export_task(bundle, "task-0", work / "one.onnx")
        ones.append(time.perf_counter() - began)
    one = median(ones)
    began = time.perf_counter()
    export_all(
        bundle, {task: work / "hundred" / name for task, name in file_names(bundle.tasks).items()}, OnnxOptions()
    )
    every = time.perf_counter() - began
    seconds = {"one": one, "all": every, "allowed": 3 * one + 0.2 * 100}
    say(show(**seconds))
    return seconds


IMPORTS = """
import time
began = time.perf_counter()
import numpy, onnxruntime
between = time.perf_counter()
import etcl_deploy.edge
print(between - began, time.perf_counter() - between)
"""


def edge_budget(work: Path) -> dict[str, float]:
    """Bytes of this package's wheel; seconds to import what a device needs, and of these our own."""
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", work, ROOT]
    subprocess.run(command, check=True)
    (wheel,) = work.glob("*.whl")
    runs = [
        [float(word) for word in subprocess.check_output([sys.executable, "-c", IMPORTS], text=True).split()]
        for _ in range(ROUNDS)
    ]
    others, own = (median(column) for column in zip(*runs, strict=True))
    taken = {"wheel_bytes": wheel.stat().st_size, "import_numpy_onnxruntime": others, "import_edge": own}
    say(show(**taken))
    return taken


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """The recorded results, held against their targets."""
    networks = results["devices"]["networks"]
    parities = [row["D1"] for row in networks.values()]
    items, same = (sum(parity[key] for parity in parities) for key in ("items", "same_class"))
    apart = [parity["max_rel_diff"] for parity in parities]
    what = "exported task beside the learned network, whole test set:"
    yield Figure("D1", f"{what} share with the same class", same / items, "= 1", "= 1", note=f"{items:,} images")
    yield Figure("D1", f"{what} largest relative difference of logits", max(apart), "<= 1e-4", "<= 1e-5", apart)

    def over(
        target: str, what: str, density: float, value: Callable[[Any], float], pick: Callable[..., float], **limits: str
    ) -> Figure:
        rows = {backbone: value(networks[f"{backbone} {density}"]) for backbone in BACKBONES}
        note = ", ".join(f"{backbone.rpartition(':')[2]} {number:.3g}" for backbone, number in rows.items())
        return Figure(target, what, pick(rows.values()), repeats=list(rows.values()), note=note, **limits)

    for density in (0.4, 0.1):
        what = f"exported task / the dense network exported the same way, latency, median network: density {density}"
        yield over("D2", what, density, lambda row: row["D2"], median, now="<= 1", aim="<= 0.7")
    what = "int8 / fp32 at density 0.4: latency, median network"
    yield over("D3", what, 0.4, lambda row: row["D3"]["latency"], median, now="<= 0.8", aim="<= 0.5")
    what = "int8 / fp32 at density 0.4: points of accuracy lost, worst network"
    yield over("D3", what, 0.4, lambda row: row["D3"]["points_lost"], max, now="<= 1", aim="<= 0.3")
    for density, now, aim in ((0.4, "<= 0.45", "<= 0.14"), (0.1, "<= 0.15", "<= 0.06")):
        what = f"compact file / dense fp32 file, bytes, worst network: density {density}"
        yield over("D4", what, density, lambda row: row["D4"]["compact"], max, now=now)
        yield over("D4", f"{what}, int8", density, lambda row: row["D4"]["compact int8"], max, aim=aim)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--networks", nargs="+", default=list(BACKBONES), choices=BACKBONES)
    parser.add_argument("--densities", type=float, nargs="+", default=DENSITIES)
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()
    work: Path = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    learning = {"epochs": arguments.epochs, "tasks": arguments.tasks}
    networks = {}
    for backbone in arguments.networks:
        for density in arguments.densities:
            networks[f"{backbone} {density}"] = row = row_of(backbone, density, work, learning)
            say(f"{backbone} {density}: {show(**{key: row[key] for key in ('accuracy', 'D1', 'D2', 'D3', 'D4')})}")
    result = {"networks": networks, "edge": edge_budget(work), "hundred_tasks_seconds": hundred(work)}
    if arguments.record:
        settings = {"densities": arguments.densities, "widths": BACKBONES, "rounds": ROUNDS, "times": TIMES, **learning}
        write_result("devices", "devices", result, settings)


if __name__ == "__main__":
    main()
