"""The command `etcl`: every command parses, makes one call and prints. Heavy imports live inside commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console, Group, RenderableType

from etcl_deploy.errors import EtclError, LearningError, ServeError
from etcl_deploy.render import plain

app = typer.Typer(
    help="Continual learning that ends in something you can deploy: learn, bundle, serve, export.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
out = Console()
err = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
BundleFile = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle, x.etcl.")]
BACKBONE_HELP = "fcn3, lenet5, alexnet, resnet18, or your own network: package.module:function."
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]
Device = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option(help="Where to learn; auto takes CUDA if there is one.")
]
DataRoot = Annotated[Path | None, typer.Option(help="Where recipes find their data; else $ETCL_DATA.")]
Store = Annotated[Path, typer.Option("--model-store", help="Where archives and servers live.")]


def main() -> None:
    """Run `etcl`; what is at fault in the input is one line and exit code 1, a traceback only with --debug."""
    arguments = [word for word in sys.argv[1:] if word != "--debug"]
    try:
        app(arguments, prog_name="etcl")
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        err.print("[bold red]error:[/]", plain(explain(error)), soft_wrap=True, highlight=False)
        sys.exit(1)


def explain(error: Exception) -> str:
    """One line about what went wrong."""
    if isinstance(error, EtclError | OSError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed; `etcl doctor` shows what is missing"
    return f"{type(error).__name__}: {error} (a bug: see --debug)"


def show(value: Any, *, as_json: bool, picture: RenderableType) -> None:
    """A result on stdout, for a program or for a person."""
    if as_json:
        print(json.dumps(value, indent=2, allow_nan=False))
    elif isinstance(picture, str):
        out.print("[green]✓[/]", plain(picture), soft_wrap=True, highlight=False)
    else:
        out.print(picture)


def show_version(wanted: bool) -> None:
    """Print the version and end."""
    if wanted:
        from etcl_deploy import __version__

        print(f"etcl-deploy {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show it.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback for errors; works anywhere.")] = False,
) -> None:
    """Learn, bundle, serve, export."""


@app.command()
def demo(
    workdir: Annotated[Path | None, typer.Option(help="Keep what is made here; otherwise it is removed.")] = None,
    as_json: Json = False,
) -> None:
    """The whole loop on real handwritten digits: learn, bundle, serve over HTTP, export, compare."""
    from tempfile import TemporaryDirectory

    from etcl_deploy.demo import run_demo
    from etcl_deploy.render import TrainingProgress, demo_report

    progress = TrainingProgress(err)
    with TemporaryDirectory(prefix="etcl-demo-") as temporary, progress.bars:
        result = run_demo(workdir or Path(temporary), progress, progress.stage)
    show(result.as_json(), as_json=as_json, picture=demo_report(result))
    if not all(task.agree for task in result.tasks):
        raise EtclError("the four ways to ask did not agree; see the table")


@app.command()
def train(
    recipe: Annotated[str | None, typer.Argument(help="A named experiment, e.g. digits, femnist1, pmnist.")] = None,
    run: Annotated[Path, typer.Option(help="A new directory for the run.")] = ...,  # type: ignore[assignment]
    data: Annotated[Path | None, typer.Option(help="Your own tasks: DIR/<task>/<class>/*.png.")] = None,
    backbone: Annotated[str | None, typer.Option(help=BACKBONE_HELP)] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over each task's data.")] = None,
    density: Annotated[float | None, typer.Option(help="Share of weights a mask keeps.")] = None,
    seed: Annotated[int | None, typer.Option(help="Decides everything random.")] = None,
    tasks: Annotated[int | None, typer.Option(help="Only the first N tasks.")] = None,
    device: Device = "auto",
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any config field.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run, perhaps with other settings.")] = False,
    data_root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """Learn a sequence of tasks: a recipe, or the folders in --data. Ctrl-C saves; --resume goes on."""
    from etcl_deploy import train as training
    from etcl_deploy.config import Config
    from etcl_deploy.settings import load_recipe, parse_settings

    named = {"backbone": backbone, "epochs": epochs, "density": density, "seed": seed, "tasks": tasks}
    values = parse_settings(settings or []) | {key: value for key, value in named.items() if value is not None}
    if resume:
        if recipe or data:
            raise typer.BadParameter("--resume goes on with the run's own recipe and data: leave them out")
        _learn(lambda report, note: training.resume(run, device, report, note, data_root, values), run, as_json=as_json)
        return
    if (recipe is None) == (data is None):
        raise typer.BadParameter("name a recipe, or your own folder with --data DIR (not both)")
    config = (load_recipe(recipe) if recipe else Config()).with_values(values)
    _learn(
        lambda report, note: (training.train(config, data, run, device, report, note, data_root), config),
        run,
        as_json=as_json,
    )


@app.command()
def add(
    run: RunFolder,
    data: Annotated[Path, typer.Option(help="The new tasks: DIR/<task>/<class>/*.png.")],
    device: Device = "auto",
    data_root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """Learn one or more further tasks on an existing run, with its own settings."""
    from etcl_deploy import train as training

    _learn(lambda report, note: training.add(run, data, device, report, note, data_root), run, as_json=as_json)


def _learn(learn: Callable[[Any, Any], tuple[Any, Any]], run: Path, *, as_json: bool) -> None:
    """Learn with progress on stderr, then show the run; if interrupted, say how to go on."""
    from etcl_deploy.learn.directory import how_to_go_on, load
    from etcl_deploy.render import TrainingProgress, run_report

    progress = TrainingProgress(err)
    try:
        with progress.bars:
            learned, config = learn(progress, progress.note)
    except KeyboardInterrupt:
        if (run / "run.json").exists():
            progress.note(f"interrupted; go on with: {how_to_go_on(run)}")
        raise
    except LearningError:
        if (run / "run.json").exists():
            progress.note(f"finished tasks are kept; --set NAME=VALUE may help: {how_to_go_on(run)}")
        raise
    summary = learned.summary(config)
    show({**summary, "digest": load(run).digest}, as_json=as_json, picture=run_report(summary))


@app.command(name="eval")
def evaluate(run: RunFolder, as_json: Json = False) -> None:
    """Accuracy matrix, ACC, BWT, share claimed; what each task was compared with, and which heads it changed."""
    from etcl_deploy.learn.directory import load
    from etcl_deploy.render import run_report, transfer_report

    stored = load(run)
    summary = stored.run.summary(stored.config)
    show(
        {**summary, "digest": stored.digest},
        as_json=as_json,
        picture=Group(run_report(summary), transfer_report(summary)),
    )


@app.command()
def bundle(
    run: RunFolder,
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write, x.etcl.")],
    as_json: Json = False,
) -> None:
    """Write one file with everything needed to predict."""
    from etcl_deploy.deploy import bundle_run
    from etcl_deploy.learn.directory import load

    stored = load(run)
    bundle_run(stored.run, stored.config, output)
    inspect(output, as_json)


@app.command()
def inspect(path: BundleFile, as_json: Json = False) -> None:
    """What is inside a bundle: bytes by part and by task."""
    from etcl_deploy.bundle.bundle import load_bundle
    from etcl_deploy.bundle.summary import summarize
    from etcl_deploy.render import bundle_report

    info = summarize(load_bundle(path), path)
    show(info, as_json=as_json, picture=bundle_report(info))


@app.command()
def verify(path: BundleFile, as_json: Json = False) -> None:
    """Check every digest of a bundle."""
    from etcl_deploy.bundle.bundle import load_bundle

    loaded = load_bundle(path)
    result = {"file": str(path), "ok": True, "digest": loaded.digest, "tasks": list(loaded.tasks)}
    line = f"{path}: {len(loaded.tasks)} tasks, every digest is right"
    show(result, as_json=as_json, picture=line)


@app.command()
def predict(
    path: BundleFile,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Images.")],
    task: Annotated[str, typer.Option(help="The task to ask.")],
    as_json: Json = False,
) -> None:
    """Class and scores of images."""
    from etcl_deploy.bundle.bundle import load_bundle
    from etcl_deploy.render import predictions_report
    from etcl_deploy.runtime.predictor import Predictor

    answers = Predictor(load_bundle(path)).predict(files, [task] * len(files))
    rows = [{"input": str(file), **answer.as_json()} for file, answer in zip(files, answers, strict=True)]
    show(rows, as_json=as_json, picture=predictions_report(rows))


@app.command()
def archive(
    path: BundleFile,
    name: Annotated[str, typer.Option(help="The model's name.")],
    model_store: Store = Path("model_store"),
    as_json: Json = False,
) -> None:
    """NAME.mar for TorchServe, complete: the server needs no etcl_deploy."""
    from etcl_deploy.export.to_mar import archive as write
    from etcl_deploy.render import size

    target = write(path, name, model_store)
    result = {"file": str(target), "name": name, "bytes": target.stat().st_size}
    line = f"{target} ({size(target.stat().st_size)})"
    show(result, as_json=as_json, picture=line)


@app.command()
def serve(
    path: Annotated[Path | None, typer.Argument(metavar="BUNDLE", help="x.etcl.")] = None,
    name: Annotated[str | None, typer.Option(help="The model's name; else the file's.")] = None,
    model_store: Store = Path("model_store"),
    port: Annotated[int, typer.Option(min=1, max=65531, help="First of five in a row.")] = 8080,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Processes that answer.")] = 1,
    stop: Annotated[bool, typer.Option("--stop", help="Stop the server.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Say whether it runs.")] = False,
    as_json: Json = False,
) -> None:
    """Start TorchServe on loopback with tokens on, and wait until it answers."""
    from etcl_deploy.bundle.bundle import load_bundle
    from etcl_deploy.deploy import serve_bundle
    from etcl_deploy.render import server_report
    from etcl_deploy.serve import server as servers

    if stop and status:
        raise typer.BadParameter("--stop or --status, not both")
    if path is None and not (stop or status):
        raise typer.BadParameter("name a bundle to serve, or use --status or --stop")
    chosen = name or (path.stem if path else _only_server(model_store))
    if stop:
        found = servers.find(chosen, model_store)
        if found is None:
            raise ServeError(f"no server named {chosen!r} was started from {model_store}")
        servers.stop(found)
    if stop or status:
        info = servers.status(chosen, model_store)
        show(info, as_json=as_json, picture=server_report(info))
    elif path:
        started = serve_bundle(path, chosen, model_store, port, workers)
        show(started.as_json(), as_json=as_json, picture=server_report(started.as_json()))
        line = started.example(next(iter(load_bundle(path).tasks)))
        err.print("[bold]try it:[/]", plain(line, "cyan"), soft_wrap=True, highlight=False)


@app.command()
def onnx(
    path: BundleFile,
    task: Annotated[str, typer.Option(help="The task to export.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write, f.onnx.")],
    as_json: Json = False,
) -> None:
    """One task as a stand-alone ONNX file, compared with the bundle before it is kept."""
    from etcl_deploy.bundle.bundle import load_bundle
    from etcl_deploy.export.to_onnx import export_task
    from etcl_deploy.render import size

    report = export_task(load_bundle(path), task, output)
    line = (
        f"{report.file} ({size(report.bytes)}, opset {report.opset}): same class for "
        f"{report.parity.same_class} of {report.parity.items} images, "
        f"largest relative difference {report.parity.max_rel_diff:.0e}"
    )
    show(asdict(report), as_json=as_json, picture=line)


@app.command()
def doctor(as_json: Json = False) -> None:
    """What works on this machine, what is missing, how to get it."""
    from etcl_deploy.doctor import examine
    from etcl_deploy.render import doctor_report

    checks = examine()
    show([asdict(c) for c in checks], as_json=as_json, picture=doctor_report(checks))
    if not all(check.ok or not check.needed for check in checks):
        raise typer.Exit(1)


def _only_server(model_store: Path) -> str:
    from etcl_deploy.serve.server import names

    found = names(model_store)
    if len(found) != 1:
        known = f"; there are: {', '.join(found)}" if found else f" in {model_store}"
        raise ServeError(f"name the server with --name{known}" if found else f"no server{known}")
    return found[0]
