"""Progress bars for training and downloads."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from etcl_deploy.learn.events import (
    AccuracyFell,
    Compared,
    EpochDone,
    Event,
    ProbeStepDone,
    Resumed,
    SettingsChanged,
    StepDone,
    TaskDone,
    TaskStarted,
    Warned,
)
from etcl_deploy.report.tables import BAD, GOOD, QUIET, plain


class TrainingProgress:
    """Two bars: the tasks of the sequence, and the epochs of the current task."""

    def __init__(self, console: Console) -> None:
        self.bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", style=QUIET, markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,  # a log gets only the lines
        )
        self.console = console
        self.position = 0
        self.similar = ""
        self.sequence = self.bars.add_task("tasks", total=None, note="", visible=False)
        self.epochs = self.bars.add_task("", total=None, note="", visible=False)

    def __call__(self, event: Event) -> None:
        """Show one event of the trainer."""
        if isinstance(event, TaskStarted):
            self.position = event.position
            self.bars.update(self.sequence, total=event.total, visible=event.total > 1)
            self.bars.reset(self.epochs, description=event.task, visible=True, note="")
        elif isinstance(event, Resumed):
            self.note(f"going on with {event.task}, epoch {event.epoch}")
        elif isinstance(event, SettingsChanged):
            self.note("from here on " + ", ".join(f"{key} = {value}" for key, value in event.values.items()))
        elif isinstance(event, Warned):
            self.note(f"{event.task}: {event.message}")
        elif isinstance(event, Compared):
            similar = [comparison.task for comparison in event.comparisons if comparison.similar]
            names = ", ".join(similar) if len(similar) <= 3 else f"{len(similar)} earlier tasks"
            self.similar = f"  similar to {names}" if similar else ""
        elif isinstance(event, AccuracyFell):
            change = f"from {event.before:.1f} to {event.after:.1f} %"
            why = f"on its test items: {event.task} changed its head (--set backward=off: no head changes)"
            self.console.print(
                Text.assemble(("✗ ", BAD), plain(f"{event.earlier} fell {change} {why}", BAD)), soft_wrap=True
            )
        elif isinstance(event, ProbeStepDone):
            done = event.epoch - 1 + event.step / event.steps
            start = f"as {event.start}" if event.start else "from nothing"
            self.bars.update(self.epochs, total=event.epochs, completed=done, note=f"a probe: beginning {start}")
        elif isinstance(event, StepDone):
            done = event.epoch - 1 + event.step / event.steps
            self.bars.update(self.epochs, total=event.epochs, completed=done)
            self.bars.update(self.sequence, completed=self.position - 1 + done / event.epochs)
        elif isinstance(event, EpochDone):
            validation = "" if event.validation is None else f"  validation {event.validation:.1f} %"
            self.bars.update(self.epochs, note=f"loss {event.loss:.3f}{validation}")
        elif isinstance(event, TaskDone):
            self.bars.update(self.epochs, visible=False)
            self.bars.update(self.sequence, completed=self.position)
            row = event.run.matrix[-1]
            quiet = f"{event.run.network.claimed():.0%} of the backbone claimed{self.similar}"
            self.console.print(
                Text.assemble(("✓ ", GOOD), plain(f"{event.task}: {row[-1]:.1f} %  "), plain(quiet, QUIET))
            )

    def note(self, text: str) -> None:
        """Print a line that stays on the screen."""
        self.console.print(plain(text, "yellow"), soft_wrap=True)

    def stage(self, name: str) -> None:
        """Show what is done between and after the tasks."""
        self.bars.reset(self.epochs, description=name, visible=True, total=None, note="")


class DownloadProgress:
    """A bar for each file; in a log, a line for each finished one."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self.bars = Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal)
        self._files: dict[str, TaskID] = {}

    def __call__(self, name: str, done: int, total: int) -> None:
        """Show how much of a file is downloaded."""
        if name not in self._files:
            self._files[name] = self.bars.add_task(name, total=total)
        self.bars.update(self._files[name], completed=done)
        if self.bars.disable and done == total:
            self.bars.console.print(plain(f"{name}: {total:,} bytes"))
