"""Download data sets: what is cut off goes on where it stopped, what is not as its makers say is not kept."""

from __future__ import annotations

import errno
import hashlib
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from etcl_deploy.data.dataset import DataSet, File
from etcl_deploy.data.inventory import check_recipe, data_set
from etcl_deploy.errors import DataError

TRIES = 5  # connections that may break before one file is given up
TIMEOUT = 30.0  # seconds without a byte
GROWTH = 40  # an archive may hold this many times its own bytes

Progress = Callable[[str, int, int], None]  # file, bytes there, bytes in all


def fetch_recipe(name: str, root: Path | None, progress: Progress) -> list[dict[str, Any]]:
    """Download what a recipe lacks; what `etcl data check` then says."""
    for row in check_recipe(name, root):
        if not row["place"]:
            known = data_set(row["name"])
            if not known.files:
                raise DataError(f"{known.title} cannot be downloaded from here. {known.by_hand}")
            fetch(known, Path(row["folder"]), progress)
    return check_recipe(name, root)


def fetch(known: DataSet, folder: Path, progress: Progress = lambda name, done, total: None) -> None:
    """Bring every file of a data set into `folder`; those that are there are left as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [file for file in known.files if file.unpacks or not (folder / file.name).exists()]
    for file in missing:
        if not (folder / file.name).exists():
            _download(file, folder, progress)
        if file.unpacks:
            _unpack(folder / file.name, folder)
            (folder / file.name).unlink()


def _download(file: File, folder: Path, progress: Progress) -> None:
    part = folder / f".{file.name}.part"
    room = shutil.disk_usage(folder).free
    there = part.stat().st_size if part.exists() else 0
    if file.bytes - there > room:
        raise DataError(f"{file.name} needs {file.bytes - there:,} more bytes in {folder}; {room:,} are free")
    for attempt in range(1, TRIES + 1):
        try:
            _receive(file, part, progress)
            break
        except httpx.HTTPStatusError as error:
            raise DataError(f"{file.url} answers {error.response.status_code}; see its makers' page") from None
        except httpx.HTTPError as error:
            if attempt == TRIES:
                kept = part.stat().st_size if part.exists() else 0
                raise DataError(
                    f"{file.url} broke off ({error!r}); {kept:,} of {file.bytes:,} bytes are kept: try again"
                ) from None
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise DataError(f"no space left in {folder} for {file.name}; what is there is kept: try again") from None
    found = digest_of(part, file.digest.partition(":")[0])
    if found != file.digest:
        part.unlink()
        raise DataError(
            f"{file.url} gave {found}, not {file.digest}: it is not what its makers published, and not kept"
        )
    part.replace(folder / file.name)


def _receive(file: File, part: Path, progress: Progress) -> None:
    """Append to `part` until it is complete."""
    there = part.stat().st_size if part.exists() else 0
    if there >= file.bytes:
        there = 0 if there > file.bytes else there
        if there:
            return
    headers = {"Range": f"bytes={there}-", "Accept-Encoding": "identity"} if there else {"Accept-Encoding": "identity"}
    with httpx.stream("GET", file.url, headers=headers, timeout=TIMEOUT, follow_redirects=True) as answer:
        answer.raise_for_status()
        if answer.status_code != httpx.codes.PARTIAL_CONTENT:
            there = 0  # the server begins anew, whatever was asked
        with part.open("ab" if there else "wb") as output:
            for chunk in answer.iter_bytes():
                there += len(chunk)
                if there > file.bytes:
                    raise DataError(f"{file.url} sends more than the {file.bytes:,} bytes its makers state")
                output.write(chunk)
                progress(file.name, there, file.bytes)
    if there < file.bytes:
        raise httpx.RemoteProtocolError(f"{there:,} of {file.bytes:,} bytes")


def digest_of(path: Path, kind: str) -> str:
    """The file's digest, as `kind:hexadecimal`."""
    found = hashlib.new(kind, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            found.update(chunk)
    return f"{kind}:{found.hexdigest()}"


def _unpack(archive: Path, folder: Path) -> None:
    """Put what an archive holds into `folder`, all of it or nothing."""
    limit = GROWTH * archive.stat().st_size
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unpacking-") as name:
        try:
            if archive.suffix == ".zip":
                with zipfile.ZipFile(archive) as packed:
                    _check_size(sum(entry.file_size for entry in packed.infolist()), limit, archive)
                    packed.extractall(name)
            else:
                with tarfile.open(archive) as packed:
                    _check_size(sum(entry.size for entry in packed), limit, archive)
                    packed.extractall(name, filter="data")
        except (OSError, zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
            raise DataError(f"{archive} could not be unpacked: {error}") from None
        for entry in Path(name).iterdir():
            target = folder / entry.name
            if target.exists():
                shutil.rmtree(target) if target.is_dir() else target.unlink()
            entry.rename(target)


def _check_size(total: int, limit: int, archive: Path) -> None:
    if total > limit:
        raise DataError(f"{archive} would unpack to {total:,} bytes; at most {limit:,} are right")
