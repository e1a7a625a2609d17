"""Options that several commands share, and how results are shown."""

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
BundleFile = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle file (x.etcl).")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
Device = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option(help="Device to learn on; auto uses CUDA if there is any.")
]
DataRoot = Annotated[Path | None, typer.Option(help="Folder with the data of recipes; default: $ETCL_DATA.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any field of the configuration.")
]
Store = Annotated[Path, typer.Option("--model-store", help="Folder for archives and servers.")]


def settings_of(pairs: list[str] | None, named: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from `--set key=value` and from options of their own, which take precedence."""
    from etcl_deploy.settings import parse_settings

    return parse_settings(pairs or []) | {key: value for key, value in named.items() if value is not None}


def config_of(recipe: str | None, data: Path | None, values: Mapping[str, Any]) -> Config:
    """The settings of a recipe, or the defaults for the user's own data, changed by a preset and by `values`."""
    from etcl_deploy.config import Config
    from etcl_deploy.settings import load_recipe, with_preset

    if (recipe is None) == (data is None):
        raise typer.BadParameter("name a recipe, or your own data with --data DIR (not both)")
    if "sequence" in values:  # it is no longer that recipe
        values = {"recipe": None, **values}
    preset = values.get("preset")
    if recipe:
        config = load_recipe(recipe, values.get("method"), preset)
    else:
        config = Config() if preset is None else with_preset(Config(), preset)
    return config.with_values(values)


def show(value: Any, *, as_json: bool, picture: RenderableType) -> None:
    """Print a result on stdout, for a program or for a person."""
    if as_json:
        print(json.dumps(value, indent=2, allow_nan=False))
    elif isinstance(picture, str):
        out.print("[green]✓[/]", plain(picture), soft_wrap=True, highlight=False)
    else:
        out.print(picture)


def note(text: str, style: str = "") -> None:
    """Print a remark on stderr, as it is."""
    err.print(plain(text, style), soft_wrap=True, highlight=False)
