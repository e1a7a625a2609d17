"""Load tasks from a named sequence or a folder, and check that they are still those a run began with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path

from etcl_deploy.config import Config
from etcl_deploy.core.task import Task, parts
from etcl_deploy.data.inventory import data_root, read_data_set
from etcl_deploy.data.sequences import sequence_of
from etcl_deploy.data.source import Source
from etcl_deploy.data.user_data import read_own
from etcl_deploy.errors import DataError
from etcl_deploy.runs.build import preprocessing_of
from etcl_deploy.runs.store import Origin, StoredRun

CHUNK = 1024  # items that are digested together

Note = Callable[[str], None]


@dataclass(frozen=True)
class FoundTasks:
    """Tasks, where only a part of a data set was at hand, and what else the user should know; both in words."""

    tasks: list[Task]
    partial: list[str]
    notes: list[str]


def find_tasks(config: Config, data: Path | None, root: Path | None = None) -> FoundTasks:
    """The tasks of a folder or file, or of the config's sequence."""
    if data is not None:
        own = read_own(data, config.images.test_share, config.learning.seed, config.tasks)
        ignored = (
            [f"left out {len(own.ignored)} files that are not images, first {own.ignored[0]}"] if own.ignored else []
        )
        return _prepared(own.tasks, config, [], ignored)
    partial: list[str] = []

    @cache
    def find(name: str) -> Source:
        source, lacking = read_data_set(name, data_root(root))
        if lacking:
            partial.append(lacking)
        return source

    sequence = sequence_of(config.sequence)
    sources = list(islice(sequence.make(find), config.tasks))
    total = sequence.count or len(sources)
    wanted = min(total, config.tasks or total)
    if len(sources) < wanted:
        partial.append(f"{len(sources)} of {wanted} tasks can be made from what is there")
    return _prepared(sources, config, partial, [])


def _prepared(sources: Sequence[Source], config: Config, partial: list[str], notes: list[str]) -> FoundTasks:
    """The sources as tasks; if their images would fill more memory than they may, they are read when needed."""
    preprocessing = preprocessing_of(config)
    needed = sum(source.file_bytes(preprocessing) for source in sources) / 1e9
    stored = needed > config.memory_gb
    if stored:
        why = f"{needed:.2g} GB of images, more than memory_gb = {config.memory_gb:g}"
        notes = [*notes, f"{why}: they are read from their files in every epoch"]
    return FoundTasks([source.prepared(preprocessing, stored=stored) for source in sources], partial, notes)


def origin_of(new: FoundTasks, data: Path | None) -> Origin:
    """The origin of tasks, for a run to remember."""
    known = [(task.name, digest(task)) for task in new.tasks]
    return Origin(str(data.absolute()) if data else None, known, new.partial)


def tasks_of(stored: StoredRun, note: Note, root: Path | None) -> list[Task]:
    """The tasks a run was made from, as far as they are still there; those it has yet to learn must be."""
    tasks: list[Task] = []
    for number, origin in enumerate(stored.origins):
        folder = Path(origin.folder) if origin.folder else None
        limit = stored.config.tasks if number == 0 else None  # what was added later was added whole
        try:
            there = {task.name: task for task in find_tasks(replace(stored.config, tasks=limit), folder, root).tasks}
        except DataError as error:
            if any(name in stored.waiting for name, _ in origin.tasks):
                raise
            note(f"{error}. The accuracy of those tasks is carried over where they cannot have changed")
            continue
        for name, known in origin.tasks:
            if name in there and digest(there[name]) == known:
                tasks.append(there[name])
                continue
            fault = "has other items than the run began with" if name in there else "is no longer there"
            if name in stored.waiting:
                raise DataError(f"task {name!r} {fault}; put back what was there to go on")
            note(f"task {name!r} {fault}. Its accuracy is carried over where it cannot have changed")
    return tasks


def digest(task: Task) -> str:
    """A task's classes and items as a SHA-256."""
    sha256 = hashlib.sha256(json.dumps([task.name, task.classes]).encode())
    for values in (task.train_x, task.train_y, task.test_x, task.test_y):
        sha256.update(f"{values.dtype} {list(values.shape)}".encode())
        for part in parts(values, CHUNK):
            sha256.update(part.contiguous().numpy().data)
    return sha256.hexdigest()
