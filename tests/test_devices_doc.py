"""Every command and snippet of docs/devices.md runs, in order."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from browsing import CHROMIUM, served_folder, started_browser
from conftest import ETCL, ROOT
from PIL import Image

TEXT = (ROOT / "docs" / "devices.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `photos` of two sites and a bundle that has learned them."""
    folder = tmp_path_factory.mktemp("devices")
    chance = np.random.default_rng(0)
    for task in ("site-a", "site-b"):
        for label, shade in (("good", 0), ("scratched", 150)):
            for number in range(12):
                path = folder / "photos" / task / label / f"{number}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(chance.integers(shade, shade + 100, (24, 24, 3), np.uint8)).save(path)
    small = ("--epochs", "4", "--set", "width=4", "--set", "batch_size=8")
    for words in (("train", "--data", "photos", "--run", "run", *small), ("bundle", "run", "-o", "photos.etcl")):
        subprocess.run([ETCL, *words], cwd=folder, check=True, capture_output=True)
    return folder


def test_every_command_and_snippet_runs(photos: Path) -> None:
    """What needs npm is left out where there is none; a server that would run for ever is the browser's test."""
    commands = [line for block in blocks("sh") for line in block.splitlines() if "http.server" not in line]
    assert len(commands) >= 6
    for command in commands:
        if "etcl web" in command and shutil.which("npm") is None:
            continue
        done = subprocess.run(
            command.replace("etcl", str(ETCL), 1), shell=True, cwd=photos, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
    for code in blocks("python"):
        done = subprocess.run([sys.executable, "-c", code], cwd=photos, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "good" in done.stdout


@pytest.mark.skipif(CHROMIUM is None or shutil.which("npm") is None, reason="no chromium, or no npm")
def test_the_javascript_runs_in_a_page(photos: Path) -> None:
    """As a module beside the files `etcl web` wrote."""
    subprocess.run([ETCL, "web", "photos.etcl", "-o", "site"], cwd=photos, check=True, capture_output=True)
    (code,) = blocks("js")
    (photos / "site" / "own.js").write_text(code)
    (photos / "site" / "own.html").write_text(
        '<!doctype html><link rel="icon" href="data:,"><script type="module" src="own.js"></script>'
    )
    with served_folder(photos / "site") as address, started_browser() as browser:
        page = browser.new_page()
        with page.expect_console_message() as said:
            page.goto(f"{address}own.html")
        assert said.value.text in ("good", "scratched")
