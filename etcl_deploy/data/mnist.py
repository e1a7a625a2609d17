"""PMNIST: MNIST under ten fixed permutations of its pixels. Nothing but the classes is shared between tasks."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from etcl_deploy.data.arrays import labels_of, prepare_all, read_arrays
from etcl_deploy.learn.task import Task
from etcl_deploy.preprocessing import Preprocessing

FILE = "mnist.npz"
TASKS = 10
CLASSES = tuple(str(numeral) for numeral in range(10))


def pmnist(preprocessing: Preprocessing, root: Path, limit: int | None = None) -> list[Task]:
    """Ten tasks (or the first `limit`) of 60,000 training and 10,000 test items; the same permutations every time."""
    arrays = read_arrays(root / FILE, ("train_x", "train_y", "test_x", "test_y"))
    train_x, test_x = (prepare_all(arrays[part], preprocessing) for part in ("train_x", "test_x"))
    train_y, test_y = (labels_of(arrays[part], root / FILE) for part in ("train_y", "test_y"))
    tasks = []
    for number in range(TASKS)[:limit]:
        order = torch.randperm(
            preprocessing.height * preprocessing.width, generator=torch.Generator().manual_seed(number)
        )
        tasks.append(
            Task(
                f"permutation-{number + 1:02d}",
                CLASSES,
                permuted(train_x, order),
                train_y,
                permuted(test_x, order),
                test_y,
            )
        )
    return tasks


def permuted(images: Tensor, order: Tensor) -> Tensor:
    """The images with their pixels in another order."""
    return images.flatten(1, 2)[:, order].view_as(images)
