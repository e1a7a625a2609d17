"""From settings to a run: find the tasks, build the network, learn, save; take a run up again, or add to it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

from etcl_deploy.config import Config
from etcl_deploy.core.atomic import locked
from etcl_deploy.core.task import Task
from etcl_deploy.errors import RunError
from etcl_deploy.learn.checks import check_tasks
from etcl_deploy.learn.events import Event, ProbeStepDone, Report, Resumed, SettingsChanged, StepDone, TaskDone
from etcl_deploy.learn.run import Run
from etcl_deploy.learn.task_training import Checkpoint
from etcl_deploy.learn.trainer import learn_sequence
from etcl_deploy.network.distributed import ALONE, Distributed
from etcl_deploy.runs import store
from etcl_deploy.runs.build import build_network, choose_device
from etcl_deploy.runs.logs import write_logs
from etcl_deploy.runs.store import StoredRun
from etcl_deploy.runs.task_loading import FoundTasks, Note, find_tasks, origin_of, tasks_of


@dataclass(frozen=True)
class Session:
    """The circumstances runs are learned in: device, processes, listeners, data."""

    device: str = "auto"  # auto, cpu or cuda
    report: Report = lambda event: None  # hears every event of the trainer
    note: Note = lambda text: None  # hears what the user should know
    distributed: Distributed = ALONE
    data_root: Path | None = None  # where data sets are; None: $ETCL_DATA


def train(
    config: Config,
    directory: Path,
    *,
    data: Path | None = None,
    session: Session = Session(),
    tasks: FoundTasks | None = None,
) -> StoredRun:
    """Learn the config's sequence of tasks, or the tasks in `data`; `tasks` are those, where they are at hand already.

    The run in `directory` can be taken up again at any moment; whatever is wrong with settings or data leaves nothing
    there.
    """
    store.check_free(directory)
    network = build_network(config).to(choose_device(session.device))
    found = tasks or find_tasks(config, data, session.data_root)
    check_tasks(network, found.tasks, config.learning)
    for words in (*found.partial, *found.notes):
        session.note(words)
    origin = origin_of(found, data)
    group = session.distributed
    group.same(repr((config, origin.tasks)), "what is to be learned")  # from here on the first of them may write
    if group.first:
        directory.mkdir(parents=True, exist_ok=True)
    with _lock(directory, group):
        if group.first:
            store.check_free(directory)  # again: another process may have been quicker
        return _learn_waiting(StoredRun(Run(network), config, (origin,)), found.tasks, None, directory, session)


def resume(
    directory: Path, values: Mapping[str, Any] = MappingProxyType({}), *, session: Session = Session()
) -> StoredRun:
    """Go on with a run from where it was left; it ends with the bytes it would have had.

    With `values` the tasks it has yet to learn are learned with other settings, the first of them from its beginning if
    they say how.
    """
    store.check_there(directory)
    with _lock(directory, session.distributed):
        stored = store.load_run(directory, choose_device(session.device), finished=False)
        old = stored.config
        stored = _changed(stored, values) if values else stored
        tasks = tasks_of(stored, session.note, session.data_root)
        anew = stored.config.learning != old.learning or not stored.waiting
        checkpoint = None if anew else store.load_checkpoint(directory, stored.waiting[0])
        session.distributed.same(repr((stored.config, stored.digest, stored.waiting)), "what is left to be learned")
        # Only now: whatever is wrong with settings or data costs nothing.
        _tell_changes(old, stored.config, values, directory, session)
        return _learn_waiting(stored, tasks, checkpoint, directory, session)


def add(
    directory: Path, data: Path, values: Mapping[str, Any] = MappingProxyType({}), *, session: Session = Session()
) -> StoredRun:
    """Learn further tasks, from a folder, on a run that is complete; with `values`, with other settings."""
    store.check_there(directory)
    with _lock(directory, session.distributed):
        stored = store.load_run(directory, choose_device(session.device))
        if stored.waiting:
            leave_out = f"(with --tasks {len(stored.run.tasks)} to leave it out)"
            hint = f"first: {store.how_to_go_on(directory)} {leave_out}"
            raise RunError(f"{directory} has not learned {stored.waiting[0]!r} yet; {hint}")
        old = stored.config
        stored = _changed(stored, values) if values else stored
        new = find_tasks(replace(stored.config, tasks=None), data, session.data_root)
        check_tasks(stored.run.network, new.tasks, stored.config.learning)
        for words in new.notes:
            session.note(words)
        tasks = [*tasks_of(stored, session.note, session.data_root), *new.tasks]
        larger = replace(stored, origins=(*stored.origins, origin_of(new, data)))
        session.distributed.same(
            repr((stored.config, stored.digest, larger.origins[-1].tasks)), "what is to be learned"
        )
        _tell_changes(old, stored.config, values, directory, session)
        return _learn_waiting(larger, tasks, None, directory, session)


def _lock(directory: Path, distributed: Distributed) -> AbstractContextManager[None]:
    """Keep other runs of `etcl` out of the directory; of several processes that learn together, the first does."""
    return locked(directory) if distributed.first else nullcontext()


def _tell_changes(old: Config, new: Config, values: Mapping[str, Any], directory: Path, session: Session) -> None:
    """Report and log which of `values` differ from what held before."""
    if new != old and session.distributed.first:
        changed = SettingsChanged({k: value for k, value in values.items() if old.with_values({k: value}) != old})
        write_logs(directory)(changed)
        session.report(changed)


def _changed(stored: StoredRun, values: Mapping[str, Any]) -> StoredRun:
    """The run with other settings from here on; what it has learned must still fit them."""
    old, config = stored.config, stored.config.with_values(values)
    kept = {name: getattr(old.learning, name) for name in ("method", "seed", "weights", "similarity")}
    learning = replace(config.learning, **kept)
    free = {name: getattr(config, name) for name in ("tasks", "checkpoint_seconds", "memory_gb")}
    if replace(old, **free, learning=learning) != config:
        names = "--tasks, checkpoint_seconds, memory_gb"
        raise RunError(
            f"of a run that has begun only {names} and how a task is learned can change, not the method or the preset"
        )
    planned = [name for origin in stored.origins for name, _ in origin.tasks]
    asked = values.get("tasks")
    as_begun = asked == old.tasks and len(stored.origins) == 1  # more than there are is fine, then as now
    wanted = len(planned) if asked is None or as_begun else asked
    if not len(stored.run.tasks) <= wanted <= len(planned):
        raise RunError(f"{len(stored.run.tasks)} of {len(planned)} tasks are learned; --tasks {wanted} is not between")
    chosen = set(planned[:wanted])
    origins = (replace(o, tasks=[task for task in o.tasks if task[0] in chosen]) for o in stored.origins)
    return replace(stored, config=config, origins=tuple(o for o in origins if o.tasks))


def _learn_waiting(
    stored: StoredRun, tasks: Sequence[Task], checkpoint: Checkpoint | None, directory: Path, session: Session
) -> StoredRun:
    """Learn the tasks that are waiting, the first of them from `checkpoint` on."""
    run, group = stored.run, session.distributed
    writer = _Writer(stored, directory, new_checkpoint=checkpoint is None) if group.first else None
    with _polite_stop(session.note) as stop_wanted:

        def write_and_report(event: Event) -> None:
            stop = isinstance(event, StepDone | ProbeStepDone) and group.any(wanted=stop_wanted())
            if writer:
                writer.write(event, stop=stop)
            if stop:
                raise KeyboardInterrupt
            session.report(event)

        if checkpoint:
            write_and_report(Resumed(checkpoint.task, int(checkpoint.numbers["epoch"] or 0) + 1))
        run = learn_sequence(
            run.network,
            [task for task in tasks if task.name in stored.waiting],
            stored.config.learning,
            write_and_report,
            before=run,
            earlier=[task for task in tasks if task.name in run.tasks],
            checkpoint=checkpoint,
            distributed=group,
        )
    return writer.stored if writer else replace(stored, run=run)


class _Writer:
    """Writes a run to its directory: every task, and the task under way now and then or when it is to stop."""

    def __init__(self, stored: StoredRun, directory: Path, *, new_checkpoint: bool) -> None:
        store.tidy(directory)
        if new_checkpoint:
            store.remove_checkpoint(directory)
        self.stored = store.save(stored, directory)
        self._directory = directory
        self._saved = time.monotonic()
        self._log = write_logs(directory)

    def write(self, event: Event, *, stop: bool) -> None:
        """Write what an event of the trainer brings."""
        if isinstance(event, TaskDone):
            self.stored = store.save(replace(self.stored, run=event.run), self._directory)
        elif isinstance(event, StepDone):
            due = time.monotonic() - self._saved >= self.stored.config.checkpoint_seconds
            if stop or due:
                store.save_checkpoint(event.checkpoint(), self._directory)
                self._saved = time.monotonic()
        self._log(event)


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
