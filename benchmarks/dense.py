"""One dense network in an archive of its own: the other side of benchmarks of serving."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import yaml

from etcl_deploy.bundle.bundle import load_bundle
from etcl_deploy.export.to_mar import archive
from etcl_deploy.export.to_onnx import export_task

HANDLER = Path(__file__).parent / "dense_handler.py"


def write_dense(bundle: Path, name: str, store: Path, settings: dict[str, Any], engine: str) -> None:
    """`store/name.mar` with the first task of a bundle as a dense network and the handler for it.

    A dense network takes the time of any other of its shape: zeros are multiplied like other numbers.
    """
    archive(bundle, name, store, settings)
    path = store / f"{name}.mar"
    with zipfile.ZipFile(path) as opened:
        contents = {entry: opened.read(entry) for entry in opened.namelist()}
    contents["etcl_handler.py"] = HANDLER.read_bytes()
    contents["model-config.yaml"] = yaml.safe_dump({**settings, "dense": {"engine": engine}}).encode()
    if engine == "onnxruntime":
        loaded = load_bundle(bundle)
        export_task(loaded, next(iter(loaded.tasks)), store / "dense.onnx")
        contents["dense.onnx"] = (store / "dense.onnx").read_bytes()
        contents = {entry: data for entry, data in contents.items() if not entry.startswith("etcl_deploy/")}
        contents["bundle.etcl"] = b""  # the manifest names it
    with zipfile.ZipFile(path, "w") as made:
        for entry, data in contents.items():
            made.writestr(entry, data)
