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
    """What is ready, or about to be while somebody holds its lock; how many use it, and its bytes."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    ready: Any = None
    users: int = 0
    nbytes: int = 0


class Cache:
    """Holds what `make` gives for a name within `limit` bytes, and gives it to `drop` when it has to go.

    What is in use or pinned stays; the limit is passed only for as long as what is in use takes more. Threads that
    want different names wait for each other only inside `make`, if there.
    """

    def __init__(self, limit: int, make: Callable[[str], Any], drop: Callable[[Any], None]) -> None:
        self.limit = limit
        self.hits = self.misses = self.evictions = 0
        self._make = make
        self._drop = drop
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._pinned: set[str] = set()
        self._bytes = 0
        self._largest = 0  # that was ever here
        self._lock = threading.Lock()

    @contextmanager
    def use(self, name: str) -> Iterator[Any]:
        """What belongs to a name, for the time of a `with` block."""
        with self._lock:
            entry = self._entries.setdefault(name, Entry())
            self._entries.move_to_end(name)
            entry.users += 1
        try:
            with entry.lock:
                made = entry.ready is None
                if made:
                    # Room is made first, so that what has to go can be used for what comes.
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
        """Make a name ready and keep it so. Raises CacheError where pinned ones alone would pass the limit."""
        with self.use(name) as ready, self._lock:
            taken = sum(self._entries[other].nbytes for other in self._pinned - {name})
            if taken + ready.nbytes > self.limit:
                raise CacheError(
                    f"{name!r} cannot be kept ready: it takes {ready.nbytes} bytes, the {len(self._pinned)} kept "
                    f"already {taken}, and the limit is {self.limit}"
                )
            self._pinned.add(name)

    def unpin(self, name: str) -> None:
        """Let a name go when its turn comes."""
        with self._lock:
            self._pinned.discard(name)

    def prefetch(self, names: Iterable[str]) -> list[str]:
        """Make names ready in this order until one more would push out another; gives those that are ready then."""
        wanted: list[str] = []
        for name in names:
            with self._lock:
                known = name in self._entries
                full = self._bytes + self._largest > self.limit
            if full and not known:
                break
            with self.use(name):
                wanted.append(name)
        held = self.held()
        return [name for name in wanted if name in held]

    def held(self) -> dict[str, int]:
        """Bytes of each name that is ready, least recently used first."""
        with self._lock:
            return {name: entry.nbytes for name, entry in self._entries.items() if entry.ready is not None}

    @property
    def pinned(self) -> list[str]:
        """The names that are kept ready."""
        with self._lock:
            return sorted(self._pinned)

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
