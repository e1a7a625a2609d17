"""A folder with a page that runs the tasks of a bundle in a browser. It is static and loads nothing from elsewhere."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

from etcl_deploy.bundle.bundle import Bundle
from etcl_deploy.core import atomic
from etcl_deploy.core.templates import fill
from etcl_deploy.errors import ExportError
from etcl_deploy.export.parity import Parity
from etcl_deploy.export.to_multitask import export_multitask
from etcl_deploy.export.web.runtime import VERSION, runtime_files

HERE, OWN = "etcl_deploy.export.web", ("app.js", "style.css")
MODEL = "tasks.onnx"


@dataclass(frozen=True)
class SiteReport:
    """The folder that was written, and how its model compares with the bundle."""

    directory: str
    tasks: list[str]
    bytes: int
    runtime: str
    parity: Parity


def write_site(bundle: Bundle, directory: Path, title: str, runtime: Path | None = None, *, force: bool) -> SiteReport:
    """Write the page, the model with all tasks and onnxruntime-web; `runtime` is its archive, if it is at hand."""
    if directory.exists() and not directory.is_dir():
        raise ExportError(f"{directory} is a file; a page is a directory")
    if directory.is_dir() and any(directory.iterdir()) and not force:
        raise ExportError(f"{directory} is not empty; --force writes into it")
    files = dict(runtime_files(runtime))
    files |= {name: (resources.files(HERE) / name).read_bytes() for name in OWN}
    files["index.html"] = fill(HERE, "index.html", {"title": title, "tasks": list(bundle.tasks)}).encode()
    files["tasks.json"] = json.dumps(_about(bundle), indent=1, ensure_ascii=False).encode()
    directory.mkdir(parents=True, exist_ok=True)
    report = export_multitask(bundle, directory / MODEL)
    for name, data in files.items():
        atomic.write_bytes(directory / name, data)
    total = sum((directory / name).stat().st_size for name in (*files, MODEL))
    return SiteReport(str(directory), report.tasks, total, f"onnxruntime-web {VERSION}", report.parity)


def _about(bundle: Bundle) -> dict[str, object]:
    tasks = [
        {"name": task.name, "classes": list(task.classes), "accuracy": task.accuracy} for task in bundle.tasks.values()
    ]
    return {"bundle": bundle.digest, "preprocessing": asdict(bundle.preprocessing), "tasks": tasks}
