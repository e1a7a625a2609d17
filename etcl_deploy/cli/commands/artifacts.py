"""From a bundle to predictions, a TorchServe archive, ONNX files or a page."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from etcl_deploy.cli.commands.console import BundleFile, Json, Store, err, show
from etcl_deploy.report.tables import plain


def predict(
    path: BundleFile,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Image files.")],
    task: Annotated[str, typer.Option(help="Name of the task.")],
    as_json: Json = False,
) -> None:
    """Predict the class and the scores of images."""
    from etcl_deploy.bundle.bundle import load_bundle
    from etcl_deploy.report.tables import predictions_report
    from etcl_deploy.runtime.predictor import Predictor

    answers = Predictor(load_bundle(path)).predict(files, [task] * len(files))
    rows = [{"input": str(file), **answer.as_json()} for file, answer in zip(files, answers, strict=True)]
    show(rows, as_json=as_json, picture=predictions_report(rows))


def archive(
    path: BundleFile,
    name: Annotated[str, typer.Option(help="Name of the model.")],
    model_store: Store = Path("model_store"),
    as_json: Json = False,
) -> None:
    """Write NAME.mar for TorchServe; the server needs no etcl_deploy."""
    from etcl_deploy.export.to_mar import archive as write
    from etcl_deploy.report.tables import size

    target = write(path, name, model_store)
    result = {"file": str(target), "name": name, "bytes": target.stat().st_size}
    show(result, as_json=as_json, picture=f"{target} ({size(target.stat().st_size)})")


def onnx(
    path: BundleFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write; with --all, a folder.")],
    task: Annotated[str | None, typer.Option(help="Export this task.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Export every task to a file of its own.")] = False,
    multitask: Annotated[
        bool, typer.Option("--multitask", help="Export one file whose input `task_id` selects the task.")
    ] = False,
    compact: Annotated[bool, typer.Option("--compact", help="Store only weights that are not zero.")] = False,
    fp16: Annotated[bool, typer.Option("--fp16", help="Store weights in half precision.")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="Compute in 8 bits; needs --calibration.")] = False,
    calibration: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Images to calibrate and compare on: DIR/<task>/<class>/*.png.")
    ] = None,
    max_loss: Annotated[float, typer.Option(min=0, help="Accuracy that --int8 may cost, in percentage points.")] = 1.0,
    opset: Annotated[int, typer.Option(help="ONNX operator set version, 17 or later.")] = 17,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    as_json: Json = False,
) -> None:
    """Export tasks as stand-alone ONNX files, each compared with the bundle before it is kept."""
    from etcl_deploy.cli.onnx_files import export_bundle
    from etcl_deploy.export.to_onnx import OnnxOptions
    from etcl_deploy.report.tables import onnx_line, onnx_report

    if (task is not None) + every + multitask != 1:
        raise typer.BadParameter("say what to export with one of --task NAME, --all and --multitask")
    if fp16 and int8:
        raise typer.BadParameter("--fp16 or --int8, not both")
    if int8 and calibration is None:
        raise typer.BadParameter("--int8 needs --calibration DIR, images to measure ranges and accuracy on")
    if multitask and (int8 or compact):
        raise typer.BadParameter("--multitask does not go with --int8 and --compact: its masks are packed anyway")
    form = OnnxOptions(opset, "int8" if int8 else "fp16" if fp16 else "fp32", compact)
    with err.status("") as status:
        reports = export_bundle(
            path,
            output,
            task,
            form,
            calibration,
            max_loss,
            multitask=multitask,
            force=force,
            heard=lambda report: status.update(plain(f"{report.file} is written")),
        )
    documents = [asdict(report) for report in reports]
    if every:
        show(documents, as_json=as_json, picture=onnx_report(documents))
    else:
        show(documents[0], as_json=as_json, picture=onnx_line(documents[0]))


def web(
    path: BundleFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")],
    title: Annotated[str | None, typer.Option(help="Title of the page; default: the name of the bundle.")] = None,
    runtime: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The archive of onnxruntime-web, where npm cannot fetch it.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")] = False,
    as_json: Json = False,
) -> None:
    """Write a static page that runs the tasks in a browser, offline."""
    from etcl_deploy.bundle.bundle import load_bundle
    from etcl_deploy.export.web.site import write_site
    from etcl_deploy.report.tables import size

    report = write_site(load_bundle(path), output, title or path.stem, runtime, force=force)
    line = (
        f"{report.directory} ({size(report.bytes)}, {len(report.tasks)} tasks, {report.runtime}): "
        f"any static server will do, python -m http.server --bind 127.0.0.1 --directory {shlex.quote(report.directory)}"
    )
    show(asdict(report), as_json=as_json, picture=line)
