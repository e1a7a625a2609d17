"""Every command in README.md runs, in order, as a newcomer types them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from conftest import ROOT
from PIL import Image

from etcl_deploy.errors import ServeError
from etcl_deploy.serve.process import stop
from etcl_deploy.serve.properties import DEFAULT_PORT, check_ports
from etcl_deploy.serve.server import find, names

README = (ROOT / "README.md").read_text("utf-8")
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
    if line and not line.startswith("#")
]
# The first is running now; the second would change the shell of the test.
NOT_HERE = {"sh run test", ". .venv/bin/activate"}


def test_the_readme_starts_with_the_two_commands() -> None:
    """No command comes before them: they do the set-up."""
    assert COMMANDS[:2] == ["sh run demo", "sh run test"]


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A copy of the tree, with photos of a user."""
    generated = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__")

    def unwanted(folder: str, names: list[str]) -> set[str]:
        own_runs = {"runs"} if Path(folder) == ROOT else set()  # etcl_deploy/runs is part of the package
        return generated(folder, names) | own_runs

    shutil.copytree(ROOT, tmp_path, ignore=unwanted, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for task in ("photos/site-a", "photos/site-b", "more-photos/site-c"):
        for shade, label in ((0, "good"), (150, "scratched")):
            for number in range(12):
                pixels = torch.randint(shade, shade + 100, (24, 24, 3), generator=generator).to(torch.uint8)
                path = tmp_path / task / label / f"{number}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels.numpy()).save(path)
    return tmp_path


@pytest.fixture
def environment(workplace: Path) -> Iterator[dict[str, str]]:
    """This environment in place of .venv; afterwards, servers that a failed test left running are stopped."""
    try:
        check_ports(DEFAULT_PORT)
    except ServeError as error:
        pytest.skip(f"the README's server needs its default ports: {error}")
    binaries = Path(sys.executable).parent
    yield {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}", "ETCL_VENV": str(binaries.parent)}
    for name in names(workplace / "model_store"):
        left = find(name, workplace / "model_store")
        if left:
            stop(left)


@pytest.mark.torchserve
def test_every_command_of_the_readme_runs(workplace: Path, environment: dict[str, str]) -> None:
    """Commands first, then the Python snippets; nothing is left running."""
    outputs = {}
    for command in COMMANDS:
        if command in NOT_HERE:
            continue
        done = subprocess.run(
            command, shell=True, cwd=workplace, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        outputs[command] = done.stdout
    assert outputs["sh run demo"].count("180/180 same") == 5 * 3
    largest = re.search(r"largest mixed batch\s+(\d+)", outputs["sh run demo"])
    assert largest and int(largest[1]) > 1, "tasks shared a batch"
    for code in re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE):
        done = subprocess.run([sys.executable, "-c", code], cwd=workplace, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "site-b" in done.stdout
    assert not [p for p in psutil.process_iter(["cwd"]) if str(workplace) in (p.info["cwd"] or "")]
