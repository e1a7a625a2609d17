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

# Each takes how images are prepared and the folder data is in.
SEQUENCES: dict[str, Callable[[Preprocessing, Path], list[Task]]] = {
    "digits": lambda preprocessing, _: digits(preprocessing),
    "femnist1": femnist1,
    "pmnist": pmnist,
}


def load_sequence(name: str | None, preprocessing: Preprocessing, root: Path) -> list[Task]:
    """The tasks of a named sequence, prepared."""
    if name not in SEQUENCES:
        raise ConfigError(f"unknown sequence {name!r}; known: {', '.join(SEQUENCES)}")
    return SEQUENCES[name](preprocessing, root)
