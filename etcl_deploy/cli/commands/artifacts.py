"""From a bundle to answers, and to files other programs use: an archive, ONNX, a page."""

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
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Images.")],
    task: Annotated[str, typer.Option(help="The task to ask.")],
    as_json: Json = False,
) -> None:
    """Class and scores of images."""
    from etcl_deploy.bundle.bundle import load_bundle
    from etcl_deploy.report.tables import predictions_report
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
    from etcl_deploy.report.tables import size

    target = write(path, name, model_store)
    result = {"file": str(target), "name": name, "bytes": target.stat().st_size}
    line = f"{target} ({size(target.stat().st_size)})"
    show(result, as_json=as_json, picture=line)


def onnx(
    path: BundleFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write, f.onnx; with --all a directory.")],
    task: Annotated[str | None, typer.Option(help="The task to export.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every task, a file each.")] = False,
    multitask: Annotated[bool, typer.Option("--multitask", help="All tasks in one file, chosen by `task_id`.")] = False,
    compact: Annotated[bool, typer.Option("--compact", help="A file that inflates itself when it is loaded.")] = False,
    fp16: Annotated[bool, typer.Option("--fp16", help="Weights in half precision.")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="Compute in 8 bit; needs --calibration.")] = False,
    calibration: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Images, DIR/<task>/<class>/*.png: to calibrate and compare on.")
    ] = None,
    max_loss: Annotated[float, typer.Option(min=0, help="Points of accuracy --int8 may cost.")] = 1.0,
    opset: Annotated[int, typer.Option(help="Of ONNX; 17 or later.")] = 17,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    as_json: Json = False,
) -> None:
    """Tasks as stand-alone ONNX files, each compared with the bundle before it is kept."""
    from etcl_deploy.cli.onnx_files import export_bundle
    from etcl_deploy.export.to_onnx import OnnxOptions
    from etcl_deploy.report.tables import onnx_line, onnx_report

    if (task is not None) + every + multitask != 1:
        raise typer.BadParameter("one of --task NAME, --all and --multitask says what to export")
    if fp16 and int8:
        raise typer.BadParameter("--fp16 or --int8, not both")
    if int8 and calibration is None:
        raise typer.BadParameter("--int8 needs --calibration DIR, images to measure ranges and accuracy on")
    if multitask and (int8 or compact):
        raise typer.BadParameter("--multitask does not go with --int8 and --compact: its masks are packed anyway")
    form = OnnxOptions(opset, "int8" if int8 else "fp16" if fp16 else "fp32", compact)
    with err.status("") as status:
        reports = export_bundle(
            *(path, output, task, form, calibration, max_loss),
            multitask=multitask,
            force=force,
            heard=lambda report: status.update(plain(f"{report.file} is written")),
        )
    found = [asdict(report) for report in reports]
    show(found if every else found[0], as_json=as_json, picture=onnx_report(found) if every else onnx_line(found[0]))


def web(
    path: BundleFile,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    title: Annotated[str | None, typer.Option(help="Of the page; else the bundle's name.")] = None,
    runtime: Annotated[
        Path | None, typer.Option(metavar="FILE", help="onnxruntime-web's archive, where npm cannot fetch it.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that is not empty.")] = False,
    as_json: Json = False,
) -> None:
    """A static page that runs the tasks in a browser, offline."""
    from etcl_deploy.bundle.bundle import load_bundle
    from etcl_deploy.export.web.site import write_site
    from etcl_deploy.report.tables import size

    report = write_site(load_bundle(path), output, title or path.stem, runtime, force=force)
    line = (
        f"{report.directory} ({size(report.bytes)}, {len(report.tasks)} tasks, {report.runtime}): "
        f"any static server will do, python -m http.server --bind 127.0.0.1 --directory {shlex.quote(report.directory)}"
    )
    show(asdict(report), as_json=as_json, picture=line)
