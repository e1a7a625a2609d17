"""Write the page of a directory."""

from __future__ import annotations

from pathlib import Path

from etcl_deploy.core import atomic
from etcl_deploy.report.of_compare import compare_page
from etcl_deploy.report.of_run import run_page
from etcl_deploy.runs import compare


def write_report(source: Path, output: Path) -> None:
    """Write the page of a run, or of a comparison, to `output`."""
    atomic.check_replaceable(output)
    page = compare_page(source) if (source / compare.RECORD).exists() else run_page(source)
    atomic.write_bytes(output, page.as_html().encode())
