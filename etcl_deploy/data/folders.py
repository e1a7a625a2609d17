"""Tasks from folders of images.

    DIR/<task>/<class>/*.png                    a seeded share of each class is held back for testing
    DIR/<task>/{train,test}/<class>/*.png       the user's own split
    DIR/tasks.toml                              optional: order = ["second", "first"]; else by name

Hidden files are left out; so is whatever else is no image of a class (notes, loose files, folders inside a class), and
that is counted and told. A damaged image is an error: nobody should find out later that half the data was skipped.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from etcl_deploy.errors import DataError, InputError
from etcl_deploy.learn.task import Task
from etcl_deploy.preprocessing import Preprocessing
from etcl_deploy.runtime.images import prepare

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp"})
ORDER_FILE = "tasks.toml"

Files = Mapping[str, Sequence[Path]]  # class -> its images


@dataclass(frozen=True)
class FolderTasks:
    """What was read, and the files that were left out because they are no images."""

    tasks: tuple[Task, ...]
    ignored: tuple[Path, ...]


def load_folder(
    directory: Path, preprocessing: Preprocessing, test_share: float, seed: int, limit: int | None
) -> FolderTasks:
    """Every task below `directory` (the first `limit`), decoded. Raises DataError naming the file at fault."""
    if not directory.is_dir():
        raise DataError(f"{directory} is not a directory; --data takes a folder of task folders")
    folders = _task_folders(directory)[:limit]
    if not folders:
        raise DataError(f"{directory} has no task folder; expected {directory}/<task>/<class>/*.png")
    ignored: list[Path] = []
    with ThreadPoolExecutor() as pool:
        tasks = []
        for folder in folders:
            train, test = _split_files(folder, test_share, seed, ignored)
            classes = tuple(train)
            train_x, train_y = _decode(train, preprocessing, pool)
            test_x, test_y = _decode(test, preprocessing, pool)
            tasks.append(Task(_name(folder), classes, train_x, train_y, test_x, test_y))
    return FolderTasks(tuple(tasks), tuple(ignored))


def _task_folders(directory: Path) -> list[Path]:
    """The task folders in the order they are learned; no two may have the same name to a reader."""
    folders = _subfolders(directory)
    order_file = directory / ORDER_FILE
    if order_file.exists():
        folders = _ordered(order_file, folders)
    seen: dict[str, Path] = {}
    for folder in folders:
        key = _name(folder).casefold()
        if key in seen:
            raise DataError(f"two tasks have the same name: {seen[key]} and {folder}; rename one")
        seen[key] = folder
    return folders


def _ordered(order_file: Path, folders: Sequence[Path]) -> list[Path]:
    try:
        order = tomllib.loads(order_file.read_text("utf-8"))["order"]
    except (OSError, ValueError, KeyError):
        raise DataError(f'{order_file} should hold one line: order = ["first", "second"]') from None
    by_name = {folder.name: folder for folder in folders}
    if not isinstance(order, list) or not all(isinstance(name, str) for name in order):
        raise DataError(f"{order_file}: order must be a list of folder names")
    for position, name in enumerate(order):
        if name in order[:position]:
            raise DataError(f"two tasks have the same name: {order_file} lists {name!r} twice")
        if name not in by_name:
            raise DataError(
                f"{order_file} names {name!r}, but there is no such folder; there are: {', '.join(by_name)}"
            )
    missing = [name for name in by_name if name not in order]
    if missing:
        raise DataError(f"{order_file} does not name the folder {missing[0]!r}; list every task")
    return [by_name[name] for name in order]


def _split_files(folder: Path, test_share: float, seed: int, ignored: list[Path]) -> tuple[Files, Files]:
    """The training and test files of one task, by class; classes are those of the training part."""
    folders = _subfolders(folder)
    # A class may be called "train"; a folder of that name is a part of a split if it holds folders itself.
    if any(part.name in ("train", "test") and _subfolders(part) for part in folders):
        if [part.name for part in folders] != ["test", "train"]:
            found = ", ".join(part.name for part in folders)
            raise DataError(f"{folder} holds {found}; a task that is split holds test and train, nothing else")
        train = _class_files(folder / "train", ignored)
        tested = _class_files(folder / "test", ignored)
        extra = [name for name in tested if name not in train]
        if extra:
            raise DataError(
                f"{folder / 'test' / extra[0]} is a class without training images; training has: {', '.join(train)}"
            )
        test = {name: tested.get(name, []) for name in train}
    else:
        files = _class_files(folder, ignored)
        generator = torch.Generator().manual_seed(seed)
        train, test = {}, {}
        for name, paths in files.items():
            train[name], test[name] = _hold_back(paths, test_share, generator)
    if len(train) < 2:
        raise DataError(f"{folder} has one class ({', '.join(train)}); a task needs at least two class folders")
    if not any(test.values()):
        raise DataError(f"{folder} has no image to test with; give each class at least two images")
    return train, test


def _hold_back(paths: Sequence[Path], share: float, generator: torch.Generator) -> tuple[list[Path], list[Path]]:
    """A seeded split of one class; at least one image on each side where there are two."""
    held = min(max(1, round(share * len(paths))), len(paths) - 1)
    chosen = set(torch.randperm(len(paths), generator=generator)[:held].tolist())
    return (
        [path for i, path in enumerate(paths) if i not in chosen],
        [path for i, path in enumerate(paths) if i in chosen],
    )


def _class_files(folder: Path, ignored: list[Path]) -> dict[str, list[Path]]:
    """Images of each class folder, by name; an empty class is an error, not a class nobody can predict."""
    ignored += [path for path in _visible(folder) if not path.is_dir()]
    classes: dict[str, list[Path]] = {}
    for class_folder in _subfolders(folder):
        images: list[Path] = []
        for path in _visible(class_folder):
            (images if path.suffix.lower() in SUFFIXES and path.is_file() else ignored).append(path)
        if not images:
            raise DataError(
                f"{class_folder} has no readable image; expected files ending in {', '.join(sorted(SUFFIXES))}"
            )
        classes[_name(class_folder)] = images
    if not classes:
        raise DataError(f"{folder} has no class folder; expected {folder}/<class>/*.png")
    return classes


def _name(folder: Path) -> str:
    """A folder's name as people type it; some file systems store accents apart from their letters."""
    return unicodedata.normalize("NFC", folder.name)


def _subfolders(folder: Path) -> list[Path]:
    return [path for path in _visible(folder) if path.is_dir()]


def _visible(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.iterdir()) if not path.name.startswith("."))


def _decode(files: Files, preprocessing: Preprocessing, pool: ThreadPoolExecutor) -> tuple[Tensor, Tensor]:
    def read(path: Path) -> Tensor:
        try:
            return prepare(path, preprocessing)
        except InputError as error:
            raise DataError(f"{error}; mend or remove it") from None

    paths = [path for images in files.values() for path in images]
    labels = [index for index, images in enumerate(files.values()) for _ in images]
    return torch.stack(list(pool.map(read, paths))), torch.tensor(labels)
