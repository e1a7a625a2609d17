"""A file is replaced as a whole, whenever the process that does it is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from etcl_deploy.core import atomic
from etcl_deploy.errors import EtclError

# Ends without a word, or with a full disk, before or after the n-th call that touches the disk, or in the middle of a
# write.
CHILD = """
import os, sys
from pathlib import Path
from etcl_deploy.core import atomic

path, data, last, how = Path(sys.argv[1]), Path(sys.argv[2]).read_bytes(), int(sys.argv[3]), sys.argv[4]
calls = 0

def step():
    global calls
    calls += 1
    if calls == last and how == "killed":
        os._exit(9)
    if calls == last:
        raise OSError(28, "No space left on device")

def deadly(function):
    def called(*words, **more):
        step()
        result = function(*words, **more)
        step()
        return result
    return called

def write_bytes(self, content):
    with self.open("wb") as file:
        for part in (content[: len(content) // 2], content[len(content) // 2 :]):
            step()
            file.write(part)
            file.flush()
    step()

for place, name in ((os, "open"), (os, "fsync"), (Path, "chmod"), (Path, "replace"), (Path, "unlink")):
    setattr(place, name, deadly(getattr(place, name)))
Path.write_bytes = write_bytes
atomic.write_bytes(path, data)
sys.exit(3 if calls >= last else 0)  # a directory that could not be flushed is no error
"""


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize(("how", "codes"), [("killed", {9}), ("full", {1, 3})])
def test_stopped_at_any_moment(tmp_path: Path, there: bool, how: str, codes: set[int]) -> None:
    """The old file or the new one, never neither; and the next writer leaves nothing behind."""
    new = tmp_path / "new"
    new.write_bytes(bytes(range(256)) * 40)
    old = b"old" * 1000 if there else None
    for last in count(1):
        folder = tmp_path / str(last)
        folder.mkdir()
        path = folder / "x [1].etcl"
        if old:
            path.write_bytes(old)
        words = [sys.executable, "-c", CHILD, path, new, str(last), how]
        done = subprocess.run(words, check=False, stderr=subprocess.DEVNULL)
        if done.returncode == 0:
            break
        assert done.returncode in codes
        assert (path.read_bytes() if path.exists() else None) in (old, new.read_bytes())
        atomic.write_bytes(path, b"next")
        assert path.read_bytes() == b"next"
        assert list(folder.iterdir()) == [path]
    assert last > 12, "it was stopped at many places"
    assert path.read_bytes() == new.read_bytes() and list(folder.iterdir()) == [path]


def test_writers_do_not_disturb_each_other(tmp_path: Path) -> None:
    """What another process is writing right now is not taken for a leftover."""
    path = tmp_path / "x.etcl"
    with atomic.replacing(path) as first:
        first.write_bytes(b"first")
        atomic.write_bytes(path, b"second")
        assert path.read_bytes() == b"second" and first.exists()
    assert path.read_bytes() == b"first" and list(tmp_path.iterdir()) == [path]


def test_what_is_no_file_is_left_alone(tmp_path: Path) -> None:
    """A directory and a pipe are refused; a link stays a link, to the new content."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(EtclError, match="is not a file that could be replaced"):
        atomic.write_bytes(tmp_path / "pipe", b"x")
    with pytest.raises(EtclError, match="is a directory"):
        atomic.write_bytes(tmp_path, b"x")
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    atomic.write_bytes(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_bytes() == b"new"


def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    """Writing itself does not say for which file there was no room, and a copy says it of a name of ours."""
    words, path = r"No space left on device: '[^']*/x\.etcl'$", tmp_path / "x.etcl"
    with pytest.raises(OSError, match=words), atomic.replacing(path):
        raise OSError(28, "No space left on device")
    with pytest.raises(OSError, match=words), atomic.replacing(path) as temporary:
        raise OSError(28, "No space left on device", "source", None, str(temporary))
    assert not list(tmp_path.iterdir())


def test_permissions_are_kept(tmp_path: Path) -> None:
    """Those of the old file; of a new one what is usual here."""
    path, usual = tmp_path / "x.etcl", tmp_path / "usual"
    usual.touch()
    atomic.write_bytes(path, b"1")
    assert path.stat().st_mode == usual.stat().st_mode
    path.chmod(0o640)
    atomic.write_bytes(path, b"2")
    assert path.stat().st_mode & 0o777 == 0o640


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    """And nothing else."""
    path = tmp_path / "x.etcl"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), atomic.replacing(path) as temporary:
        temporary.write_bytes(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
