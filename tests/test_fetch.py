"""Downloads, from a real HTTP server that misbehaves in every way servers do."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from loopback import answering
from test_readers import write_cifar

from etcl_deploy.data import fetch as fetching
from etcl_deploy.data.catalog import DATA_SETS
from etcl_deploy.data.dataset import DataSet, File
from etcl_deploy.data.fetch import fetch
from etcl_deploy.errors import DataError

CONTENT = bytes(range(256)) * 400


@dataclass
class Mirror:
    """What the server has, how it behaves, and what it was asked."""

    files: dict[str, bytes] = field(default_factory=lambda: {"a.bin": CONTENT})
    cut_after: int | None = None  # bytes of one answer before the line goes dead
    cuts: int = 10**9  # how often it does
    ranges: bool = True
    wrong_place: bool = False  # answer a range with another one
    busy: int = 0  # how often it says so first
    pause: float = 0.0  # seconds between pieces
    asked: list[str | None] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    monkeypatch.setattr(fetching, "PAUSE", 0.01)
    state = Mirror()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            state.asked.append(wanted)
            data = state.files.get(self.path.strip("/"))
            if data is None:
                self.send_error(404)
                return
            if state.busy:
                state.busy -= 1
                self.send_error(503)
                return
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and state.ranges else 0
            if start >= len(data):
                self.send_error(416)
                return
            self.send_response(206 if start else 200)
            start = 0 if state.wrong_place else start
            if wanted and state.ranges:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(data) - start))
            self.end_headers()
            part = data[start:]
            if state.cut_after is not None and state.cuts > 0:
                state.cuts -= 1
                part = part[: state.cut_after]
                self.close_connection = True
            for place in range(0, len(part), 8192):
                self.wfile.write(part[place : place + 8192])
                time.sleep(state.pause)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with answering(Handler) as state.url:
        yield state


def wanted(mirror: Mirror, name: str = "a.bin", **changes: object) -> DataSet:
    data = mirror.files.get(name, b"")
    file = File(name, len(data), f"sha256:{hashlib.sha256(data).hexdigest()}", f"{mirror.url}/{name}")
    return replace(DATA_SETS["mnist"], files=(replace(file, **changes),))  # type: ignore[arg-type]


def test_a_file_comes_whole(mirror: Mirror, tmp_path: Path) -> None:
    """With progress, and only once."""
    seen: list[tuple[str, int, int]] = []
    fetch(wanted(mirror), tmp_path / "mnist", lambda *place: seen.append(place))
    assert (tmp_path / "mnist" / "a.bin").read_bytes() == CONTENT
    assert seen[-1] == ("a.bin", len(CONTENT), len(CONTENT))
    fetch(wanted(mirror), tmp_path / "mnist")
    assert len(mirror.asked) == 1


def test_cut_off_in_the_middle_it_goes_on_there(mirror: Mirror, tmp_path: Path) -> None:
    """Within one call while the server keeps giving, and in the next call after it gave up."""
    mirror.cut_after, mirror.cuts = 30_000, 2
    fetch(wanted(mirror), tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert mirror.asked == [None, "bytes=30000-", "bytes=60000-"]
    (tmp_path / "a.bin").unlink()
    mirror.cut_after, mirror.cuts = 100, 10**9
    with pytest.raises(DataError, match=r"broke off .* 500 of 102,400 bytes are kept: try again"):
        fetch(wanted(mirror), tmp_path)
    assert not (tmp_path / "a.bin").exists()
    mirror.cut_after = None
    fetch(wanted(mirror), tmp_path)
    assert mirror.asked[-1] == "bytes=500-" and (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_server_that_cannot_go_on_begins_anew(mirror: Mirror, tmp_path: Path) -> None:
    """What it sends then replaces what was there; so it is when what was there was of something else."""
    for way in ("ranges", "wrong_place", "other", "longer"):
        (tmp_path / ".a.bin.part").write_bytes(b"old" * (10**5 if way == "longer" else 100))
        mirror.ranges, mirror.wrong_place = way != "ranges", way == "wrong_place"
        fetch(wanted(mirror), tmp_path)
        assert (tmp_path / "a.bin").read_bytes() == CONTENT
        (tmp_path / "a.bin").unlink()


def test_a_busy_server_is_asked_again(mirror: Mirror, tmp_path: Path) -> None:
    """A few times; then it is given up."""
    mirror.busy = 3
    fetch(wanted(mirror), tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    mirror.busy = 100
    with pytest.raises(DataError, match="answers 503"):
        fetch(wanted(mirror), tmp_path / "again")


def test_two_at_once_do_not_harm_each_other(mirror: Mirror, tmp_path: Path) -> None:
    """One waits for the other, and finds what it brought."""
    mirror.pause = 0.01
    failures: list[BaseException] = []

    def bring() -> None:
        try:
            fetch(wanted(mirror), tmp_path)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=bring) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and (tmp_path / "a.bin").read_bytes() == CONTENT and len(mirror.asked) == 1


def test_what_is_there_already_is_looked_at(mirror: Mirror, tmp_path: Path) -> None:
    """A file of the right name that is another, or damaged, is brought anew; leftovers are removed."""
    (tmp_path / "a.bin").write_bytes(CONTENT[:-1] + b"x")
    (tmp_path / ".unpacking-abc").mkdir()
    fetch(wanted(mirror), tmp_path)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT and not (tmp_path / ".unpacking-abc").exists()


def test_what_is_not_as_its_makers_say_is_not_kept(mirror: Mirror, tmp_path: Path) -> None:
    """Another digest, more bytes than stated, no such file."""
    with pytest.raises(DataError, match="not sha256:00: it is not what its makers published"):
        fetch(wanted(mirror, digest="sha256:00"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    with pytest.raises(DataError, match="sends more than the 1,000 bytes"):
        fetch(wanted(mirror, bytes=1000), tmp_path)
    with pytest.raises(DataError, match="answers 404"):
        fetch(wanted(mirror, url=f"{mirror.url}/none"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_no_server_and_no_space(mirror: Mirror, tmp_path: Path) -> None:
    """Said before anything is asked where it can be, and after the last byte that fitted where not."""
    with pytest.raises(DataError, match=r"needs 1,000,000,000,000,000,000 more bytes in .* are free"):
        fetch(wanted(mirror, bytes=10**18), tmp_path)
    assert mirror.asked == []
    (tmp_path / ".a.bin.part").symlink_to("/dev/full")  # a disk on which nothing fits
    with pytest.raises(DataError, match="no space left in"):
        fetch(wanted(mirror), tmp_path)
    (tmp_path / ".a.bin.part").unlink()
    with pytest.raises(DataError, match="broke off"):
        fetch(wanted(mirror, url="http://127.0.0.1:9/a.bin"), tmp_path)


def packed(folder: Path, name: str) -> bytes:
    data = io.BytesIO()
    if name.endswith(".zip"):
        with zipfile.ZipFile(data, "w") as archive:
            for path in sorted(folder.rglob("*")):
                archive.write(path, path.relative_to(folder.parent))
    else:
        with tarfile.open(fileobj=data, mode="w:gz") as archive:
            archive.add(folder, folder.name)
    return data.getvalue()


@pytest.mark.parametrize("name", ["c.tar.gz", "c.zip"])
def test_archives_are_unpacked_all_or_nothing(mirror: Mirror, tmp_path: Path, name: str) -> None:
    """What they hold can be read; a damaged one leaves nothing."""
    write_cifar(tmp_path / "cifar-100-binary")
    mirror.files[name] = packed(tmp_path / "cifar-100-binary", name)
    target = tmp_path / "target"
    fetch(wanted(mirror, name), target)
    assert sorted(path.name for path in target.iterdir()) == [".lock", "cifar-100-binary"]
    assert len(DATA_SETS["cifar100"].read(target).train) == 20
    mirror.files[name] = mirror.files[name][: len(mirror.files[name]) // 2]
    other = tmp_path / "other"
    with pytest.raises(DataError, match="could not be unpacked"):
        fetch(wanted(mirror, name), other)
    assert not (other / "cifar-100-binary").exists()


def test_an_archive_cannot_reach_out_of_its_folder_or_fill_the_disk(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names that lead elsewhere are refused, and so is one that grows beyond reason."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        entry = tarfile.TarInfo("../outside")
        entry.size = 4
        archive.addfile(entry, io.BytesIO(b"evil"))
    mirror.files["x.tar.gz"] = data.getvalue()
    with pytest.raises(DataError, match="could not be unpacked"):
        fetch(wanted(mirror, "x.tar.gz"), tmp_path / "x")
    assert not (tmp_path / "outside").exists()
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "zeros").write_bytes(bytes(1_000_000))
    for name in ("y.tar.gz", "y.zip"):
        mirror.files[name] = packed(tmp_path / "big", name)
        monkeypatch.setattr(fetching, "GROWTH", 1 if name.endswith("gz") else 0.5)
        with pytest.raises(DataError, match="would unpack to more than"):
            fetch(wanted(mirror, name), tmp_path / name.replace(".", "-"))
