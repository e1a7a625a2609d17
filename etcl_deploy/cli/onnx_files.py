"""The files of `etcl onnx`: their names, and the images each is compared on."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from etcl_deploy.bundle.bundle import Bundle, load_bundle
from etcl_deploy.core import atomic
from etcl_deploy.data.user_data import read_own
from etcl_deploy.errors import EtclError, ExportError
from etcl_deploy.export.to_multitask import MultitaskReport, export_multitask
from etcl_deploy.export.to_onnx import MAX_LOSS, ExamplesOf, OnnxOptions, OnnxReport, export_task

TEST_SHARE = 0.5  # of images without a split: half to calibrate on, half to measure accuracy on
LONGEST = 200  # bytes of a file name without its ending
RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)  # reserved on Windows


def export_bundle(
    path: Path,
    output: Path,
    task: str | None,
    options: OnnxOptions,
    calibration: Path | None,
    max_loss: float,
    *,
    multitask: bool,
    force: bool,
    heard: Callable[[OnnxReport], None],
) -> Sequence[OnnxReport | MultitaskReport]:
    """Export `task` of a bundle file to `output`; without a task all of them, to a folder or, `multitask`, to one file.

    `calibration` is a folder of images to calibrate and compare on; `heard` gets the report of each single task.
    """
    bundle = load_bundle(path)
    wanted = list(bundle.tasks) if task is None else [bundle.task(task).name]
    folder = task is None and not multitask
    paths = {name: output / file for name, file in file_names(wanted).items()} if folder else {wanted[0]: output}
    check_free(list(paths.values()), path, force=force)
    examples = examples_in(calibration, bundle, wanted) if calibration else lambda task: None
    if multitask:
        return [export_multitask(bundle, output, options, examples)]
    return export_all(bundle, paths, options, examples, max_loss, heard)


def check_free(paths: Sequence[Path], bundle: Path, *, force: bool) -> None:
    """Refuse to replace existing files unless `force`, and the bundle in any case."""
    for path in paths:
        if path.parent.exists() and not path.parent.is_dir():
            raise ExportError(f"{path.parent} is a file; --all writes to a directory")
        atomic.check_replaceable(path)
        if path.resolve() == bundle.resolve():
            raise ExportError(f"{path} is the bundle itself; name another file")
    taken = [path for path in paths if path.exists()]
    if taken and not force:
        more = f" (and {len(taken) - 1} more)" if len(taken) > 1 else ""
        raise ExportError(f"{taken[0]}{more} is there already; --force replaces it")


def examples_in(folder: Path, bundle: Bundle, tasks: Iterable[str]) -> ExamplesOf:
    """The labelled images of each task, from a folder as `etcl train --data` takes it."""
    sources = {source.name: source for source in read_own(folder, TEST_SHARE, 0, None).tasks}
    missing = [task for task in tasks if task not in sources]
    if missing:
        expected = f"{folder}/{missing[0]}/<class>/*.png"
        raise ExportError(f"{folder} has no images for task {missing[0]!r}; expected {expected}")
    return lambda task: sources[task].prepared(bundle.preprocessing)


def file_names(tasks: Iterable[str]) -> dict[str, str]:
    """A file name for each task that every file system takes, distinct also where case is ignored."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    for task in tasks:
        readable = re.sub(r"[^\w.-]+", "_", unicodedata.normalize("NFC", task)).strip("._")
        kept = readable.encode()[:LONGEST].decode(errors="ignore") or "task"
        stem = f"_{kept}" if RESERVED.fullmatch(kept) else kept
        name, number = stem, 1
        while name.casefold() in taken:
            number += 1
            name = f"{stem}-{number}"
        taken.add(name.casefold())
        names[task] = f"{name}.onnx"
    return names


def export_all(
    bundle: Bundle,
    paths: Mapping[str, Path],
    options: OnnxOptions,
    examples: ExamplesOf = lambda task: None,
    max_loss: float = MAX_LOSS,
    heard: Callable[[OnnxReport], None] = lambda report: None,
) -> list[OnnxReport]:
    """Export each task to a file of its own; files stay when a later task fails."""
    reports: list[OnnxReport] = []
    for task, path in paths.items():
        try:
            reports.append(export_task(bundle, task, path, None, options, examples(task), max_loss))
        except EtclError as error:
            done = f"; {len(reports)} of {len(paths)} files were written before it" if reports else ""
            raise ExportError(f"task {task!r}: {error}{done}") from None
        heard(reports[-1])
    return reports
