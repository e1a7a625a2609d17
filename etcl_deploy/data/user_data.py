"""A user's own tasks: a folder with one folder or `.npz` file for each, or a CSV file.

DIR/<task>/<class>/*.png, DIR/<task>/{train,test}/<class>/*.png     see folders.py
DIR/<task>.npz                                                      see npz.py
DIR/tasks.toml      optional: order = ["second", "first"]; else by name
FILE.csv                                                            see manifest.py
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from etcl_deploy.data.folders import name_of, read_folder, visible
from etcl_deploy.data.manifest import read_manifest
from etcl_deploy.data.npz import read_npz
from etcl_deploy.data.source import Source, hold_back
from etcl_deploy.errors import DataError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ORDER_FILE = "tasks.toml"


@dataclass(frozen=True)
class OwnTasks:
    """The user's tasks, and the files left out because they are no images."""

    tasks: tuple[Source, ...]
    ignored: tuple[Path, ...]


def read_own(path: Path, test_share: float, seed: int, limit: int | None) -> OwnTasks:
    """Every task at `path` (the first `limit`), in the order they are learned, each with a test part."""
    ignored: list[Path] = []
    if path.suffix.lower() == ".csv" and path.is_file():
        tasks = read_manifest(path)[:limit]
        _check_names([task.name for task in tasks], path)
    elif path.is_dir():
        tasks = [
            read_folder(entry, ignored) if entry.is_dir() else read_npz(entry, name_of(entry))
            for entry in _entries(path, ignored)[:limit]
        ]
    else:
        raise DataError(f"{path} is not a directory; --data takes a folder of task folders, or a .csv file")
    return OwnTasks(tuple(_with_test(task, test_share, seed) for task in tasks), tuple(ignored))


def _with_test(task: Source, share: float, seed: int) -> Source:
    if not len(task.test):
        task = hold_back(task, share, torch.Generator().manual_seed(seed))
    if not len(task.test):
        raise DataError(f"task {task.name!r} has no image to test with; give each class at least two images")
    return task


def _entries(directory: Path, ignored: list[Path]) -> list[Path]:
    """The folders and files that are tasks, in the order they are learned."""
    entries: list[Path] = []
    for path in visible(directory):
        if path.is_dir() or path.suffix.lower() == ".npz":
            entries.append(path)
        elif path.name != ORDER_FILE:
            ignored.append(path)
    if not entries:
        raise DataError(f"{directory} has no task folder; expected {directory}/<task>/<class>/*.png")
    names = [name_of(entry) for entry in entries]
    if names == ["test", "train"]:
        raise DataError(f"{directory} is one task, split; --data takes the folder it is in, which may hold others, too")
    _check_names(names, directory)
    order_file = directory / ORDER_FILE
    return _ordered(order_file, dict(zip(names, entries, strict=True))) if order_file.exists() else entries


def _check_names(names: Sequence[str], path: Path) -> None:
    """No two tasks may have the same name to a reader."""
    seen: dict[str, str] = {}
    for name in names:
        key = name.casefold()
        if key in seen:
            raise DataError(f"two tasks in {path} have the same name: {seen[key]!r} and {name!r}; rename one")
        seen[key] = name


def _ordered(order_file: Path, by_name: Mapping[str, Path]) -> list[Path]:
    try:
        order = tomllib.loads(order_file.read_text("utf-8"))["order"]
    except (OSError, ValueError, KeyError, RecursionError):
        raise DataError(f'{order_file} should hold one line: order = ["first", "second"]') from None
    if not isinstance(order, list) or not all(isinstance(name, str) for name in order):
        raise DataError(f"{order_file}: order must be a list of task names")
    order = [unicodedata.normalize("NFC", name) for name in order]
    for position, name in enumerate(order):
        if name in order[:position]:
            raise DataError(f"two tasks have the same name: {order_file} lists {name!r} twice")
        if name not in by_name:
            raise DataError(f"{order_file} names {name!r}, but there is no such task; there are: {', '.join(by_name)}")
    missing = [name for name in by_name if name not in order]
    if missing:
        raise DataError(f"{order_file} does not name the task {missing[0]!r}; list every one")
    return [by_name[name] for name in order]
