"""From settings to a run: find the tasks, build the network, learn, save; take a run up again, or add to it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

from etcl_deploy.config import Config
from etcl_deploy.core.atomic import locked
from etcl_deploy.core.task import Task
from etcl_deploy.errors import RunError
from etcl_deploy.learn.checks import check_tasks
from etcl_deploy.learn.events import Event, Report, Resumed, SettingsChanged, StepDone, TaskDone
from etcl_deploy.learn.run import Run
from etcl_deploy.learn.task_training import Checkpoint
from etcl_deploy.learn.trainer import learn_sequence
from etcl_deploy.network.distributed import ALONE, Distributed
from etcl_deploy.runs import store as directories
from etcl_deploy.runs.build import build_network, choose_device
from etcl_deploy.runs.logs import write_logs
from etcl_deploy.runs.store import StoredRun
from etcl_deploy.runs.task_loading import Note, find_tasks, origin_of, tasks_of


def train(
    config: Config,
    data: Path | None,
    directory: Path,
    device: str,
    report: Report,
    note: Note = lambda text: None,
    root: Path | None = None,
    distributed: Distributed = ALONE,
) -> Run:
    """Find the tasks and learn them, perhaps together with other processes; `note` hears what the user should know.

    The run in `directory` can be taken up again at any moment; whatever is wrong with settings or data leaves nothing
    there.
    """
    directories.check_free(directory)
    network = build_network(config).to(choose_device(device))
    found = find_tasks(config, data, root)
    check_tasks(network, found.tasks, config.learning)
    for words in (*found.partial, *found.notes):
        note(words)
    origin = origin_of(found, data)
    distributed.same(repr((config, origin.tasks)), "what is to be learned")  # from here on the first of them may write
    if distributed.first:
        directory.mkdir(parents=True, exist_ok=True)
    with _kept(directory, distributed):
        if distributed.first:
            directories.check_free(directory)  # again: another process may have been quicker
        stored = StoredRun(Run(network), config, (origin,))
        return _go_on(stored, found.tasks, None, directory, report, note, distributed)


def resume(
    directory: Path,
    device: str,
    report: Report,
    note: Note = lambda text: None,
    root: Path | None = None,
    values: Mapping[str, Any] = MappingProxyType({}),
    distributed: Distributed = ALONE,
) -> tuple[Run, Config]:
    """Go on with a run from where it was left; it ends with the bytes it would have had.

    With `values` the tasks it has yet to learn are learned with other settings, the first of them from its beginning if
    they say how.
    """
    directories.check_there(directory)
    with _kept(directory, distributed):
        stored = directories.load(directory, choose_device(device), finished=False)
        old = stored.config
        stored = _changed(stored, values) if values else stored
        tasks = tasks_of(stored, note, root)
        anew = stored.config.learning != old.learning or not stored.waiting
        checkpoint = None if anew else directories.load_checkpoint(directory, stored.waiting[0])
        distributed.same(repr((stored.config, stored.digest, stored.waiting)), "what is left to be learned")
        # Only now: whatever is wrong with settings or data costs nothing.
        if stored.config != old and distributed.first:
            changed = {key: value for key, value in values.items() if old.with_values({key: value}) != old}
            write_logs(directory)(SettingsChanged(changed))
            report(SettingsChanged(changed))
        return _go_on(stored, tasks, checkpoint, directory, report, note, distributed), stored.config


def add(
    directory: Path,
    data: Path,
    device: str,
    report: Report,
    note: Note = lambda text: None,
    root: Path | None = None,
    distributed: Distributed = ALONE,
) -> tuple[Run, Config]:
    """Learn further tasks, from a folder, on a run that is complete."""
    directories.check_there(directory)
    with _kept(directory, distributed):
        stored = directories.load(directory, choose_device(device))
        if stored.waiting:
            hint = (
                f"first: {directories.how_to_go_on(directory)} (with --tasks {len(stored.run.tasks)} to leave it out)"
            )
            raise RunError(f"{directory} has not learned {stored.waiting[0]!r} yet; {hint}")
        new = find_tasks(replace(stored.config, tasks=None), data, root)
        check_tasks(stored.run.network, new.tasks, stored.config.learning)
        for words in new.notes:
            note(words)
        tasks = [*tasks_of(stored, note, root), *new.tasks]
        larger = replace(stored, origins=(*stored.origins, origin_of(new, data)))
        distributed.same(repr((stored.digest, larger.origins[-1].tasks)), "what is to be learned")
        return _go_on(larger, tasks, None, directory, report, note, distributed), stored.config


def _kept(directory: Path, distributed: Distributed) -> AbstractContextManager[None]:
    """Keep other runs of `etcl` out of the directory; of several processes that learn together, the first does."""
    return locked(directory) if distributed.first else nullcontext()


def _changed(stored: StoredRun, values: Mapping[str, Any]) -> StoredRun:
    """The run with other settings from here on; what it has learned must still fit them."""
    old, config = stored.config, stored.config.with_values(values)
    kept = {name: getattr(old.learning, name) for name in ("method", "seed", "weights", "similarity")}
    learning = replace(config.learning, **kept)
    free = {name: getattr(config, name) for name in ("tasks", "checkpoint_seconds", "memory_gb")}
    if replace(old, **free, learning=learning) != config:
        names = "--tasks, checkpoint_seconds, memory_gb"
        raise RunError(f"of a run that has begun only {names} and how a task is learned can change, not the method")
    planned = [name for origin in stored.origins for name, _ in origin.tasks]
    asked = values.get("tasks")
    as_begun = asked == old.tasks and len(stored.origins) == 1  # more than there are is fine, then as now
    wanted = len(planned) if asked is None or as_begun else asked
    if not len(stored.run.tasks) <= wanted <= len(planned):
        raise RunError(f"{len(stored.run.tasks)} of {len(planned)} tasks are learned; --tasks {wanted} is not between")
    chosen = set(planned[:wanted])
    origins = (replace(o, tasks=[task for task in o.tasks if task[0] in chosen]) for o in stored.origins)
    return replace(stored, config=config, origins=tuple(o for o in origins if o.tasks))


def _go_on(
    stored: StoredRun,
    tasks: Sequence[Task],
    checkpoint: Checkpoint | None,
    directory: Path,
    report: Report,
    note: Note,
    distributed: Distributed,
) -> Run:
    """Learn the tasks that are waiting, the first of them from `checkpoint` on."""
    run, config, waiting = stored.run, stored.config, stored.waiting
    write = _writer(stored, directory, new_checkpoint=checkpoint is None) if distributed.first else _nothing
    with _polite_stop(note) as stop_wanted:

        def write_and_report(event: Event) -> None:
            stop = isinstance(event, StepDone) and distributed.any(wanted=stop_wanted())
            write(event, stop)
            if stop:
                raise KeyboardInterrupt
            report(event)

        if checkpoint:
            write_and_report(Resumed(checkpoint.task, int(checkpoint.numbers["epoch"] or 0) + 1))
        return learn_sequence(
            run.network,
            [task for task in tasks if task.name in waiting],
            config.learning,
            write_and_report,
            before=run,
            earlier=[task for task in tasks if task.name in run.tasks],
            checkpoint=checkpoint,
            distributed=distributed,
        )


def _writer(stored: StoredRun, directory: Path, *, new_checkpoint: bool) -> Callable[[Event, bool], None]:
    """What writes a run to its directory: every task, and the task under way now and then or when it is to stop."""
    directories.tidy(directory)
    if new_checkpoint:
        directories.remove_checkpoint(directory)
    directories.save(stored, directory)
    saved, log = time.monotonic(), write_logs(directory)

    def write(event: Event, stop: bool) -> None:
        nonlocal saved
        if isinstance(event, TaskDone):
            directories.save(replace(stored, run=event.run), directory)
        elif isinstance(event, StepDone) and (stop or time.monotonic() - saved >= stored.config.checkpoint_seconds):
            directories.save_checkpoint(event.checkpoint(), directory)
            saved = time.monotonic()
        log(event)

    return write


def _nothing(event: Event, stop: bool) -> None:
    """What a process does that leaves writing to another."""


@contextmanager
def _polite_stop(note: Note) -> Iterator[Callable[[], bool]]:
    """While it lasts, the first Ctrl-C (or SIGTERM) only asks to stop; a second one stops at once."""
    wanted = threading.Event()

    def ask(number: int, frame: object) -> None:
        if wanted.is_set():
            raise KeyboardInterrupt
        wanted.set()
        note("stopping after this step; press Ctrl-C again to stop at once")

    with hearing((signal.SIGINT, signal.SIGTERM), ask):
        yield wanted.is_set


@contextmanager
def hearing(signals: Iterable[signal.Signals], answer: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """While it lasts, `answer` is called when one of these signals comes.

    What the caller has set to be ignored (nohup) stays ignored; only the main thread hears any.
    """
    here = threading.current_thread() is threading.main_thread()
    heard = [number for number in signals if here and signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, answer) for number in heard}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
