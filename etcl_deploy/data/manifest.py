"""Tasks from a CSV file `path,label,task[,split]`: one image a line, paths from the file's own folder."""

from __future__ import annotations

import csv
from pathlib import Path

from etcl_deploy.data.source import Part, Source
from etcl_deploy.errors import DataError

COLUMNS = ("path", "label", "task")
SPLITS = ("train", "test")
MAX_ROWS = 20_000_000

ManifestRows = list[tuple[Path, str, str]]  # image, label, part


def read_manifest(path: Path) -> list[Source]:
    """The tasks in the order they first appear; without a column `split` their test parts are empty."""
    tasks: dict[str, ManifestRows] = {}
    lines: dict[tuple[str, Path], int] = {}  # where an image of a task was named
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            columns = reader.fieldnames or []
            if len(set(columns)) < len(columns):
                raise DataError(f"{path} has two columns of the same name: {','.join(columns)}")
            missing = [name for name in COLUMNS if name not in columns]
            if missing:
                raise DataError(
                    f"{path} has no column {missing[0]!r}; its first line should be path,label,task[,split]"
                )
            for row in reader:
                where = f"{path}, line {reader.line_num}"
                if reader.line_num > MAX_ROWS:
                    raise DataError(f"{where}: at most {MAX_ROWS} lines are read")
                values = [row[name] for name in COLUMNS]
                if not all(values) or None in row:
                    raise DataError(f"{where}: {len(columns)} values are right, none of path, label and task empty")
                image, label, task = values
                split = row.get("split", "train")
                if split not in SPLITS:
                    raise DataError(f"{where}: split must be train or test, not {split!r}")
                if not (path.parent / image).is_file():
                    raise DataError(f"{where}: there is no file {path.parent / image}")
                seen = lines.setdefault((task, (path.parent / image).resolve()), reader.line_num)
                if seen != reader.line_num:
                    raise DataError(f"{where}: {image} is in task {task!r} already, by line {seen}; once is right")
                tasks.setdefault(task, []).append((path.parent / image, label, split))
    except OSError as error:
        raise DataError(f"cannot read {error.filename or path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is damaged or not a CSV file in UTF-8: {error}") from None
    if not tasks:
        raise DataError(f"{path} names no image")
    return [_source(name, rows, path) for name, rows in tasks.items()]


def _source(task: str, rows: ManifestRows, path: Path) -> Source:
    classes = sorted({label for _, label, split in rows if split == "train"})
    unknown = [label for _, label, _ in rows if label not in classes]
    if unknown:
        raise DataError(f"{path}: task {task!r} has test images of {unknown[0]!r}, but none to train with")
    if len(classes) < 2:
        raise DataError(f"{path}: task {task!r} has one class ({', '.join(classes)}); it needs at least two")
    train, test = (
        Part.of_files([(image, label) for image, label, part in rows if part == split], classes) for split in SPLITS
    )
    return Source(task, tuple(classes), train, test)
