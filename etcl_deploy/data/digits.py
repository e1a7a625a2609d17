"""Five tasks from the 1,797 handwritten digits (8x8, grey) that ship with scikit-learn."""

from __future__ import annotations

import torch
from torch import Tensor

from etcl_deploy.learn.task import Task
from etcl_deploy.preprocessing import Preprocessing
from etcl_deploy.runtime.images import prepare

TEST_EVERY = 5  # one item in five is a test item, in every task it appears in


def digits(preprocessing: Preprocessing) -> list[Task]:
    """upright-a and upright-b (two halves, clearly similar), turned, negative, and parity (other classes)."""
    images, labels = _load()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    half_a, half_b = order[::2], order[1::2]
    numerals = tuple(str(numeral) for numeral in range(10))
    turned, negative = images.rot90(1, (1, 2)), 255 - images

    def task(name: str, classes: tuple[str, ...], images: Tensor, labels: Tensor, half: Tensor) -> Task:
        pixels = torch.stack([prepare(image, preprocessing) for image in images[half]])
        test = torch.arange(len(half)) % TEST_EVERY == 0
        chosen = labels[half]
        return Task(name, classes, pixels[~test], chosen[~test], pixels[test], chosen[test])

    return [
        task("upright-a", numerals, images, labels, half_a),
        task("upright-b", numerals, images, labels, half_b),
        task("turned", numerals, turned, labels, half_a),
        task("negative", numerals, negative, labels, half_b),
        task("parity", ("even", "odd"), images, labels % 2, half_a),
    ]


def _load() -> tuple[Tensor, Tensor]:
    """All images, uint8 `[n, 8, 8]` from 0 to 255, and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    values = torch.from_numpy(data.images)  # whole numbers from 0 to 16
    return (values * (255 / 16)).round().to(torch.uint8), torch.from_numpy(data.target).long()
