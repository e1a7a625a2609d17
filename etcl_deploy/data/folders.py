"""A task from folders of images.

    TASK/<class>/*.png                    a share of each class is held back for testing
    TASK/{train,test}/<class>/*.png       the user's own split

Hidden files are left out. Whatever else is no image of a class (notes, loose files, folders inside a class) is left out
and reported. A damaged image is an error: nobody should find out later that half the data was skipped.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from pathlib import Path

from etcl_deploy.data.source import Part, Source
from etcl_deploy.errors import DataError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp"})


def read_folder(folder: Path, ignored: list[Path]) -> Source:
    """The task in a folder; with no split of its own, its test part is empty. `ignored` gathers the files left out."""
    folders = subfolders(folder)
    # A class may be called "train"; a folder of that name is a part of a split if it holds folders itself.
    if any(part.name in ("train", "test") and subfolders(part) for part in folders):
        if [part.name for part in folders] != ["test", "train"]:
            names = ", ".join(part.name for part in folders)
            raise DataError(f"{folder} holds {names}; a task that is split holds test and train, nothing else")
        train, test = (_class_files(folder / part, ignored) for part in ("train", "test"))
        extra = [name for name in test if name not in train]
        if extra:
            raise DataError(
                f"{folder / 'test' / extra[0]} is a class without training images; training has: {', '.join(train)}"
            )
    else:
        train, test = _class_files(folder, ignored), {}
    if len(train) < 2:
        raise DataError(f"{folder} has one class ({', '.join(train)}); a task needs at least two class folders")
    classes = tuple(train)
    train_part, test_part = (
        Part.of_files([(path, name) for name, images in files.items() for path in images], classes)
        for files in (train, test)
    )
    return Source(name_of(folder), classes, train_part, test_part)


def _class_files(folder: Path, ignored: list[Path]) -> dict[str, list[Path]]:
    """Images of each class folder, by name; an empty class is an error, not a class nobody can predict."""
    ignored += [path for path in visible(folder) if not path.is_dir()]
    classes: dict[str, list[Path]] = {}
    for class_folder in subfolders(folder):
        images: list[Path] = []
        for path in visible(class_folder):
            (images if path.suffix.lower() in SUFFIXES and path.is_file() else ignored).append(path)
        if not images:
            raise DataError(
                f"{class_folder} has no readable image; expected files ending in {', '.join(sorted(SUFFIXES))}"
            )
        name = name_of(class_folder)
        if name in classes:
            raise DataError(f"{folder} has two class folders of the same name, {name!r}; rename one")
        classes[name] = images
    if not classes:
        raise DataError(f"{folder} has no class folder; expected {folder}/<class>/*.png")
    return classes


def name_of(path: Path) -> str:
    """A folder's or file's name as people type it; some file systems store accents apart from their letters."""
    name = path.name if path.is_dir() else path.stem
    if not name.isprintable():
        raise DataError(f"{path.parent} holds {name!r}, a name that cannot be shown; rename it")
    return unicodedata.normalize("NFC", name)


def subfolders(folder: Path) -> list[Path]:
    """The folders in a folder, by name."""
    return [path for path in visible(folder) if path.is_dir()]


def visible(folder: Path) -> Iterator[Path]:
    """Files and folders that are not hidden, by name."""
    entries = sorted(folder.iterdir(), key=lambda path: unicodedata.normalize("NFC", path.name))
    return (path for path in entries if not path.name.startswith("."))
