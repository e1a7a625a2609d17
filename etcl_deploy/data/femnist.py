"""F-EMNIST-1: ten tasks of handwritten characters in 62 classes, the order the paper's authors learn them in."""

from __future__ import annotations

import string
from pathlib import Path

from etcl_deploy.data.arrays import labels_of, prepare_all, read_arrays
from etcl_deploy.learn.task import Task
from etcl_deploy.preprocessing import Preprocessing

FILE = "femnist1.npz"
TASKS = 10
CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)


def femnist1(preprocessing: Preprocessing, root: Path, limit: int | None = None) -> list[Task]:
    """All ten tasks, or the first `limit`; not every one has an item of every class."""
    parts, numbers = ("train_x", "train_y", "test_x", "test_y"), range(TASKS)[:limit]
    arrays = read_arrays(root / FILE, [f"task{t:02d}_{part}" for t in numbers for part in parts])
    tasks = []
    for number in numbers:
        train_x, train_y, test_x, test_y = (arrays[f"task{number:02d}_{part}"] for part in parts)
        tasks.append(
            Task(
                f"sample-{number + 1:02d}",
                CLASSES,
                prepare_all(train_x, preprocessing),
                labels_of(train_y, root / FILE),
                prepare_all(test_x, preprocessing),
                labels_of(test_y, root / FILE),
            )
        )
    return tasks
