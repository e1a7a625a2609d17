"""S5: making a cold task ready, beside a dense forward pass at batch 1.

    python benchmarks/cold_task.py

One thread; no task is visited twice. The dense network runs in torch (channels_last) and in onnxruntime with constant
weights and all optimizations; the faster is the other side. What runs in the same engine takes turns; medians of 200.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import onnxruntime
import torch
from record import read_options, write_result
from served import images, show, write_made

from etcl_deploy.bundle.bundle import load_bundle
from etcl_deploy.export.to_onnx import export_task
from etcl_deploy.runtime.engine import TorchEngine
from etcl_deploy.runtime.onnx_engine import OnnxEngine

BLOCKS = 5  # of rounds: the ratio in each of them shows the spread


def main(say: Callable[[str], None]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="and so many tasks")
    rounds = read_options(parser, rounds=60).rounds
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
    result = {
        "ms": medians,
        "ratio": medians["cold task, onnxruntime"] / medians[fastest],
        "ratios": [cold / forward for cold, forward in blocks],
        "ratio_to_torch": medians["cold task, onnxruntime"] / medians["dense forward, torch"],
        "eight_together": medians["dense forward of eight, onnxruntime"] / 8 / medians["dense forward, onnxruntime"],
        "forward_ratio": medians["task forward, onnxruntime"] / medians["dense forward, onnxruntime"],
    }
    say(show(**{key: round(value, 3) if isinstance(value, float) else value for key, value in result.items()}))
    write_result("cold_task", ["S5"], result, {"tasks": rounds, "rounds": rounds, "threads": 1})


if __name__ == "__main__":
    main(partial(print, flush=True))
