"""Download data sets. A download that broke off goes on where it stopped; a file with another digest is not kept."""

from __future__ import annotations

import errno
import hashlib
import shutil
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any

import httpx

from etcl_deploy.core.atomic import locked
from etcl_deploy.data.dataset import DataSet, File
from etcl_deploy.data.inventory import check_recipe, data_set
from etcl_deploy.errors import DataError

TRIES = 5  # connections that may break, or servers that may be busy, before one file is given up
PAUSE = 1.0  # seconds before another try, and twice as many before every further one
TIMEOUT = 30.0  # seconds without a byte
GROWTH = 40  # an archive may hold this many times its own bytes
UNPACKING = ".unpacking-"

Progress = Callable[[str, int, int], None]  # file, bytes there, bytes in all


def fetch_recipe(name: str, root: Path | None, progress: Progress) -> list[dict[str, Any]]:
    """Download what a recipe lacks and return the rows of `etcl data check`.

    Raises DataError for data sets that have to be fetched by hand.
    """
    by_hand = []
    for row in check_recipe(name, root):
        if row["download"]:
            fetch(data_set(row["name"]), Path(row["folder"]), progress)
        elif not row["place"]:
            by_hand.append(f"{row['title']} cannot be downloaded from here. {row['by_hand']}")
    if by_hand:
        raise DataError("; ".join(by_hand))
    return check_recipe(name, root)


def fetch(known: DataSet, folder: Path, progress: Progress = lambda name, done, total: None) -> None:
    """Download every file of a data set into `folder`; a file that is there and has the right digest stays.

    One process at a time: another that wants the same data set waits.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, wait=True):
        for left in folder.glob(f"{UNPACKING}*"):  # by a process that was killed
            shutil.rmtree(left)
        if not known.lacks(folder):
            return
        for file in known.files:
            target = folder / file.name
            if target.exists() and digest_of(target, file.digest) != file.digest:
                target.unlink()  # cut off, or something else of that name
            if not target.exists():
                _download(file, folder, progress)
            if file.unpacks:
                _unpack(target, folder)
                target.unlink()


def _download(file: File, folder: Path, progress: Progress) -> None:
    part = folder / f".{file.name}.part"
    resumed = _size(part) > 0
    _receive_all(file, part, progress)
    digest = digest_of(part, file.digest)
    if digest == file.digest:
        part.replace(folder / file.name)
        return
    part.unlink()
    if not resumed:
        raise DataError(
            f"{file.url} gave {digest}, not {file.digest}: it is not what its makers published, and not kept"
        )
    _download(file, folder, progress)  # what was there may have been of another file


def _receive_all(file: File, part: Path, progress: Progress) -> None:
    """Try until `part` holds the whole file; bytes that arrived are kept for the next try."""
    folder, needed = part.parent, file.bytes - _size(part)
    room = shutil.disk_usage(folder).free
    if needed > room:
        raise DataError(f"{file.name} needs {needed:,} more bytes in {folder}; {room:,} are free")
    for attempt in range(TRIES):
        try:
            return _receive(file, part, progress)
        except httpx.HTTPStatusError as error:
            status = error.response.status_code
            if status < 500 or attempt == TRIES - 1:
                raise DataError(f"{file.url} answers {status}; see its makers' page") from None
        except httpx.HTTPError as error:
            if attempt == TRIES - 1:
                raise DataError(
                    f"{file.url} broke off ({error!r}); {_size(part):,} of {file.bytes:,} bytes are kept: try again"
                ) from None
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise DataError(f"no space left in {folder} for {file.name}; what is there is kept: try again") from None
        time.sleep(PAUSE * 2**attempt)


def _receive(file: File, part: Path, progress: Progress) -> None:
    """Append to `part` until it is complete."""
    there = _size(part)
    if there == file.bytes:
        return
    if there > file.bytes:
        part.unlink()
        there = 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={there}-"} if there else {})
    with httpx.stream("GET", file.url, headers=headers, timeout=TIMEOUT, follow_redirects=True) as answer:
        if answer.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            part.unlink()  # it is not of what the server has
        answer.raise_for_status()
        if not answer.headers.get("Content-Range", "").startswith(f"bytes {there}-"):
            there = 0  # the server begins anew, whatever was asked
        with part.open("ab" if there else "wb") as output:
            for chunk in answer.iter_raw():
                there += len(chunk)
                if there > file.bytes:
                    part.unlink()
                    raise DataError(f"{file.url} sends more than the {file.bytes:,} bytes its makers state")
                output.write(chunk)
                progress(file.name, there, file.bytes)
    if there < file.bytes:
        raise httpx.RemoteProtocolError(f"{there:,} of {file.bytes:,} bytes")


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def digest_of(path: Path, like: str) -> str:
    """The file's digest of the same kind, as `kind:hexadecimal`."""
    kind = like.partition(":")[0]
    digest = hashlib.new(kind, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return f"{kind}:{digest.hexdigest()}"


def _unpack(archive: Path, folder: Path) -> None:
    """Put the files an archive holds into `folder`, all of them or none."""
    limit = GROWTH * archive.stat().st_size
    with tempfile.TemporaryDirectory(dir=folder, prefix=UNPACKING) as name:
        try:
            total = 0
            for inside, content in _files(archive):
                target = Path(name) / inside
                if PurePosixPath(inside).is_absolute() or ".." in PurePosixPath(inside).parts:
                    raise DataError(f"{archive} could not be unpacked: {inside!r} leads out of its folder")
                target.parent.mkdir(parents=True, exist_ok=True)
                with content, target.open("wb") as output:
                    while chunk := content.read(1 << 20):
                        total += len(chunk)
                        if total > limit:
                            raise DataError(f"{archive} would unpack to more than {limit:,} bytes")
                        output.write(chunk)
        except (OSError, zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error, NotImplementedError) as error:
            raise DataError(f"{archive} could not be unpacked: {error}") from None
        for entry in Path(name).iterdir():
            target = folder / entry.name
            if target.exists():
                shutil.rmtree(target) if target.is_dir() else target.unlink()
            entry.rename(target)


def _files(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Names and contents of the regular files in an archive; links and devices are skipped."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as packed:
            for entry in packed.infolist():
                if not entry.is_dir():
                    yield entry.filename, packed.open(entry)
    else:
        with tarfile.open(archive) as packed:
            for member in packed:
                content = packed.extractfile(member) if member.isreg() else None
                if content:
                    yield member.name, content
