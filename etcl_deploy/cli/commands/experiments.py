"""Experiments: recipes, their data, comparisons of methods, and the report page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from etcl_deploy.cli.commands.console import DataRoot, Device, Json, SetOption, config_of, err, settings_of, show

Recipe = Annotated[str, typer.Argument(help="A recipe (`etcl recipes` lists them) or a TOML file.")]

data = typer.Typer(help="Check and download the data of a recipe.", no_args_is_help=True)


def recipes(data_root: DataRoot = None, as_json: Json = False) -> None:
    """List the recipes: tasks, network, and which of their data is there."""
    from etcl_deploy.data.inventory import list_recipes
    from etcl_deploy.report.tables import recipes_report

    rows = list_recipes(data_root)
    show(rows, as_json=as_json, picture=recipes_report(rows))


@data.command()
def check(recipe: Recipe, data_root: DataRoot = None, as_json: Json = False) -> None:
    """Show which data is there, what is missing, and where to get it."""
    from etcl_deploy.data.inventory import check_recipe
    from etcl_deploy.report.tables import data_report

    rows = check_recipe(recipe, data_root)
    show(rows, as_json=as_json, picture=data_report(rows))
    if not all(row["place"] for row in rows):
        raise typer.Exit(1)


@data.command()
def fetch(recipe: Recipe, data_root: DataRoot = None, as_json: Json = False) -> None:
    """Download missing data and verify its digests; a download that was cut off goes on where it stopped."""
    from etcl_deploy.cli.progress import DownloadProgress
    from etcl_deploy.data.fetch import fetch_recipe
    from etcl_deploy.report.tables import data_report

    progress = DownloadProgress(err)
    with progress.bars:
        rows = fetch_recipe(recipe, data_root, progress)
    show(rows, as_json=as_json, picture=data_report(rows))


def compare(
    recipe: Annotated[str | None, typer.Argument(help="A recipe; or use --data.")] = None,
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "one,wsn,etcl",
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds for each method, from 0.")] = 3,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for runs and tables.")] = Path("compare"),
    own: Annotated[Path | None, typer.Option("--data", help="Your own tasks, as `etcl train` takes them.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data of each task.")] = None,
    tasks: Annotated[int | None, typer.Option(help="Learn only the first N tasks.")] = None,
    device: Device = "auto",
    settings: SetOption = None,
    data_root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """Compare methods on the same tasks, with the same budget and several seeds; goes on where it stopped."""
    from etcl_deploy.cli.progress import TrainingProgress
    from etcl_deploy.report.tables import compare_report
    from etcl_deploy.runs import compare as comparing
    from etcl_deploy.runs.session import Session

    values = settings_of(settings, {"epochs": epochs, "tasks": tasks})
    names = [name.strip() for name in methods.split(",")]
    configs = {name: config_of(recipe, own, {**values, "method": name}) for name in names}
    progress = TrainingProgress(err)
    with progress.bars:
        session = Session(device, progress, progress.note, data_root=data_root)
        made = comparing.compare(configs, output, data=own, seeds=seeds, session=session)
    document = made.as_json()
    show(document, as_json=as_json, picture=compare_report(document["methods"]))
    if made.failed:
        raise typer.Exit(1)


def report(
    source: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or the folder of `etcl compare`.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write.")] = Path("report.html"),
    as_json: Json = False,
) -> None:
    """Write one self-contained page: accuracy, transfer, similarity, masks, sizes, settings."""
    from etcl_deploy.report.write import write_report

    write_report(source, output)
    result = {"file": str(output), "bytes": output.stat().st_size}
    show(result, as_json=as_json, picture=f"{output}: open it in a browser")
