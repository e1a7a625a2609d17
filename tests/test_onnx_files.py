"""`etcl onnx`: the files it writes, their names, and its report."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import Learned
from factories import made_bundle
from test_cli import answer, etcl, fails

from etcl_deploy.bundle.bundle import save
from etcl_deploy.cli.onnx_files import export_all, file_names
from etcl_deploy.core.pixels import png
from etcl_deploy.core.task import Task
from etcl_deploy.edge import Model
from etcl_deploy.errors import ExportError
from etcl_deploy.export.to_onnx import OnnxOptions

FILES = {
    "plain": "plain.onnx",
    "with space": "with_space.onnx",
    "a/b": "a_b.onnx",
    "a\\b": "a_b-2.onnx",
    "../../etc": "etc.onnx",
    "täsk ü": "täsk_ü.onnx",
    "数字": "数字.onnx",
    "a_b": "a_b-3.onnx",
    "A B": "A_B-4.onnx",
    "con": "_con.onnx",
    ".hidden": "hidden.onnx",
    "...": "task.onnx",
    "x" * 300: f"{'x' * 200}.onnx",
    "数" * 300: f"{'数' * 66}.onnx",
}


def test_every_task_has_a_name_every_file_system_takes() -> None:
    """No path, no reserved name, none too long, no two that differ only in case; readable letters stay."""
    assert file_names(FILES) == FILES


def test_tasks_of_any_name_and_any_number_of_classes(tmp_path: Path) -> None:
    """The metadata of a file keeps the name as it is, and all classes, two or a hundred."""
    bundle = made_bundle(len(FILES), "fcn3", 5, 4)
    tasks = {name: replace(task, name=name) for name, task in zip(FILES, bundle.tasks.values(), strict=True)}
    head = {key: value.repeat((50, 1) if value.ndim == 2 else 50) for key, value in tasks["plain"].head.items()}
    tasks["plain"] = replace(tasks["plain"], classes=tuple(f"ç/{n}" for n in range(100)), head=head)
    paths = {task: tmp_path / "out" / name for task, name in FILES.items()}
    reports = export_all(replace(bundle, tasks=tasks), paths, OnnxOptions())
    assert [report.task for report in reports] == list(FILES)
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(FILES.values())
    for report in reports:
        model = Model(report.file)
        assert model.tasks == (report.task,)
        assert model.classes[report.task] == tasks[report.task].classes
        assert len(model.predict([np.zeros((4, 4), np.uint8)])[0].scores) == len(tasks[report.task].classes)


def test_nothing_is_overwritten_unless_asked(learned: Learned, tmp_path: Path) -> None:
    """One existing file stops all before anything is written; the bundle is never replaced."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "turned.onnx").write_bytes(b"mine")
    assert "turned.onnx is there already; --force" in fails("onnx", learned.path, "--all", "-o", out)
    assert [path.name for path in out.iterdir()] == ["turned.onnx"]
    assert len(answer("onnx", learned.path, "--all", "-o", out, "--force")) == 5
    assert len(list(out.iterdir())) == 5
    assert "is a file; --all writes to a directory" in fails("onnx", learned.path, "--all", "-o", out / "turned.onnx")
    assert "is a directory; name a file" in fails("onnx", learned.path, "--task", "parity", "-o", out, "--force")
    before = learned.path.read_bytes()
    for options in (("--task", "parity"), ("--multitask",)):
        assert "is the bundle itself" in fails("onnx", learned.path, *options, "-o", learned.path, "--force")
    assert learned.path.read_bytes() == before


def test_a_task_that_fails_says_which_and_what_was_written(learned: Learned, tmp_path: Path) -> None:
    """Files written before it stay."""
    paths = {task: tmp_path / name for task, name in file_names(learned.bundle.tasks).items()}

    def examples(task: str) -> Task | None:
        return learned.tasks[0] if task == "parity" else None

    with pytest.raises(
        ExportError, match=r"task 'parity': the images for task 'parity' have the class '0'.*; 4 of 5 files"
    ):
        export_all(learned.bundle, paths, OnnxOptions(), examples)
    assert len(list(tmp_path.iterdir())) == 4


def folder_of(task: Task, folder: Path, items: int = 60) -> Path:
    for position in range(items):
        label = task.classes[int(task.train_y[position])]
        path = folder / task.name / label / f"{position}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(task.train_x[position]))
    return folder


def test_from_the_command_line(learned: Learned, tmp_path: Path) -> None:
    """One task, all tasks, one file for all, 8 bits with images to compare on: JSON as promised."""
    one = answer("onnx", learned.path, "--task", "parity", "-o", tmp_path / "p.onnx", "--compact", "--fp16")
    assert {"file", "task", "bytes", "opset", "parity"} <= one.keys()
    assert (one["task"], one["opset"], one["precision"], one["compact"]) == ("parity", 17, "fp16", True)
    assert one["parity"].keys() == {"items", "same_class", "max_rel_diff"}
    every = answer("onnx", learned.path, "--all", "-o", tmp_path / "all")
    assert [row["task"] for row in every] == list(learned.bundle.tasks)
    whole = answer("onnx", learned.path, "--multitask", "-o", tmp_path / "all.onnx")
    assert whole["tasks"] == list(learned.bundle.tasks)
    images = folder_of(learned.tasks[4], tmp_path / "images")
    options = ("--int8", "--calibration", images, "--max-loss", "20", "-o", tmp_path / "q.onnx", "--force")
    small = answer("onnx", learned.path, "--task", "parity", *options)
    assert small["accuracy"].keys() == {"items", "before", "after"}
    assert small["accuracy"]["items"] == 30
    about = {entry.key: entry.value for entry in onnx.load(tmp_path / "q.onnx").metadata_props}
    assert json.loads(about["etcl.measured"]) == small["accuracy"]
    assert "no images for task 'turned'" in fails("onnx", learned.path, "--task", "turned", *options)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "one of --task NAME, --all and --multitask"),
        (["--all", "--multitask"], "one of --task NAME, --all and --multitask"),
        (["--all", "--fp16", "--int8"], "--fp16 or --int8, not both"),
        (["--all", "--int8"], "--int8 needs --calibration"),
        (["--multitask", "--compact"], "--multitask does not go with"),
    ],
)
def test_options_that_do_not_go_together(learned: Learned, tmp_path: Path, options: list[str], reason: str) -> None:
    """Wrong usage exits with code 2 and writes nothing."""
    done = etcl("onnx", learned.path, "-o", tmp_path / "x", *options)
    assert done.returncode == 2
    assert reason in " ".join(done.stderr.replace("│", " ").split())
    assert not list(tmp_path.iterdir())


def test_the_same_bundle_gives_the_same_bytes(tmp_path: Path) -> None:
    """Two exports of a bundle are equal, and name the versions that wrote them."""
    save(tmp_path / "x.etcl", made_bundle(2).to_bytes("coded"))
    for name in ("a", "b"):
        answer("onnx", tmp_path / "x.etcl", "--all", "-o", tmp_path / name, "--compact")
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
        about = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
        assert set(json.loads(about["etcl.versions"])) == {"etcl_deploy", "onnx", "torch"}
