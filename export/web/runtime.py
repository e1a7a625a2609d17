"""The part of onnxruntime-web that a page needs: fetched once with npm, checked, and kept."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from etcl_deploy.core import atomic
from etcl_deploy.errors import ExportError

PACKAGE, VERSION = "onnxruntime-web", "1.30.0"
INTEGRITY = "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="  # sha512
# Path in the archive -> name in a page's folder.
FILES = {
    "package/dist/ort.wasm.bundle.min.mjs": "ort.mjs",
    "package/dist/ort-wasm-simd-threaded.wasm": "ort-wasm-simd-threaded.wasm",
}
SECONDS = 300


def runtime_files(archive: Path | None = None) -> Mapping[str, bytes]:
    """The files a page needs, by name; from `archive`, else from the one that was fetched before, else fetched now."""
    kept = _cache() / f"{PACKAGE}-{VERSION}.tgz"
    try:
        data = _checked(archive or kept)
    except ExportError:
        if archive is not None:
            raise
        data = _fetched()
        kept.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_bytes(kept, data)
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as opened:
        members = {name: opened.extractfile(inner) for inner, name in FILES.items()}
        return {name: member.read() for name, member in members.items() if member}


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "etcl_deploy"


def _checked(archive: Path) -> bytes:
    try:
        data = archive.read_bytes()
    except OSError as error:
        raise ExportError(f"cannot read {archive}: {error.strerror}") from None
    if base64.b64encode(hashlib.sha512(data).digest()).decode() != INTEGRITY:
        raise ExportError(f"{archive} is not {PACKAGE} {VERSION} as it was published")
    return data


def _fetched() -> bytes:
    npm = shutil.which("npm")
    how = f"get {PACKAGE}-{VERSION}.tgz with `npm pack {PACKAGE}@{VERSION}` and name it with --runtime"
    if npm is None:
        raise ExportError(
            f"npm is needed once, to fetch {PACKAGE} {VERSION}; install Node.js, or on another machine {how}"
        )
    with tempfile.TemporaryDirectory(prefix="etcl-") as directory:
        command = [npm, "pack", f"{PACKAGE}@{VERSION}", "--pack-destination", directory]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=directory)
        except subprocess.TimeoutExpired:
            raise ExportError(f"npm did not fetch {PACKAGE} {VERSION} within {SECONDS} s; or {how}") from None
        archives = list(Path(directory).glob("*.tgz"))
        if done.returncode or not archives:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ExportError(f"npm could not fetch {PACKAGE} {VERSION}: {last}; or {how}")
        return _checked(archives[0])
