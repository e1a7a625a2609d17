"""The other side of benchmarks: one dense network behind TorchServe, as fast as it gets; see serving.py.

TorchServe imports this file from its archive. It does what has to be done and nothing else: no task, no checks, no
metrics. `engine` in model-config.yaml is torch (weights in channels_last, which is faster) or onnxruntime (weights
constant, all optimizations on).
"""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

CLASSES = [f"class {number}" for number in range(10)]


class DenseHandler:
    """One network, batches as they come."""

    def initialize(self, context: Any) -> None:
        """Load the network."""
        directory = Path(context.system_properties["model_dir"])
        self.engine = context.model_yaml_config["dense"]["engine"]
        threads = context.model_yaml_config.get("threads") or int(os.environ.get("OMP_NUM_THREADS", "1"))
        torch.set_num_threads(threads)
        if self.engine == "onnxruntime":
            import onnxruntime

            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = threads
            options.log_severity_level = 3
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            model = str(directory / "dense.onnx")
            self.session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        else:
            from etcl_deploy.bundle.bundle import load_bundle
            from etcl_deploy.runtime.subnet import materialize

            bundle = load_bundle(directory / "bundle.etcl")
            self.network = materialize(bundle, next(iter(bundle.tasks)))
            self.network.weights = {
                name: tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
                for name, tensor in self.network.weights.items()
            }

    def handle(self, data: list[dict[str, Any]], context: Any) -> list[str]:
        """One answer per request."""
        pixels = np.stack([np.asarray(Image.open(io.BytesIO(row["body"])).convert("RGB")) for row in data])
        if self.engine == "onnxruntime":
            scores = self.session.run(["probabilities"], {"image": pixels})[0]
        else:
            with torch.inference_mode():
                scores = self.network(torch.from_numpy(pixels)).softmax(1).numpy()
        chosen = scores.argmax(1).tolist()
        return [
            json.dumps({"label": CLASSES[index], "index": index, "scores": dict(zip(CLASSES, row, strict=True))})
            for index, row in zip(chosen, scores.tolist(), strict=True)
        ]
