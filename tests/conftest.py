"""One small sequence, learned once, that most tests look at."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: tests share the cores with servers they start

import pytest
import torch
from PIL import Image

from etcl_deploy.bundle.bundle import Bundle, load_bundle
from etcl_deploy.config import Config
from etcl_deploy.core.task import Task
from etcl_deploy.learn.run import Run
from etcl_deploy.runs.session import Session, train
from etcl_deploy.runs.store import StoredRun
from etcl_deploy.runs.task_loading import find_tasks
from etcl_deploy.runs.to_bundle import bundle_run
from etcl_deploy.settings import load_recipe

ROOT = Path(__file__).parent.parent
ETCL = Path(sys.executable).parent / "etcl"
# A shell that starts the tests in the background lets them, and every command they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@dataclass(frozen=True)
class Learned:
    """Five tasks of real digits on a narrow resnet18: fast to learn, with every kind of layer in it."""

    stored: StoredRun
    tasks: list[Task]
    directory: Path
    path: Path

    @property
    def run(self) -> Run:
        return self.stored.run

    @property
    def config(self) -> Config:
        return self.stored.config

    @property
    def bundle(self) -> Bundle:
        return load_bundle(self.path)


@pytest.fixture(scope="session")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    directory = tmp_path_factory.mktemp("learned")
    config = load_recipe("digits").with_values({"width": 8, "epochs": 2})
    found = find_tasks(config, None)
    stored = train(config, directory / "run", session=Session("cpu"), tasks=found)
    bundle_run(stored, directory / "digits.etcl")
    return Learned(stored, found.tasks, directory / "run", directory / "digits.etcl")


@pytest.fixture(params=["coded", "packed"])
def bundle_file(request: pytest.FixtureRequest, learned: Learned, tmp_path: Path) -> Path:
    """A copy a test may damage, with masks either way."""
    path = tmp_path / "copy.etcl"
    path.write_bytes(learned.bundle.to_bytes(request.param))
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three tasks of noisy stripes as folders of images, the first two of a kind."""
    generator = torch.Generator().manual_seed(0)
    for task, turned in (("a", False), ("b", False), ("c", True)):
        for number in range(20):
            for label in range(2):
                pixels = torch.randint(0, 60, (12, 12), generator=generator)
                pixels[label * 6 : label * 6 + 6] += 150
                drawn = (pixels.T if turned else pixels).contiguous().to(torch.uint8)
                path = tmp_path / "photos" / task / f"class-{label}" / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(drawn.numpy()).save(path)
    return tmp_path / "photos"
