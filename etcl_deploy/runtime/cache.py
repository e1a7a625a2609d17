"""Tasks that are ready to run: bounded in bytes, the least recently used makes room first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from etcl_deploy.errors import CacheError


@dataclass
class Entry:
    """A task that is ready, or is being made by the thread that holds its lock; its users, and its bytes."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    ready: Any = None
    users: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class CacheState:
    """The content of a cache, and its counters since the start."""

    tasks: dict[str, int]  # bytes of each task that is ready, least recently used first
    pinned: list[str]
    limit: int
    hits: int
    misses: int
    evictions: int


class Cache:
    """Keeps what `make` gives for a name, within `limit` bytes; what has to go is given to `drop`.

    What is in use or pinned stays, and the limit may be passed as long as it is in use. Threads that want different
    names wait for each other at most inside `make`.
    """

    def __init__(self, limit: int, make: Callable[[str], Any], drop: Callable[[Any], None]) -> None:
        self.limit = limit
        self.hits = self.misses = self.evictions = 0
        self._make = make
        self._drop = drop
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._pinned: set[str] = set()
        self._bytes = 0
        self._largest = 0  # bytes of the largest entry so far
        self._lock = threading.Lock()

    @contextmanager
    def use(self, name: str) -> Iterator[Any]:
        """What `make` gives for a name, kept for the time of a `with` block."""
        with self._lock:
            entry = self._entries.setdefault(name, Entry())
            self._entries.move_to_end(name)
            entry.users += 1
        try:
            with entry.lock:
                made = entry.ready is None
                if made:
                    # Room is made first, so that `make` can use again what is dropped.
                    self._make_room(self._largest)
                    entry.ready = self._make(name)
            with self._lock:
                self.misses += made
                self.hits += not made
                if made:
                    entry.nbytes = entry.ready.nbytes
                    self._bytes += entry.nbytes
                    self._largest = max(self._largest, entry.nbytes)
            yield entry.ready
        finally:
            with self._lock:
                entry.users -= 1
                if entry.ready is None and not entry.users:
                    self._entries.pop(name, None)
            if self._bytes > self.limit:
                self._make_room(0)

    def pin(self, name: str) -> None:
        """Make a name ready and keep it. Raises CacheError if pinned ones alone would pass the limit."""
        with self.use(name) as ready, self._lock:
            taken = sum(self._entries[other].nbytes for other in self._pinned - {name})
            if taken + ready.nbytes > self.limit:
                raise CacheError(
                    f"{name!r} cannot be kept ready: it takes {ready.nbytes} bytes, the {len(self._pinned)} kept "
                    f"already {taken}, and the limit is {self.limit}"
                )
            self._pinned.add(name)

    def unpin(self, name: str) -> None:
        """Let a name be dropped again."""
        with self._lock:
            self._pinned.discard(name)

    def prefetch(self, names: Iterable[str]) -> list[str]:
        """Make names ready in this order until one more would push out another; gives those that are ready then."""
        used: list[str] = []
        for name in names:
            with self._lock:
                known = name in self._entries
                full = self._bytes + self._largest > self.limit
            if full and not known:
                break
            with self.use(name):
                used.append(name)
        held = self.held()
        return [name for name in used if name in held]

    def held(self) -> dict[str, int]:
        """Bytes of each name that is ready, least recently used first."""
        with self._lock:
            return {name: entry.nbytes for name, entry in self._entries.items() if entry.ready is not None}

    def state(self) -> CacheState:
        """What is ready and pinned, and the counters."""
        held = self.held()
        with self._lock:
            return CacheState(held, sorted(self._pinned), self.limit, self.hits, self.misses, self.evictions)

    def _make_room(self, wanted: int) -> None:
        """Drop the least recently used until `wanted` bytes more fit, as far as that is possible."""
        dropped = []
        with self._lock:
            for name, entry in list(self._entries.items()):
                if self._bytes + wanted <= self.limit:
                    break
                if entry.ready is not None and not entry.users and name not in self._pinned:
                    dropped.append(self._entries.pop(name).ready)
                    self._bytes -= entry.nbytes
                    self.evictions += 1
        for ready in dropped:
            self._drop(ready)
