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
├── ModelError                an ONNX file on a device
├── CacheError                more tasks to keep ready than there is room for
├── ServeError                Java, TorchServe, ports
├── ClientError               asking a server; by itself: a URL that is none
│   ├── RequestError          one request it refused; the others are not affected
│   ├── TokenError            the key it wants
│   └── ServerUnavailableError
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
    """An error a command reports in one line, with exit code 1."""


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


class ModelError(EtclError):
    """An ONNX file that cannot be opened, or is none of ours."""


class CacheError(EtclError):
    """More tasks to keep ready than the cache has room for."""


class ServeError(EtclError):
    """A server that cannot be started, found or stopped."""


class ClientError(EtclError):
    """A server that cannot be asked, or does not answer as it should."""


class RequestError(ClientError):
    """One request that was refused; `status` is None if it was not even sent."""

    def __init__(self, status: int | None, code: str, message: str) -> None:
        super().__init__(status, code, message)
        self.status, self.code, self.message = status, code, message

    def __str__(self) -> str:
        return f"{self.message} ({self.code if self.status is None else f'{self.status} {self.code}'})"


class TokenError(ClientError):
    """A token that is missing, or that the server refuses."""


class ServerUnavailableError(ClientError):
    """A server that gave no usable answer, however often it was asked; `last` says what happened last."""

    def __init__(self, url: str, attempts: int, last: str) -> None:
        super().__init__(url, attempts, last)
        self.url, self.attempts, self.last = url, attempts, last

    def __str__(self) -> str:
        tried = "once" if self.attempts == 1 else f"{self.attempts} times"
        return f"no answer from {self.url}, asked {tried}; last: {self.last}"


class ExportError(EtclError):
    """A file for another program that could not be written."""


class ParityError(ExportError):
    """An exported model that does not answer like the bundle."""
