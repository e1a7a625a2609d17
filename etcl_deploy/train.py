"""From settings to a run: find the tasks, build the network, learn, save; take a run up again, or add to it."""

from __future__ import annotations

import hashlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from etcl_deploy.atomic import locked
from etcl_deploy.config import Config
from etcl_deploy.data.arrays import data_root
from etcl_deploy.data.folders import load_folder
from etcl_deploy.data.sequences import load_sequence
from etcl_deploy.errors import ConfigError, DataError, RunError
from etcl_deploy.learn import directory as directories
from etcl_deploy.learn.backbones import BACKBONES
from etcl_deploy.learn.directory import Origin
from etcl_deploy.learn.events import Event, Report, StepDone, TaskDone
from etcl_deploy.learn.network import MaskedNetwork
from etcl_deploy.learn.run import Run
from etcl_deploy.learn.task import Task
from etcl_deploy.learn.trainer import check_tasks, learn_sequence
from etcl_deploy.plan import PlanError
from etcl_deploy.preprocessing import Preprocessing

Note = Callable[[str], None]


def load_tasks(config: Config, data: Path | None, root: Path | None = None) -> tuple[list[Task], tuple[Path, ...]]:
    """The tasks of a folder, or of the config's sequence; and the files that were no images."""
    images = config.images
    preprocessing = _preprocessing(config)
    if data is None:
        return load_sequence(config.sequence, preprocessing, data_root(root))[: config.tasks], ()
    found = load_folder(data, preprocessing, images.test_share, config.learning.seed, config.tasks)
    return list(found.tasks), found.ignored


def build_network(config: Config) -> MaskedNetwork:
    """A network with fresh weights and scores, as the config describes it."""
    network = config.network
    if network.backbone not in BACKBONES:
        raise ConfigError(f"unknown backbone {network.backbone!r}; known: {', '.join(sorted(BACKBONES))}")
    preprocessing = _preprocessing(config)
    image = (preprocessing.channels, preprocessing.height, preprocessing.width)
    width = {} if network.width is None else {"width": network.width}
    try:
        plan = BACKBONES[network.backbone](image, **width)
        _ = plan.shapes
    except PlanError as error:
        raise ConfigError(f"{network.backbone} does not fit images of {image}: {error}") from None
    generator = torch.Generator().manual_seed(config.learning.seed)
    return MaskedNetwork(plan, preprocessing, network.density, generator)


def train(
    config: Config,
    data: Path | None,
    directory: Path,
    device: str,
    report: Report,
    note: Note = lambda text: None,
    root: Path | None = None,
) -> Run:
    """Find the tasks and learn them; `note` hears what the user should know.

    The run in `directory` can be taken up again at any moment; whatever is wrong with settings or data leaves nothing
    there.
    """
    directories.check_free(directory)
    network = build_network(config).to(choose_device(device))
    tasks = _found(config, data, root, note)
    check_tasks(network, tasks)
    origins = (_origin(data, tasks),)
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory):
        directories.save(Run(network), config, origins, directory)
        return _go_on(Run(network), config, origins, tasks, directory, report, note)


def resume(
    directory: Path, device: str, report: Report, note: Note = lambda text: None, root: Path | None = None
) -> tuple[Run, Config]:
    """Go on with a run from where it was left; it ends with the bytes it would have had."""
    with locked(directory):
        stored = directories.load(directory, choose_device(device), finished=False)
        tasks = _tasks_of(stored, note, root)
        return _go_on(stored.run, stored.config, stored.origins, tasks, directory, report, note), stored.config


def add(
    directory: Path, data: Path, device: str, report: Report, note: Note = lambda text: None, root: Path | None = None
) -> tuple[Run, Config]:
    """Learn further tasks, from a folder, on a run that is complete."""
    with locked(directory):
        stored = directories.load(directory, choose_device(device))
        waiting = [name for origin in stored.origins for name in origin.tasks if name not in stored.run.tasks]
        if waiting:
            raise RunError(
                f"{directory} has not learned {waiting[0]!r} yet; first: etcl train --run {directory} --resume"
            )
        new = _found(replace(stored.config, tasks=None), data, root, note)
        check_tasks(stored.run.network, new)
        origins = (*stored.origins, _origin(data, new))
        tasks = [*_tasks_of(stored, note, root), *new]
        directories.save(stored.run, stored.config, origins, directory)
        return _go_on(stored.run, stored.config, origins, tasks, directory, report, note), stored.config


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one; asking for CUDA where there is none is an error."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no CUDA device is available here; use --device cpu or auto")
    return torch.device(name)


