"""The command `etcl`: its commands in the order of their use, and how errors are shown."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from etcl_deploy.cli.commands import artifacts, bundles, experiments, learning, serving
from etcl_deploy.cli.commands.console import err
from etcl_deploy.errors import EtclError
from etcl_deploy.report.tables import plain

app = typer.Typer(
    help="Continual learning that ends in something you can deploy: learn, bundle, serve, export.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
COMMANDS: dict[str, Callable[..., None]] = {
    "demo": learning.demo,
    "recipes": experiments.recipes,
    "train": learning.train,
    "add": learning.add,
    "eval": learning.evaluate,
    "compare": experiments.compare,
    "report": experiments.report,
    "bundle": bundles.bundle,
    "inspect": bundles.inspect,
    "verify": bundles.verify,
    "delta": bundles.delta,
    "apply": bundles.apply,
    "predict": artifacts.predict,
    "archive": artifacts.archive,
    "serve": serving.serve,
    "push": serving.push,
    "onnx": artifacts.onnx,
    "web": artifacts.web,
    "doctor": serving.doctor,
}
for name, command in COMMANDS.items():
    app.command(name=name)(command)
app.add_typer(experiments.data, name="data")


def main() -> None:
    """Run `etcl`. An error is one line and exit code 1; only --debug shows the traceback."""
    # Torch's threads sleep while they wait for each other, so that a busy neighbour costs its share and no more. This
    # must be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    arguments = [word for word in sys.argv[1:] if word != "--debug"]
    try:
        app(arguments, prog_name="etcl")
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        which = f" (process {os.environ['RANK']})" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
        err.print(f"[bold red]error{which}:[/]", plain(explain(error)), soft_wrap=True, highlight=False)
        sys.exit(1)


def explain(error: Exception) -> str:
    """The error in one line."""
    if isinstance(error, EtclError | OSError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed; `etcl doctor` shows what is missing"
    return f"{type(error).__name__}: {error} (a bug: see --debug)"


def show_version(wanted: bool) -> None:
    """Print the version and exit."""
    if wanted:
        from etcl_deploy import __version__

        print(f"etcl-deploy {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; may stand anywhere.")] = False,
) -> None:
    """Learn, bundle, serve, export."""
