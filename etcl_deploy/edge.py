"""Answers on a device, from a file `etcl onnx` wrote: numpy and onnxruntime, Pillow for image files, no torch.

    from etcl_deploy.edge import Model

    model = Model("upright.onnx")
    print(model.predict(["photo.png"]))

A file of one task answers for that task; one written with --multitask for all of them, and `task` switches.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from etcl_deploy.core.prediction import Prediction
from etcl_deploy.core.preprocessing import ONES, Preprocessing
from etcl_deploy.errors import BadImageError, ModelError, UnknownTaskError

BATCH_SIZE = 64  # images that are prepared and run together
EXTERNAL = b"\x0a\x08location"  # how a tensor says that it lies in another file
PROVIDERS = {"cpu": ["CPUExecutionProvider"], "cuda": ["CUDAExecutionProvider", "CPUExecutionProvider"]}


class Model:
    """The tasks of one ONNX file. May be used from several threads, as long as they name the task they ask for."""

    def __init__(self, path: str | Path, *, device: str = "cpu", threads: int = 0) -> None:
        """Open a file; with `threads` 0 onnxruntime chooses. Raises ModelError if `etcl onnx` did not write it."""
        if device not in PROVIDERS:
            raise ModelError(f"device {device!r} is unknown; known: {', '.join(PROVIDERS)}")
        self._session = _open(Path(path), PROVIDERS[device], threads)
        if device == "cuda" and "CUDAExecutionProvider" not in self._session.get_providers():
            raise ModelError("onnxruntime cannot use CUDA here; it takes onnxruntime-gpu, a driver and a GPU")
        about = self._session.get_modelmeta().custom_metadata_map
        try:
            self.preprocessing = Preprocessing(**json.loads(about["etcl.preprocessing"]))
            self.bundle: str = about["etcl.bundle"]
            classes = json.loads(about["etcl.classes"])
            several = "etcl.tasks" in about
            names = json.loads(about["etcl.tasks"]) if several else [about["etcl.task"]]
            self.classes = {
                name: tuple(own) for name, own in zip(names, classes if several else [classes], strict=True)
            }
        except (KeyError, ValueError, TypeError) as error:
            raise ModelError(f"{path} was not written by `etcl onnx`: {error!r} in its metadata") from None
        self.tasks = tuple(self.classes)
        if not self.tasks:
            raise ModelError(f"{path} holds no task")
        self._several = several
        self._task: str = self.tasks[0]

    @property
    def task(self) -> str:
        """The task that answers where none is named; set it to switch."""
        return self._task

    @task.setter
    def task(self, name: str) -> None:
        self._task = self._known(name)

    def prepare(self, source: Any) -> np.ndarray:
        """uint8 `[height, width, channels]` from an image file, its bytes, a Pillow image, or pixels from 0 to 255."""
        shape = self.preprocessing.shape
        if isinstance(source, str | bytes | bytearray | Path) or hasattr(source, "getexif"):  # Pillow may be missing
            from etcl_deploy.core.pictures import read_picture

            return np.frombuffer(read_picture(source, self.preprocessing), np.uint8).reshape(shape)
        pixels = _pixels(source)
        if pixels.shape == shape:
            return pixels
        from etcl_deploy.core.pictures import MAX_PIXELS, resize_pixels

        data = resize_pixels(pixels.tobytes(), pixels.shape, self.preprocessing, MAX_PIXELS)
        return np.frombuffer(data, np.uint8).reshape(shape)

    def logits(self, pixels: np.ndarray, task: str | None = None) -> np.ndarray:
        """Float32 `[images, classes]` of prepared images, uint8 `[images, height, width, channels]`."""
        name = self._task if task is None else self._known(task)
        if pixels.dtype != np.uint8 or pixels.shape[1:] != self.preprocessing.shape:
            wanted = ["images", *self.preprocessing.shape]
            raise BadImageError(f"prepared images are uint8 {wanted}, not {pixels.dtype} {list(pixels.shape)}")
        number = {"task_id": np.array(self.tasks.index(name))} if self._several else {}
        parts = [np.empty((0, len(self.classes[name])), np.float32)]
        for first in range(0, len(pixels), BATCH_SIZE):
            part = np.ascontiguousarray(pixels[first : first + BATCH_SIZE])
            parts += self._session.run(["logits"], {"image": part, **number})
        return np.concatenate(parts)

    def predict(self, inputs: Iterable[Any], task: str | None = None) -> list[Prediction]:
        """One answer for each image file, its bytes, or its pixels."""
        if isinstance(inputs, str | bytes | bytearray | Path) or hasattr(inputs, "getexif"):
            raise BadImageError("a list of images is taken; for one image, a list of one")
        name = self._task if task is None else self._known(task)
        predictions: list[Prediction] = []
        left = iter(inputs)
        while sources := list(islice(left, BATCH_SIZE)):
            predictions += self._explained(
                name, self.logits(np.stack([self.prepare(source) for source in sources]), name)
            )
        return predictions

    def _explained(self, name: str, logits: np.ndarray) -> list[Prediction]:
        scores = np.exp(logits - logits.max(1, keepdims=True))
        scores /= scores.sum(1, keepdims=True)
        classes = self.classes[name]
        return [
            Prediction(name, classes[index], index, dict(zip(classes, row, strict=True)))
            for index, row in zip(logits.argmax(1).tolist(), scores.tolist(), strict=True)
        ]

    def _known(self, name: str) -> str:
        if name not in self.classes:
            raise UnknownTaskError(name, self.tasks, "this file")
        return name


def _open(path: Path, providers: list[str], threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be opened: {error.strerror}") from None
    if EXTERNAL in data:
        raise ModelError(f"{path} keeps weights in other files; one that holds them all is right")
    try:
        return onnxruntime.InferenceSession(data, options, providers=providers)
    except Exception as error:  # onnxruntime has a class for every reason, of no common name
        raise ModelError(f"{path} cannot be opened: {error}") from None


def _pixels(source: Any) -> np.ndarray:
    """Nested lists or an array of numbers from 0 to 255 as uint8."""
    try:
        values = np.asarray(source)
        if values.dtype == np.uint8:
            return values
        values = values.astype(np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadImageError(f"pixels must be a rectangular array of numbers: {error}") from None
    if not ((values >= 0) & (values <= 255)).all():  # which nan fails, too
        raise BadImageError("pixels must lie between 0 and 255")
    if values.size and values.max() <= 1 and (values != np.rint(values)).any():
        raise BadImageError(ONES)
    rounded: np.ndarray = np.rint(values).astype(np.uint8)
    return rounded
