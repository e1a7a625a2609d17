"""Benchmarks: what the software is built to reach, and whether it does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etcl_deploy.cli.commands.console import Json, err, show
from etcl_deploy.report.tables import plain


def bench(
    name: Annotated[str | None, typer.Argument(help="A target, such as L7, or a benchmark, such as step_cost.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="All targets, and what is recorded for them.")] = False,
    quick: Annotated[bool, typer.Option(help="Smaller experiments; alone: of all targets, within 15 minutes.")] = False,
    work: Annotated[Path | None, typer.Option(help="Where runs and results are kept; else nowhere.")] = None,
    as_json: Json = False,
) -> None:
    """Measure a target, in a checkout. Recorded results are not changed: `python benchmarks/NAME.py` does that."""
    from etcl_deploy.bench.run import measure_named, recorded_rows
    from etcl_deploy.bench.show import documents, measured_report, targets_report
    from etcl_deploy.bench.targets import find_table

    if sum((name is not None or quick, listed)) != 1:
        raise typer.BadParameter("name a target or a benchmark, or give --quick or --list")
    table = find_table(Path.cwd())
    if listed:
        rows = recorded_rows(table)
        show(documents(rows, measured=False), as_json=as_json, picture=targets_report(rows, table))
        return
    rows = measure_named(table, name, work, lambda line: err.print(plain(line), soft_wrap=True), quick=quick)
    found = documents(rows, measured=True)
    show(found[0] if len(found) == 1 else found, as_json=as_json, picture=measured_report(rows, quick=quick))
    raise typer.Exit(any(row.verdict == "failed" for row in rows))
