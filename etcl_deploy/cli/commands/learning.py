"""Learn: the demo, a run, what it came to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group

from etcl_deploy.cli.commands.console import (
    DataRoot,
    Device,
    Json,
    RunFolder,
    SetOption,
    config_of,
    err,
    settings_of,
    show,
)
from etcl_deploy.errors import EtclError, LearningError

if TYPE_CHECKING:
    from etcl_deploy.learn.events import Event, Report
    from etcl_deploy.runs.session import Session
    from etcl_deploy.runs.store import StoredRun

TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Write to RUN/tensorboard, too.")]
DATA_HELP = "Your own tasks: DIR/<task>/<class>/*.png, DIR/<task>.npz, or a CSV file."
METHOD_HELP = "etcl, or for comparison wsn, supsup, piggyback, hat, gpm, ewc, naive, one."
PRESET_HELP = "Every choice by the paper, or as in the authors' script: paper, authors."
BACKBONE_HELP = "fcn3, lenet5, alexnet, resnet18, or your own network: package.module:function."


def demo(
    workdir: Annotated[Path | None, typer.Option(help="Keep what is made here; otherwise it is removed.")] = None,
    as_json: Json = False,
) -> None:
    """The whole loop on real handwritten digits: learn, bundle, serve over HTTP, export, compare."""
    from tempfile import TemporaryDirectory

    from etcl_deploy.cli.progress import TrainingProgress
    from etcl_deploy.demo import run_demo
    from etcl_deploy.report.tables import demo_report

    progress = TrainingProgress(err)
    with TemporaryDirectory(prefix="etcl-demo-") as temporary, progress.bars:
        result = run_demo(workdir or Path(temporary), progress, progress.stage)
    document = result.as_json()
    show(document, as_json=as_json, picture=demo_report(document))
    if not all(task.agree for task in result.tasks):
        raise EtclError("the four ways to ask did not agree; see the table")


def train(
    recipe: Annotated[str | None, typer.Argument(help="A named experiment; `etcl recipes` lists them.")] = None,
    run: Annotated[Path, typer.Option(help="A new directory for the run.")] = ...,  # type: ignore[assignment]
    data: Annotated[Path | None, typer.Option(help=DATA_HELP)] = None,
    method: Annotated[str | None, typer.Option(help=METHOD_HELP)] = None,
    preset: Annotated[str | None, typer.Option(help=PRESET_HELP)] = None,
    backbone: Annotated[str | None, typer.Option(help=BACKBONE_HELP)] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over each task's data.")] = None,
    density: Annotated[float | None, typer.Option(help="Share of weights a mask keeps.")] = None,
    seed: Annotated[int | None, typer.Option(help="Decides everything random.")] = None,
    tasks: Annotated[int | None, typer.Option(help="Only the first N tasks.")] = None,
    device: Device = "auto",
    settings: SetOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run, perhaps with other settings.")] = False,
    tensorboard: TensorBoard = False,
    data_root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """Learn a sequence of tasks: a recipe, or the folders in --data. Ctrl-C saves; --resume goes on."""
    from etcl_deploy.runs import session as runs

    named = {"method": method, "preset": preset, "backbone": backbone, "epochs": epochs, "density": density}
    values = settings_of(settings, {**named, "seed": seed, "tasks": tasks})
    if resume and (recipe or data):
        raise typer.BadParameter("--resume goes on with the run's own recipe and data: leave them out")
    config = None if resume else config_of(recipe, data, values)
    with _session(run, device, data_root, tensorboard=tensorboard) as session:
        if config is None:
            stored = runs.resume(run, values, session=session)
        else:
            stored = runs.train(config, run, data=data, session=session)
    _show_run(stored, session, as_json=as_json)


def add(
    run: RunFolder,
    data: Annotated[Path, typer.Option(help=DATA_HELP)],
    device: Device = "auto",
    settings: SetOption = None,
    tensorboard: TensorBoard = False,
    data_root: DataRoot = None,
    as_json: Json = False,
) -> None:
    """Learn one or more further tasks on an existing run, with its own settings but for those of --set."""
    from etcl_deploy.runs import session as runs

    with _session(run, device, data_root, tensorboard=tensorboard) as session:
        stored = runs.add(run, data, settings_of(settings, {}), session=session)
    _show_run(stored, session, as_json=as_json)


def evaluate(
    run: RunFolder,
    one: Annotated[Path | None, typer.Option(help="A run of the same tasks with --method one: it gives FWT.")] = None,
    as_json: Json = False,
) -> None:
    """Accuracy matrix, ACC, BWT, FWT, share claimed; what each task was compared with, which heads it changed."""
    from etcl_deploy.report.tables import run_report, transfer_report
    from etcl_deploy.runs.compare import summary_beside
    from etcl_deploy.runs.store import load_run

    stored = load_run(run)
    summary = stored.summary(load_run(one)) if one else summary_beside(stored, run)
    show(summary.as_json(), as_json=as_json, picture=Group(run_report(summary), transfer_report(summary)))


@contextmanager
def _session(run: Path, device: str, data_root: Path | None, *, tensorboard: bool) -> Iterator[Session]:
    """A session with progress on stderr; if it is interrupted, the user is told how to go on.

    Of several processes that learn together the first does all of the speaking.
    """
    from etcl_deploy.cli.progress import TrainingProgress
    from etcl_deploy.network.distributed import joined
    from etcl_deploy.runs.build import choose_device
    from etcl_deploy.runs.logs import write_tensorboard
    from etcl_deploy.runs.session import Session
    from etcl_deploy.runs.store import RECORD, how_to_go_on

    with joined(choose_device(device).type) as distributed:
        progress = TrainingProgress(err if distributed.first else Console(quiet=True))
        reports: list[Report] = [progress, *([write_tensorboard(run)] if tensorboard and distributed.first else [])]

        def report(event: Event) -> None:
            for hear in reports:
                hear(event)

        try:
            with progress.bars:
                yield Session(device, report, progress.note, distributed, data_root)
        except KeyboardInterrupt:
            if (run / RECORD).exists():
                progress.note(f"interrupted; go on with: {how_to_go_on(run)}")
            raise
        except LearningError:
            if (run / RECORD).exists():
                progress.note(f"finished tasks are kept; --set NAME=VALUE may help: {how_to_go_on(run)}")
            raise


def _show_run(stored: StoredRun, session: Session, *, as_json: bool) -> None:
    from etcl_deploy.report.tables import run_report

    if session.distributed.first:
        summary = stored.summary()
        show(summary.as_json(), as_json=as_json, picture=run_report(summary))