def _go_on(
    run: Run,
    config: Config,
    origins: tuple[Origin, ...],
    tasks: Sequence[Task],
    directory: Path,
    report: Report,
    note: Note,
) -> Run:
    """Learn the tasks that `run` has not, from where the first of them was left."""
    waiting = [name for origin in origins for name in origin.tasks if name not in run.tasks]
    rest = [task for task in tasks if task.name in waiting]
    earlier = [task for task in tasks if task.name in run.tasks]
    snapshot = directories.load_lesson(directory, rest[0].name) if rest else None
    saved = time.monotonic()
    with _polite_stop(note) as stop_wanted:

        def save_and_report(event: Event) -> None:
            nonlocal saved
            if isinstance(event, TaskDone):
                directories.save(event.run, config, origins, directory)
            elif isinstance(event, StepDone):
                due = time.monotonic() - saved >= config.checkpoint_seconds
                if due or stop_wanted():
                    directories.save_lesson(event.snapshot(), directory)
                    saved = time.monotonic()
                if stop_wanted():
                    raise KeyboardInterrupt
            if not isinstance(event, StepDone):
                directories.log_event(directory, _logged(event))
            report(event)

        return learn_sequence(
            run.network,
            rest,
            config.learning,
            save_and_report,
            before=run,
            earlier=earlier,
            snapshot=snapshot,
        )


@contextmanager
def _polite_stop(note: Note) -> Iterator[Callable[[], bool]]:
    """While it lasts, the first Ctrl-C (or SIGTERM) only asks to stop; a second one stops at once."""
    wanted = threading.Event()

    def ask(number: int, frame: object) -> None:
        if wanted.is_set():
            raise KeyboardInterrupt
        wanted.set()
        note("stopping after this step; press Ctrl-C again to stop at once")

    here = threading.current_thread() is threading.main_thread()
    heard = [n for n in (signal.SIGINT, signal.SIGTERM) if here and signal.getsignal(n) != signal.SIG_IGN]
    previous = {number: signal.signal(number, ask) for number in heard}
    try:
        yield wanted.is_set
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _logged(event: Event) -> dict[str, Any]:
    """An event as the log keeps it."""
    if isinstance(event, TaskDone):
        values: dict[str, Any] = {"task": event.task, "accuracy": list(event.run.matrix[-1])}
        values["heads"] = [asdict(change) for change in event.run.knowledge[event.task].changes]
    else:
        values = asdict(event)
    return {"event": type(event).__name__, "time": time.time(), **values}


def _found(config: Config, data: Path | None, root: Path | None, note: Note) -> list[Task]:
    tasks, ignored = load_tasks(config, data, root)
    if ignored:
        note(f"left out {len(ignored)} files that are not images, first {ignored[0]}")
    return tasks


def _tasks_of(stored: directories.Stored, note: Note, root: Path | None) -> list[Task]:
    """The tasks a run was made from, as far as they are still there; those it has yet to learn must be."""
    found: list[Task] = []
    for origin in stored.origins:
        needed = [name for name in origin.tasks if name not in stored.run.tasks]
        folder = Path(origin.folder) if origin.folder else None
        try:
            tasks, _ = load_tasks(
                stored.config if origin is stored.origins[0] else replace(stored.config, tasks=None), folder, root
            )
            found += [_unchanged(task, origin) for task in tasks if task.name in origin.tasks]
        except DataError as error:
            if needed:
                raise
            note(f"{error}. Accuracy of those tasks is carried over, where their heads do not change")
    return found


def _unchanged(task: Task, origin: Origin) -> Task:
    if digest(task) != origin.tasks[task.name]:
        raise DataError(f"the items of task {task.name!r} are not those the run began with; put them back to go on")
    return task


def _origin(data: Path | None, tasks: Sequence[Task]) -> Origin:
    return Origin(str(data.absolute()) if data else None, {task.name: digest(task) for task in tasks})


def digest(task: Task) -> str:
    """A task's classes and items as a SHA-256."""
    found = hashlib.sha256(json.dumps([task.name, task.classes]).encode())
    for tensor in (task.train_x, task.train_y, task.test_x, task.test_y):
        found.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.contiguous().numpy().data)
    return found.hexdigest()


def _preprocessing(config: Config) -> Preprocessing:
    images = config.images
    return Preprocessing(images.size, images.size, images.channels, images.mean, images.std)
