"""Replace a file as a whole: after a crash at any moment there is the old one or the new one; one writer at a time."""

from __future__ import annotations

import glob
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from etcl_deploy.errors import EtclError, RunError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
MARK = "half_"  # in the name of a file that is being written


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`; the file written there becomes `path` when the block ends without an error.

    Files that killed processes left half written are removed. Where `path` is a link, it stays one.
    """
    check_replaceable(path)
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    _tidy(path)
    handle, temporary = _held(path)
    try:
        if not fcntl:
            os.close(handle)  # an open file could not be renamed
        yield temporary
        _flush(temporary)
        if path.exists():
            temporary.chmod(path.stat().st_mode)
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and (
            error.filename is None or str(temporary) in (error.filename, error.filename2)
        ):
            # A write that finds no room does not say for what, a copy names two files, and nobody knows ours.
            error.filename = str(path)
            del error.filename2
        raise
    finally:
        if fcntl:
            os.close(handle)
    with suppress(OSError):  # not every file system can flush a directory
        _flush(path.parent)


def check_replaceable(path: Path) -> None:
    """Refuse to replace a directory or a device."""
    if path.is_dir():
        raise EtclError(f"{path} is a directory; name a file")
    if path.exists() and not path.is_file():
        raise EtclError(f"{path} is not a file that could be replaced; name another")


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path`, wholly or not at all."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


@contextmanager
def locked(directory: Path, *, wait: bool = False) -> Iterator[None]:
    """Keep other processes that ask for the same directory out, or `wait` for them.

    A lock ends with its process, however that ends.
    """
    with (directory / LOCK).open("w") as file:
        if fcntl:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise RunError(f"another process is at work in {directory}") from None
        yield


def _held(path: Path) -> tuple[int, Path]:
    """A new file beside `path`, open, and locked until it is closed or this process ends."""
    while True:
        # A dot keeps the half-written file out of listings; the ending stays, as some writers look at it.
        temporary = path.with_name(f".{path.stem}.{MARK}{secrets.token_hex(6)}{path.suffix}")
        handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        if fcntl:
            with suppress(OSError):  # a file system without locks: then nobody tidies up, either
                fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, temporary
        os.close(handle)  # before it was locked, somebody tidied it away


def _tidy(path: Path) -> None:
    """Remove half-written files for `path` that no process holds any more."""
    for left in path.parent.glob(f".{glob.escape(path.stem)}.{MARK}*{glob.escape(path.suffix)}"):
        with suppress(OSError):  # it is held, or gone by now
            handle = os.open(left, os.O_RDWR)
            try:
                if fcntl:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    left.unlink()
            finally:
                os.close(handle)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
