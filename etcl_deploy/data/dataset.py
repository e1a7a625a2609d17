"""The facts of a data set: its files, its terms, how it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from etcl_deploy.data.source import Source


@dataclass(frozen=True)
class File:
    """A file its makers publish."""

    name: str
    bytes: int
    digest: str  # "sha256:..." or, where they state no other, "md5:..."
    url: str

    @property
    def unpacks(self) -> bool:
        """Whether it is an archive."""
        return self.name.endswith((".tar.gz", ".zip"))


@dataclass(frozen=True)
class DataSet:
    """The facts of a data set, known before any of it is there."""

    title: str
    home: str  # its makers' page
    terms: str
    items: tuple[int, int] | None  # training and test items when complete; None: it depends on how it was made
    read: Callable[[Path], Source]  # from its folder
    needs: tuple[str, ...]  # patterns of what a complete folder holds; X.gz stands for X, too
    classes: tuple[str, ...] | None = None  # names of the labels where a .npz file has none
    files: tuple[File, ...] = ()
    by_hand: str = ""  # how to get it where there is no file to download
    pickled: str = ""  # the folder of its pickled version, which is never read
    read_npz: Callable[[Path], Source] | None = None  # where NAME.npz is not as npz.read_npz has it

    def lacks(self, folder: Path) -> list[str]:
        """The parts that the folder does not hold."""
        ways = ((part, (part, part.removesuffix(".gz"))) for part in self.needs)
        return [part for part, patterns in ways if not any(any(folder.glob(pattern)) for pattern in patterns)]
