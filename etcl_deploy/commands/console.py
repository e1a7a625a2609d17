"""What the commands share: options that mean the same everywhere, and how results are shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console, RenderableType

from etcl_deploy.render import plain

out = Console()
err = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
BundleFile = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle, x.etcl.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
Device = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option(help="Where to learn; auto takes CUDA if there is one.")
]
DataRoot = Annotated[Path | None, typer.Option(help="Where recipes find their data; else $ETCL_DATA.")]
Store = Annotated[Path, typer.Option("--model-store", help="Where archives and servers live.")]


def show(value: Any, *, as_json: bool, picture: RenderableType) -> None:
    """A result on stdout, for a program or for a person."""
    if as_json:
        print(json.dumps(value, indent=2, allow_nan=False))
    elif isinstance(picture, str):
        out.print("[green]✓[/]", plain(picture), soft_wrap=True, highlight=False)
    else:
        out.print(picture)
