"""A lean HTTP client for load: many keep-alive connections from one process, one request under way on each.

It is written on plain sockets because the machine is shared with the server it measures: httpx takes about a
millisecond of processor time a request, this a twentieth of that.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

SECONDS = 120  # without any answer, after which the server counts as gone
CHUNK = 1 << 18


@dataclass
class Connection:
    """One socket, what is being asked on it, and what has come back so far."""

    socket: socket.socket
    number: int = -1
    began: float = 0.0
    data: bytearray = field(default_factory=bytearray)


@dataclass(frozen=True)
class Answer:
    """What came back for request `number`, and after how many seconds; status 0: the connection broke."""

    number: int
    status: int
    body: bytes
    seconds: float


def request(path: str, body: bytes, token: str, headers: dict[str, str] | None = None, method: str = "POST") -> bytes:
    """A request as it goes over the wire."""
    lines = {
        "Host": "127.0.0.1",
        "Authorization": f"Bearer {token}",
        "Content-Length": str(len(body)),
        **(headers or {}),
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def run(
    port: int,
    requests: Sequence[bytes],
    order: Sequence[int],
    connections: int,
    heard: Callable[[Answer], None],
    seconds: float = float("inf"),
) -> float:
    """Send `requests[n]` for every n of `order`, or as many as fit in `seconds`; gives how long it took."""
    chooser = selectors.DefaultSelector()
    waiting = iter(order)
    began = time.perf_counter()

    def send(connection: Connection) -> bool:
        number = next(waiting, None) if time.perf_counter() - began < seconds else None
        if number is None:
            return False
        connection.number, connection.began = number, time.perf_counter()
        connection.data.clear()
        with suppress(OSError):  # closed by the server meanwhile, or while a body it refuses was being sent
            connection.socket.sendall(requests[number])
        return True

    def open_one() -> None:
        connection = Connection(socket.create_connection(("127.0.0.1", port), SECONDS))
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if send(connection):
            chooser.register(connection.socket, selectors.EVENT_READ, connection)
        else:
            connection.socket.close()

    for _ in range(connections):
        open_one()
    while chooser.get_map():
        ready = chooser.select(SECONDS)
        if not ready:
            raise TimeoutError(f"no answer for {SECONDS} s")
        for key, _ in ready:
            connection: Connection = key.data
            try:
                part = connection.socket.recv(CHUNK)
            except OSError:
                part = b""
            connection.data += part
            found = parsed(connection.data)
            if found is None and part:
                continue
            status, body, lasts = found or (0, b"", False)
            heard(Answer(connection.number, status, body, time.perf_counter() - connection.began))
            if lasts and part:
                if not send(connection):
                    chooser.unregister(connection.socket)
                    connection.socket.close()
            else:
                chooser.unregister(connection.socket)
                connection.socket.close()
                open_one()
    return time.perf_counter() - began


@dataclass(frozen=True)
class Load:
    """What a load came to, in the columns of TorchServe's own benchmark."""

    requests: int
    errors: int
    seconds: float
    latencies: list[float]  # seconds, sorted

    @property
    def throughput(self) -> float:
        """Requests a second."""
        return self.requests / self.seconds

    def percentile(self, share: float) -> float:
        """Milliseconds."""
        return 1000 * self.latencies[min(len(self.latencies) - 1, int(share * len(self.latencies)))]

    def columns(self) -> dict[str, Any]:
        """Throughput, percentiles and errors."""
        return {
            "requests": self.requests,
            "throughput": round(self.throughput, 1),
            "p50_ms": round(self.percentile(0.5), 2),
            "p90_ms": round(self.percentile(0.9), 2),
            "p99_ms": round(self.percentile(0.99), 2),
            "error_rate": self.errors / self.requests,
        }


def measure(port: int, requests: Sequence[bytes], order: Sequence[int], connections: int, seconds: float) -> Load:
    """The same, as figures."""
    answers: list[Answer] = []
    took = run(port, requests, order, connections, answers.append, seconds)
    bad = sum(answer.status != 200 for answer in answers)
    return Load(len(answers), bad, took, sorted(answer.seconds for answer in answers))


def parsed(data: bytearray) -> tuple[int, bytes, bool] | None:
    """Status, body and whether the connection stays open, once all of an answer is there."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return None
    head = bytes(data[:end]).lower()
    at = head.find(b"content-length:")
    length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
    if len(data) < end + 4 + length:
        return None
    return int(head[9:12]), bytes(data[end + 4 : end + 4 + length]), b"connection: close" not in head
