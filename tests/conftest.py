"""One small sequence, learned once, that most tests look at."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from etcl_deploy.bundle.bundle import Bundle, load_bundle
from etcl_deploy.config import Config
from etcl_deploy.core.task import Task
from etcl_deploy.learn.run import Run
from etcl_deploy.runs.session import train
from etcl_deploy.runs.task_loading import find_tasks
from etcl_deploy.runs.to_bundle import bundle_run
from etcl_deploy.settings import load_recipe

ROOT = Path(__file__).parent.parent
ETCL = Path(sys.executable).parent / "etcl"
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@dataclass(frozen=True)
class Learned:
    """Five tasks of real digits on a narrow resnet18: fast to learn, with every kind of layer in it."""

    config: Config
    tasks: list[Task]
    run: Run
    directory: Path
    path: Path

    @property
    def bundle(self) -> Bundle:
        return load_bundle(self.path)


@pytest.fixture(scope="session")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    directory = tmp_path_factory.mktemp("learned")
    config = load_recipe("digits").with_values({"width": 8, "epochs": 2})
    tasks = find_tasks(config, None).tasks
    run = train(config, None, directory / "run", "cpu", lambda event: None)
    bundle_run(run, config, directory / "digits.etcl")
    return Learned(config, tasks, run, directory / "run", directory / "digits.etcl")


@pytest.fixture(params=["coded", "packed"])
def bundle_file(request: pytest.FixtureRequest, learned: Learned, tmp_path: Path) -> Path:
    """A copy a test may damage, with masks either way."""
    path = tmp_path / "copy.etcl"
    path.write_bytes(learned.bundle.to_bytes(request.param))
    return path
