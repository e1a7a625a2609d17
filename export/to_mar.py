"""A bundle to a TorchServe archive that needs nothing of ours on the server.

The archive carries the bundle, the handler and the few modules of this package the handler uses. A server needs
torch and torchserve (with PyYAML and Pillow).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from etcl_deploy.bundle.bundle import load_bundle
from etcl_deploy.core import atomic
from etcl_deploy.errors import ExportError

BUNDLE_NAME = "bundle.etcl"
HANDLER_NAME = "etcl_handler.py"
CONFIG_NAME = "model-config.yaml"
VERSION = "1.0"
# What the handler imports, and what that imports: no trainer, no data readers, no config.
CARRIED = ("__init__", "errors", "core", "bundle", "runtime")

ModelConfig = Mapping[str, Any]


def archive(bundle: Path, name: str, model_store: Path, settings: ModelConfig | None = None) -> Path:
    """The path of `model_store/name.mar`, which is written again only if its content has changed.

    `settings` replace values of model-config.yaml, which TorchServe puts above its own configuration file.
    """
    check_name(name)
    contents = _contents(bundle, settings or {})
    target = model_store / f"{name}.mar"
    if not _is_current(target, contents):
        with atomic.replacing(target) as temporary:
            _run_archiver(contents, name, VERSION, temporary)
    return target


def write_archive(bundle: Path, name: str, version: str, target: Path, settings: ModelConfig) -> None:
    """Write the archive of any version of a model to `target`."""
    _run_archiver(_contents(bundle, settings), name, version, target)


def settings_of(archive: Path) -> dict[str, Any]:
    """The values of the model-config.yaml in an archive."""
    with zipfile.ZipFile(archive) as opened:
        return dict(yaml.safe_load(opened.read(CONFIG_NAME)))


def check_name(name: str) -> None:
    """Refuse a name TorchServe would refuse, or that is not a plain file name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", name):
        raise ExportError(f"{name!r} cannot name a model; use letters, digits, '_', '.' and '-', as in --name my-model")


def _contents(bundle: Path, settings: ModelConfig) -> dict[str, bytes]:
    """Path inside the archive -> bytes."""
    handlers = resources.files("etcl_deploy.handlers")
    config = yaml.safe_load((handlers / CONFIG_NAME).read_bytes())
    etcl = {**config["etcl"], **settings.get("etcl", {})}
    contents = {
        BUNDLE_NAME: _packed(bundle),
        HANDLER_NAME: (handlers / HANDLER_NAME).read_bytes(),
        CONFIG_NAME: yaml.safe_dump({**config, **settings, "etcl": etcl}).encode(),
    }
    package = Path(str(resources.files("etcl_deploy")))
    for part in CARRIED:
        path = package / part
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]:
            contents[f"etcl_deploy/{file.relative_to(package).as_posix()}"] = file.read_bytes()
    return contents


def _packed(path: Path) -> bytes:
    """The bundle with its masks packed: a server maps them, and needs no library to decode them."""
    bundle = load_bundle(path)
    return path.read_bytes() if bundle.encoding == "packed" else bundle.to_bytes("packed")


def _is_current(target: Path, contents: dict[str, bytes]) -> bool:
    try:
        with zipfile.ZipFile(target) as archive:
            return all(archive.read(name) == data for name, data in contents.items())
    except (OSError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error):  # no archive, or a damaged one
        return False


def _run_archiver(contents: dict[str, bytes], name: str, version: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="etcl-") as directory:
        root = Path(directory)
        for inner, data in contents.items():
            (root / "in" / inner).parent.mkdir(parents=True, exist_ok=True)
            (root / "in" / inner).write_bytes(data)
        (root / "extra").mkdir()
        (root / "in" / "etcl_deploy").rename(root / "extra" / "etcl_deploy")
        (root / "out").mkdir()
        (root / "tmp").mkdir()
        options = {
            "--model-name": name,
            "--version": version,
            "--handler": HANDLER_NAME,
            "--serialized-file": BUNDLE_NAME,
            "--config-file": CONFIG_NAME,
            "--extra-files": "../extra",
            "--export-path": "../out",
        }
        words = [word for pair in options.items() for word in pair]
        done = subprocess.run(
            [sys.executable, "-m", "model_archiver.model_packaging", *words],
            cwd=root / "in",
            # The archiver empties <temporary directory>/<name>, whatever is in it, so it gets a directory of its own.
            env={**os.environ, "TMPDIR": str(root / "tmp")},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ExportError(f"torch-model-archiver failed: {last}")
        shutil.copyfile(root / "out" / f"{name}.mar", target)
