"""A network of the user's own, named on the command line as package.module:function."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ETCL
from PIL import Image

from etcl_deploy.config import Config
from etcl_deploy.errors import ConfigError
from etcl_deploy.network.masked_network import MaskedNetwork
from etcl_deploy.runs.build import build_network
from etcl_deploy.runs.store import load_run
from etcl_deploy.runs.to_bundle import bundle_run

SOURCE = """
import torch
from torch import nn

def small(width=4):
    import nearby  # only in reach while the function is called
    return nn.Sequential(nn.Conv2d(1, width, 3), nn.ReLU(), nn.Flatten(), nn.Linear(width * 196, 2))

def number():
    return 3

def broken():
    raise RuntimeError("no network today")
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "nets_of_mine").mkdir()
    (tmp_path / "nets_of_mine" / "vision.py").write_text(SOURCE)
    (tmp_path / "nearby.py").write_text("")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] in ("nets_of_mine", "nearby")]:
        del sys.modules[name]


def built(backbone: str, **values: object) -> MaskedNetwork:
    return build_network(Config().with_values({"backbone": backbone, "size": 16, "channels": 1, **values}))


def test_a_backbone_can_be_a_function_of_the_users(project: Path) -> None:
    """Same seed, same weights; the search path and torch's own randomness are as before."""
    path, state = list(sys.path), torch.get_rng_state()
    one, two, other = (built("nets_of_mine.vision:small", width=3, seed=seed) for seed in (1, 1, 2))
    assert one.plan.shapes["0"] == (3, 14, 14)
    assert torch.equal(one.masked_layers["0"].weight, two.masked_layers["0"].weight)
    assert torch.equal(one.masked_layers["0"].scores, two.masked_layers["0"].scores)
    assert not torch.equal(one.masked_layers["0"].weight, other.masked_layers["0"].weight)
    assert built("nets_of_mine.vision:small").plan.shapes["0"] == (4, 14, 14)
    assert sys.path == path and torch.equal(torch.get_rng_state(), state)


def etcl(folder: Path, *words: str) -> Any:
    """The document that a command prints, run in a folder."""
    done = subprocess.run([ETCL, *words, "--json"], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_is_named_on_the_command_line_and_needs_no_import_later(project: Path) -> None:
    """Its package is looked for in the current directory; without it the run loads, and its bundle answers anywhere."""
    words = ("--backbone", "nets_of_mine.vision:small", "--epochs", "1", "--tasks", "1", "--set", "width=4")
    assert etcl(project, "train", "digits", "--run", "run", *words)["tasks"] == ["upright-a"]
    shutil.rmtree(project / "nets_of_mine")
    stored = load_run(project / "run")
    assert stored.config.network.backbone == "nets_of_mine.vision:small"
    assert stored.run.network.plan.shapes["0"] == (4, 14, 14)
    bundle_run(stored, project / "x.etcl")
    (project / "elsewhere").mkdir()
    Image.new("L", (16, 16), 200).save(project / "image.png")
    (answer,) = etcl(project / "elsewhere", "predict", "../x.etcl", "--task", "upright-a", "../image.png")
    assert answer["label"] in stored.run.network.finished["upright-a"].classes


@pytest.mark.parametrize(
    ("backbone", "reason"),
    [
        ("nets_of_mine.hearing:small", "cannot import module 'nets_of_mine.hearing'"),
        ("nets_of_mine.vision:large", "module 'nets_of_mine.vision' has no function 'large'"),
        ("nets_of_mine.vision:number", "must give a torch.nn.Module, not a int"),
        ("nets_of_mine.vision:broken", "could not be called: RuntimeError: no network today"),
        (":small", "cannot import module ''"),
    ],
)
def test_a_backbone_that_is_not_there_is_one_clear_error(project: Path, backbone: str, reason: str) -> None:
    """It says which part of the name is wrong, or what the function did."""
    with pytest.raises(ConfigError, match=reason):
        built(backbone)
