"""Bundles: write, inspect, verify and update them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from etcl_deploy.cli.commands.console import BundleFile, DataRoot, Json, note, show

Encoding = Annotated[
    Literal["coded", "packed"],
    typer.Option(help="coded: smallest, for shipping; packed: a bit per weight and task, for serving."),
]
Precision = Annotated[
    Literal["fp32", "fp16", "int8"] | None,
    typer.Option(help="Precision of weights and heads, default fp32; below fp32 accuracies are measured again."),
]


def bundle(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or a bundle to encode again.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The bundle to write (x.etcl).")],
    encoding: Encoding = "coded",
    precision: Precision = None,
    data_root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """Write one file with everything needed to predict."""
    from etcl_deploy.bundle.bundle import load_bundle, save
    from etcl_deploy.runs.store import load_run
    from etcl_deploy.runs.task_loading import tasks_of
    from etcl_deploy.runs.to_bundle import bundle_run

    if run.is_file():
        whole = load_bundle(run)
        if precision not in (None, whole.precision):
            raise typer.BadParameter(f"a bundle keeps its precision, {whole.precision}; name the run it was made from")
        save(output, whole.to_bytes(encoding))
    else:
        stored, kept = load_run(run), precision or "fp32"
        tasks = [] if kept == "fp32" else tasks_of(stored, note, data_root)
        bundle_run(stored, output, encoding, kept, {task.name: task.test for task in tasks})
    inspect(output, as_json)


def inspect(path: BundleFile, as_json: Json = False) -> None:
    """Show what is inside a bundle: bytes by part and by task."""
    from etcl_deploy.bundle.bundle import load_bundle
    from etcl_deploy.bundle.summary import summarize
    from etcl_deploy.report.tables import bundle_report

    info = summarize(load_bundle(path), path)
    show(info, as_json=as_json, picture=bundle_report(info))


def verify(path: BundleFile, as_json: Json = False) -> None:
    """Check every digest of a bundle, and decode every task."""
    from etcl_deploy.bundle.bundle import load_bundle

    loaded = load_bundle(path)
    loaded.decode_all()
    result = {"file": str(path), "ok": True, "digest": loaded.digest, "tasks": list(loaded.tasks)}
    line = f"{path}: {len(loaded.tasks)} tasks, every digest is right"
    show(result, as_json=as_json, picture=line)


def delta(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="The bundle that users have.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="A later bundle of the same run.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The delta to write.")],
    as_json: Json = False,
) -> None:
    """Write the difference between two bundles of one run."""
    from etcl_deploy.bundle.delta import write_delta
    from etcl_deploy.report.tables import size

    write_delta(old, new, output)
    small, large = output.stat().st_size, new.stat().st_size
    result = {"file": str(output), "bytes": small, "new": large}
    show(result, as_json=as_json, picture=f"{output}: {size(small)} instead of {size(large)}")


def apply(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="The bundle the delta was made for.")],
    change: Annotated[Path, typer.Argument(metavar="DELTA", help="The delta that `etcl delta` wrote.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The bundle to write (x.etcl).")],
    as_json: Json = False,
) -> None:
    """Rebuild the new bundle from the old one and a delta, byte for byte."""
    from etcl_deploy.bundle.bundle import save
    from etcl_deploy.bundle.delta import apply_delta_file

    save(output, apply_delta_file(old, change))
    verify(output, as_json)
