"""What the commands share: options that mean the same everywhere, and how results are shown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console, RenderableType

from etcl_deploy.report.tables import plain

if TYPE_CHECKING:
    from etcl_deploy.config import Config

out = Console()
err = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
BundleFile = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle, x.etcl.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
Device = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option(help="Where to learn; auto takes CUDA if there is one.")
]
DataRoot = Annotated[Path | None, typer.Option(help="Where recipes find their data; else $ETCL_DATA.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any config field.")]
Store = Annotated[Path, typer.Option("--model-store", help="Where archives and servers live.")]


def settings_of(pairs: list[str] | None, named: Mapping[str, Any]) -> dict[str, Any]:
    """Settings given as `--set key=value` and by options of their own, which go first."""
    from etcl_deploy.settings import parse_settings

    return parse_settings(pairs or []) | {key: value for key, value in named.items() if value is not None}


def config_of(recipe: str | None, data: Path | None, values: Mapping[str, Any]) -> Config:
    """The settings of a recipe, or of the user's own data, some of them changed."""
    from etcl_deploy.config import Config
    from etcl_deploy.settings import load_recipe

    if (recipe is None) == (data is None):
        raise typer.BadParameter("name a recipe, or your own data with --data DIR (not both)")
    if "sequence" in values:  # whatever it is now, it is no longer what the recipe is known for
        values = {"recipe": None, **values}
    return (load_recipe(recipe, values.get("method")) if recipe else Config()).with_values(values)


def show(value: Any, *, as_json: bool, picture: RenderableType) -> None:
    """A result on stdout, for a program or for a person."""
    if as_json:
        print(json.dumps(value, indent=2, allow_nan=False))
    elif isinstance(picture, str):
        out.print("[green]✓[/]", plain(picture), soft_wrap=True, highlight=False)
    else:
        out.print(picture)
