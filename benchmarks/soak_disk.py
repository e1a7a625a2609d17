"""A disk that is nearly full: a small one of our own where we may mount one, else a limit on what a process writes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

FILLER = "filler"


class SmallDisk:
    """A folder with `size` bytes of its own, of which any part can be taken away.

    Where nobody lets us mount one, `fill` gives the size of the largest file a process may write instead: that fails a
    write in its middle, too.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        try:
            self.real = subprocess.run(command, capture_output=True, check=False).returncode == 0
        except OSError:
            self.real = False

    def fill(self, room: int) -> int | None:
        """Leave so many bytes; gives the bound on files that stands in for it, None where the disk is real."""
        if not self.real:
            return room
        free = shutil.disk_usage(self.folder).free
        with (self.folder / FILLER).open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, free - room))
        return None

    def clear(self) -> None:
        """All its room again."""
        (self.folder / FILLER).unlink(missing_ok=True)

    def listed(self) -> list[str]:
        """What is there, but for what fills it."""
        return sorted(path.name for path in self.folder.iterdir() if path.name != FILLER)

    def close(self) -> None:
        """Unmount it."""
        if self.real:
            subprocess.run(["umount", "-l", str(self.folder)], capture_output=True, check=False)
