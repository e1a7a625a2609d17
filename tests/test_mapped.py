"""A packed bundle is mapped: processes that read it share its memory, and take no more of it than they use."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from factories import made_bundle

from etcl_deploy.bundle.bundle import load_bundle, reload_bundle

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not tell what is mapped")

READER = """
import sys
from etcl_deploy.bundle.bundle import load_bundle

bundle = load_bundle(sys.argv[1])
total = float(bundle.weights.sum()) + sum(int(bundle.mask(name).sum()) for name in bundle.tasks)
print("ready", flush=True)
sys.stdin.read()
"""


def mapped(path: Path, kind: str, process: int) -> int:
    """Bytes of a mapped file that a process has in its memory (Rss), or its share of them (Pss)."""
    total, ours = 0, False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = line.endswith(str(path))
        elif ours and line.startswith(f"{kind}:"):
            total += 1024 * int(line.split()[1])
    return total


def test_two_readers_share_one_copy(tmp_path: Path) -> None:
    """Each has all of the file, and half of its cost."""
    path = tmp_path / "x.etcl"
    path.write_bytes(made_bundle(20, "resnet18", 20, 16).to_bytes("packed"))
    readers = [
        subprocess.Popen([sys.executable, "-c", READER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        assert [reader.stdout.readline() for reader in readers if reader.stdout] == ["ready\n", "ready\n"]
        for reader in readers:
            size = mapped(path, "Rss", reader.pid)
            assert size > 0.95 * path.stat().st_size
            assert mapped(path, "Pss", reader.pid) < 0.55 * size
    finally:
        for reader in readers:
            reader.communicate("", timeout=60)


def test_a_bundle_loaded_again_takes_the_masks_that_are_used(tmp_path: Path) -> None:
    """40 masks of 136 KB: none is read before somebody asks; then the system brings what is around it, up to 1 MB."""
    path = tmp_path / "forty.etcl"
    path.write_bytes(made_bundle(40, "resnet18", 20, 8).to_bytes("packed"))
    again = reload_bundle(path, load_bundle(path).digest)
    before = mapped(path, "Rss", os.getpid())
    assert again.sizes["task/39/mask"] > 130_000
    assert before < path.stat().st_size - 30 * again.sizes["task/39/mask"]
    again.mask("täsk 20")
    assert before + 60_000 < mapped(path, "Rss", os.getpid()) < before + 3_000_000
