"""Bundles: made from a run, looked into, checked, and brought up to date."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from etcl_deploy.cli.commands.console import BundleFile, DataRoot, Json, err, show
from etcl_deploy.report.tables import plain

Encoding = Annotated[
    Literal["coded", "packed"], typer.Option(help="Masks: small, to be shipped, or a bit a weight, to be mapped.")
]
Precision = Annotated[
    Literal["fp32", "fp16", "int8"] | None,
    typer.Option(help="Weights and heads of a run, fp32 unless said; below that accuracy is measured again."),
]


def bundle(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory; or a bundle, to be encoded anew.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write, x.etcl.")],
    encoding: Encoding = "coded",
    precision: Precision = None,
    data_root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """Write one file with everything needed to predict."""
    from etcl_deploy.bundle.bundle import load_bundle, save
    from etcl_deploy.runs.store import load
    from etcl_deploy.runs.task_loading import tasks_of
    from etcl_deploy.runs.to_bundle import bundle_run

    if run.is_file():
        whole = load_bundle(run)
        if precision not in (None, whole.precision):
            raise typer.BadParameter(f"a bundle keeps its precision, {whole.precision}; name the run it was made from")
        save(output, whole.to_bytes(encoding))
    else:
        stored, kept = load(run), precision or "fp32"
        tasks = [] if kept == "fp32" else tasks_of(stored, _note, data_root)
        bundle_run(stored.run, stored.config, output, encoding, kept, {task.name: task.test for task in tasks})
    inspect(output, as_json)


def _note(text: str) -> None:
    err.print(plain(text), soft_wrap=True)


def inspect(path: BundleFile, as_json: Json = False) -> None:
    """What is inside a bundle: bytes by part and by task."""
    from etcl_deploy.bundle.bundle import load_bundle
    from etcl_deploy.bundle.summary import summarize
    from etcl_deploy.report.tables import bundle_report

    info = summarize(load_bundle(path), path)
    show(info, as_json=as_json, picture=bundle_report(info))


def verify(path: BundleFile, as_json: Json = False) -> None:
    """Check every digest of a bundle, and that every task can be decoded."""
    from etcl_deploy.bundle.bundle import load_bundle

    loaded = load_bundle(path)
    loaded.decode_all()
    result = {"file": str(path), "ok": True, "digest": loaded.digest, "tasks": list(loaded.tasks)}
    line = f"{path}: {len(loaded.tasks)} tasks, every digest is right"
    show(result, as_json=as_json, picture=line)


def delta(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A bundle that is out there.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="A bundle of the same run with further tasks.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    as_json: Json = False,
) -> None:
    """Write what later tasks added to a bundle, to be applied to the old one."""
    from etcl_deploy.bundle.delta import write_delta
    from etcl_deploy.report.tables import size

    write_delta(old, new, output)
    small, large = output.stat().st_size, new.stat().st_size
    result = {"file": str(output), "bytes": small, "new": large}
    show(result, as_json=as_json, picture=f"{output}: {size(small)} instead of {size(large)}")


def apply(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="The bundle the delta was made for.")],
    change: Annotated[Path, typer.Argument(metavar="DELTA", help="What `etcl delta` wrote.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write, x.etcl.")],
    as_json: Json = False,
) -> None:
    """Make the new bundle of an old one and a delta, byte for byte."""
    from etcl_deploy.bundle.bundle import save
    from etcl_deploy.bundle.delta import apply_delta_file

    save(output, apply_delta_file(old, change))
    verify(output, as_json)
