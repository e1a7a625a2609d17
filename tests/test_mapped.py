"""Processes that read the same packed bundle share its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from factories import made_bundle

# Reads every weight and mask, says how much of the file it has mapped (Rss) and its share of that (Pss), and waits.
READER = """
import json, re, sys
from pathlib import Path
from etcl_deploy.bundle.bundle import load_bundle

bundle = load_bundle(sys.argv[1])
total = float(bundle.weights.sum()) + sum(int(bundle.mask(name).sum()) for name in bundle.tasks)
print("ready", flush=True)
for line in sys.stdin:
    sizes, here = {"Rss": 0, "Pss": 0}, False
    for row in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", row):
            here = row.endswith(sys.argv[1])
        elif here and row.partition(":")[0] in sizes:
            sizes[row.partition(":")[0]] += 1024 * int(row.split()[1])
    print(json.dumps(sizes), flush=True)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no /proc/self/smaps to measure shared memory by")
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
            assert reader.stdin and reader.stdout
            reader.stdin.write("\n")
            reader.stdin.flush()
            found = json.loads(reader.stdout.readline())
            assert found["Rss"] > 0.95 * path.stat().st_size
            assert found["Pss"] < 0.55 * found["Rss"]
    finally:
        for reader in readers:
            reader.communicate("", timeout=60)
