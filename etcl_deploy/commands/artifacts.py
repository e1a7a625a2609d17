"""From a bundle to answers, and to files other programs use: an archive, ONNX."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from etcl_deploy.commands.console import BundleFile, Json, Store, show


def predict(
    path: BundleFile,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Images.")],
    task: Annotated[str, typer.Option(help="The task to ask.")],
    as_json: Json = False,
) -> None:
    """Class and scores of images."""
    from etcl_deploy.bundle.bundle import load_bundle
    from etcl_deploy.render import predictions_report
    from etcl_deploy.runtime.predictor import Predictor

    answers = Predictor(load_bundle(path)).predict(files, [task] * len(files))
    rows = [{"input": str(file), **answer.as_json()} for file, answer in zip(files, answers, strict=True)]
    show(rows, as_json=as_json, picture=predictions_report(rows))


def archive(
    path: BundleFile,
    name: Annotated[str, typer.Option(help="The model's name.")],
    model_store: Store = Path("model_store"),
    as_json: Json = False,
) -> None:
    """NAME.mar for TorchServe, complete: the server needs no etcl_deploy."""
    from etcl_deploy.export.to_mar import archive as write
    from etcl_deploy.render import size

    target = write(path, name, model_store)
    result = {"file": str(target), "name": name, "bytes": target.stat().st_size}
    line = f"{target} ({size(target.stat().st_size)})"
    show(result, as_json=as_json, picture=line)


def onnx(
    path: BundleFile,
    task: Annotated[str, typer.Option(help="The task to export.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write, f.onnx.")],
    as_json: Json = False,
) -> None:
    """One task as a stand-alone ONNX file, compared with the bundle before it is kept."""
    from etcl_deploy.bundle.bundle import load_bundle
    from etcl_deploy.export.to_onnx import export_task
    from etcl_deploy.render import size

    report = export_task(load_bundle(path), task, output)
    line = (
        f"{report.file} ({size(report.bytes)}, opset {report.opset}): same class for "
        f"{report.parity.same_class} of {report.parity.items} images, "
        f"largest relative difference {report.parity.max_rel_diff:.0e}"
    )
    show(asdict(report), as_json=as_json, picture=line)
