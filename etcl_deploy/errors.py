"""Everything this package raises on purpose.

EtclError
├── ConfigError               a recipe, an option or a `--set` value
├── NetworkError              a network that cannot be masked, with the layer that is why
├── DataError                 the user's tasks: folders, classes, image files
├── LearningError             training went wrong (a loss that is not finite)
├── RunError                  a run directory
├── BundleError               a bundle file
├── UnknownTaskError          a task the bundle or the run does not hold
├── InputError                one item to predict; the others are not affected
│   ├── BadImageError
│   ├── MissingTaskError
│   ├── TooLargeError
│   └── UnsupportedMediaError
├── ServeError                Java, TorchServe, ports
└── ExportError               an archive or ONNX file that could not be made
    └── ParityError           it was made, answers differently, and was deleted

A message says what was found, where, and what would be right.
"""

from __future__ import annotations

from collections.abc import Iterable

SHOWN_NAMES = 50


def shortened(text: str) -> str:
    """At most 80 characters of what somebody sent us: a message must not grow with its cause."""
    return text if len(text) <= 80 else f"{text[:77]}..."


class EtclError(Exception):
    """What a command reports in one line, with exit code 1."""


class ConfigError(EtclError):
    """A setting that does not exist or cannot have this value."""


class NetworkError(EtclError):
    """A network that cannot be masked."""


class DataError(EtclError):
    """Training data that cannot be used as it is."""


class LearningError(EtclError):
    """Training that cannot go on."""


class RunError(EtclError):
    """A run directory that is missing, in the way, or damaged."""


class BundleError(EtclError):
    """A bundle file that is missing, damaged, or of another format."""


class UnknownTaskError(EtclError):
    """A task name nobody learned."""

    def __init__(self, name: str, known: Iterable[str], holder: str = "this bundle") -> None:
        names = list(known)
        more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
        listed = ", ".join(shortened(known) for known in names[:SHOWN_NAMES]) or "no task"
        super().__init__(f"unknown task {shortened(name)!r}; {holder} holds: {listed}{more}")


class InputError(EtclError):
    """One item that cannot be predicted."""


class BadImageError(InputError):
    """Bytes that are not an image we read, or not a whole one."""


class MissingTaskError(InputError):
    """A request that does not say which task it is for."""


class TooLargeError(InputError):
    """An image or a request above the stated limit."""


class UnsupportedMediaError(InputError):
    """A kind of content nobody here reads."""


class ServeError(EtclError):
    """A server that cannot be started, found or stopped."""


class ExportError(EtclError):
    """A file for another program that could not be written."""


class ParityError(ExportError):
    """An exported model that does not answer like the bundle."""
