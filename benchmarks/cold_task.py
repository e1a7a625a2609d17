"""Making a cold task ready, beside a dense forward pass at batch 1 (S5).

    python benchmarks/cold_task.py

One thread; no task is visited twice. The dense network runs in torch (channels_last) and in onnxruntime with constant
weights and all optimizations; the faster is the other side. What runs in the same engine takes turns; medians of 200.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import onnxruntime
import torch
from record import Figure, new_parser, say, show, write_result
from served import images, write_made

from etcl_deploy.bundle.bundle import load_bundle
from etcl_deploy.export.to_onnx import export_task
from etcl_deploy.runtime.engine import TorchEngine
from etcl_deploy.runtime.onnx_engine import OnnxEngine

BLOCKS = 5  # of rounds: the ratio in each of them shows the spread


def measure(rounds: int) -> dict[str, Any]:
    """Medians of every call, and the ratios between them."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        bundle = load_bundle(write_made(Path(directory) / "made.etcl", rounds))
        names = list(bundle.tasks)
        export_task(bundle, names[0], Path(directory) / "dense.onnx")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(Path(directory) / "dense.onnx"), options, ["CPUExecutionProvider"])
        torch_engine, onnx_engine = TorchEngine(bundle), OnnxEngine(bundle)
        network = torch_engine.materialize(names[0])
        network.weights = {
            name: tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
            for name, tensor in network.weights.items()
        }
        ready = onnx_engine.materialize(names[0])
        pixels = images(1)[0].unsqueeze(0)
        array, eight = pixels.numpy(), torch.stack(images(8)).numpy()
        calls: dict[str, Callable[[int], object]] = {
            "dense forward, torch": lambda turn: network(pixels),
            "dense forward, onnxruntime": lambda turn: session.run(None, {"image": array}),
            "dense forward of eight, onnxruntime": lambda turn: session.run(None, {"image": eight}),
            "task forward, onnxruntime": lambda turn: onnx_engine.logits(ready, pixels),
            "cold task, onnxruntime": lambda turn: onnx_engine.release(onnx_engine.materialize(names[turn])),
            "cold task, torch": lambda turn: torch_engine.materialize(names[turn]),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        # One engine after the other: a server runs only one, which has the processor's caches for itself.
        for engine in ("onnxruntime", "torch"):
            for turn in range(rounds):
                for name, call in calls.items():
                    if name.endswith(engine):
                        began = time.perf_counter()
                        call(turn)
                        times[name].append(time.perf_counter() - began)
    medians = {name: 1000 * median(values) for name, values in times.items()}
    fastest = min((name for name in medians if name.startswith("dense forward,")), key=medians.__getitem__)
    blocks = [
        [median(times[name][block::BLOCKS]) for name in ("cold task, onnxruntime", fastest)] for block in range(BLOCKS)
    ]
    return {
        "ms": medians,
        "ratio": medians["cold task, onnxruntime"] / medians[fastest],
        "ratios": [cold / forward for cold, forward in blocks],
        "ratio_to_torch": medians["cold task, onnxruntime"] / medians["dense forward, torch"],
        "eight_together": medians["dense forward of eight, onnxruntime"] / 8 / medians["dense forward, onnxruntime"],
        "forward_ratio": medians["task forward, onnxruntime"] / medians["dense forward, onnxruntime"],
    }


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """The recorded results, held against their targets."""
    row = results["cold_task"]
    times = row["ms"]["cold task, onnxruntime"], row["ms"]["dense forward, onnxruntime"]
    note = f"{times[0]:.2f} and {times[1]:.2f} ms; {row['ratio_to_torch']:.2f} if the forward pass is torch's"
    what = "make a cold task ready / a dense forward at batch 1, time"
    yield Figure("S5", what, row["ratio"], "<= 0.5", "<= 0.1", row["ratios"], note)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="and so many tasks")
    arguments = parser.parse_args()
    result = measure(arguments.rounds)
    say(show(**result))
    if arguments.record:
        write_result("cold_task", "cold_task", result, {"tasks": arguments.rounds, "rounds": arguments.rounds})


if __name__ == "__main__":
    main()
