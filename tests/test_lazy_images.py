"""Images that stay on disk until they are looked at."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from PIL import Image

from etcl_deploy.config import Config
from etcl_deploy.core.pixels import prepare
from etcl_deploy.core.preprocessing import Preprocessing
from etcl_deploy.core.task import Items
from etcl_deploy.core.task import load as loaded
from etcl_deploy.data.lazy_images import ImageFiles
from etcl_deploy.errors import DataError
from etcl_deploy.runs.session import Session, resume, train
from etcl_deploy.runs.store import load_run

SETTINGS = {"size": 8, "width": 4, "epochs": 2, "batch_size": 8, "similar": "all", "tasks": 2}
PREPROCESSING = Preprocessing(8, 8, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks of two classes, thirteen images each, of different sizes and kinds."""
    root, chance = tmp_path_factory.mktemp("images"), random.Random(0)
    for task in ("first", "second"):
        for number, label in enumerate(("dark", "bright")):
            (root / task / label).mkdir(parents=True)
            for item in range(13):
                side = chance.randint(6, 20)
                pixels = bytes(chance.randint(128 * number, 128 * number + 127) for _ in range(side * side * 3))
                ending = "png" if item % 3 else "jpg"
                Image.frombytes("RGB", (side, side), pixels).save(root / task / label / f"{item}.{ending}")
    return root


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.*g"))


def test_they_are_what_they_are_in_memory(folder: Path) -> None:
    """Any batches, in any order, of all of them or of a part: the pixels that decoding each gives."""
    stored = ImageFiles(files(folder), PREPROCESSING)
    every = torch.stack([prepare(path, PREPROCESSING) for path in files(folder)])
    assert (len(stored), stored.shape, stored.dtype) == (len(every), every.shape, every.dtype)
    batches = [torch.tensor([3, 1, 1]), torch.tensor([], dtype=torch.int64), torch.arange(52).flip(0)]
    for images, batch in zip(stored.read(batches), batches, strict=True):
        assert torch.equal(images, every[batch])
    some = torch.tensor([7, 0, 51])
    assert torch.equal(loaded(stored.take(some)), every[some])
    items = Items(stored, torch.arange(52))
    kept, held = items.split(0.25, torch.Generator().manual_seed(0))
    assert torch.equal(loaded(kept.images), every[kept.labels])
    assert torch.equal(loaded(held.images), every[held.labels])
    (images, labels), *_ = held.read(held.batches(5), torch.device("cpu"))
    assert torch.equal(images, every[labels])


@pytest.mark.parametrize("method", ["etcl", "ewc", "gpm"])
def test_a_run_ends_with_the_same_bits_either_way(method: str, folder: Path, tmp_path: Path) -> None:
    """Streamed or in memory, a user gets the same digest; what is chosen is told."""
    digests, notes = [], []
    for memory in (4.0, 0.0):
        config = Config().with_values({**SETTINGS, "memory_gb": memory, "method": method})
        train(config, tmp_path / str(memory), data=folder, session=Session("cpu", note=notes.append))
        digests.append(load_run(tmp_path / str(memory)).digest)
    assert digests[0] == digests[1]
    assert len(notes) == 1
    assert "they are read from their files in every epoch" in notes[0]


def test_a_run_goes_on_with_other_memory(folder: Path, tmp_path: Path) -> None:
    """Begun in memory, interrupted, taken up again from disk: the bits of a run nobody disturbed."""
    config = Config().with_values(SETTINGS)
    train(config, tmp_path / "whole", data=folder, session=Session("cpu"))
    steps = iter(range(7))

    def interrupt(event: object) -> None:
        if next(steps, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        often = config.with_values({"checkpoint_seconds": 0})
        train(often, tmp_path / "run", data=folder, session=Session("cpu", report=interrupt))
    resume(tmp_path / "run", {"memory_gb": 0}, session=Session("cpu"))
    assert load_run(tmp_path / "run").digest == load_run(tmp_path / "whole").digest


def test_a_damaged_image_is_found_before_anything_is_learned(folder: Path, tmp_path: Path) -> None:
    """Named, however many there are; nothing is left where the run should be."""
    for path in files(folder):
        target = tmp_path / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    broken = tmp_path / "second" / "bright" / "4.png"
    broken.write_bytes(broken.read_bytes()[:50])
    config = Config().with_values({**SETTINGS, "memory_gb": 0})
    with pytest.raises(DataError, match=r"second/bright/4\.png.*mend or remove it"):
        train(config, tmp_path / "run", data=tmp_path, session=Session("cpu"))
    assert not (tmp_path / "run").exists()
