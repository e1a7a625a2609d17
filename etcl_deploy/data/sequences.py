"""Named sequences of tasks."""

from __future__ import annotations

from collections.abc import Callable

from etcl_deploy.data.digits import digits
from etcl_deploy.errors import ConfigError
from etcl_deploy.learn.task import Task
from etcl_deploy.preprocessing import Preprocessing

SEQUENCES: dict[str, Callable[[Preprocessing], list[Task]]] = {"digits": digits}


def load_sequence(name: str | None, preprocessing: Preprocessing) -> list[Task]:
    """The tasks of a named sequence, prepared."""
    if name not in SEQUENCES:
        raise ConfigError(f"unknown sequence {name!r}; known: {', '.join(SEQUENCES)}")
    return SEQUENCES[name](preprocessing)
