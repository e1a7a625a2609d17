"""Named sequences of tasks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from etcl_deploy.data.digits import digits
from etcl_deploy.data.femnist import femnist1
from etcl_deploy.data.mnist import pmnist
from etcl_deploy.errors import ConfigError
from etcl_deploy.learn.task import Task
from etcl_deploy.preprocessing import Preprocessing

# Each takes how images are prepared, the folder data is in, and how many tasks are wanted (None: all).
SEQUENCES: dict[str, Callable[[Preprocessing, Path, int | None], list[Task]]] = {
    "digits": lambda preprocessing, _, limit: digits(preprocessing)[:limit],
    "femnist1": femnist1,
    "pmnist": pmnist,
}


def load_sequence(name: str | None, preprocessing: Preprocessing, root: Path, limit: int | None = None) -> list[Task]:
    """The tasks of a named sequence (the first `limit`), prepared."""
    if name not in SEQUENCES:
        raise ConfigError(f"unknown sequence {name!r}; known: {', '.join(SEQUENCES)}")
    return SEQUENCES[name](preprocessing, root, limit)
