"""Five tasks from the 1,797 handwritten digits (8x8, grey) that ship with scikit-learn."""

from __future__ import annotations

import numpy as np
import torch

from etcl_deploy.data.source import Part, Source

TEST_EVERY = 5  # one item in five is a test item, in every task it appears in


def digits() -> list[Source]:
    """upright-a and upright-b (two halves, clearly similar), turned, negative, and parity (other classes)."""
    images, labels = _load()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).numpy()
    half_a, half_b = order[::2], order[1::2]
    numerals = tuple(str(numeral) for numeral in range(10))
    turned, negative = np.rot90(images, 1, (1, 2)), 255 - images

    def task(name: str, classes: tuple[str, ...], images: np.ndarray, labels: np.ndarray, half: np.ndarray) -> Source:
        test = np.arange(len(half)) % TEST_EVERY == 0
        train, held = (Part(images[half[chosen]], labels[half[chosen]]) for chosen in (~test, test))
        return Source(name, classes, train, held)

    return [
        task("upright-a", numerals, images, labels, half_a),
        task("upright-b", numerals, images, labels, half_b),
        task("turned", numerals, turned, labels, half_a),
        task("negative", numerals, negative, labels, half_b),
        task("parity", ("even", "odd"), images, labels % 2, half_a),
    ]


def _load() -> tuple[np.ndarray, np.ndarray]:
    """All images, uint8 `[n, 8, 8]` from 0 to 255, and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    # Whole numbers from 0 to 16; rounded in single precision, half to even, as ever.
    pixels = torch.from_numpy(data.images) * (255 / 16)
    return pixels.round().to(torch.uint8).numpy(), data.target.astype(np.int64)
