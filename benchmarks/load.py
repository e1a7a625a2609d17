"""A lean HTTP client for load: many keep-alive connections from one process, one request under way on each.

It is written on plain sockets because the machine is shared with the server it measures: httpx takes about a
millisecond of processor time a request, this a twentieth of that.
"""

from __future__ import annotations

import json
import selectors
import socket
import subprocess
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any

PATIENCE = 130  # seconds for one answer, after which the request counts as lost
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
    """The answer to request `number`, and after how many seconds it came; status 0: the connection broke."""

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


def run(port: int, asked: Iterator[tuple[int, bytes]], connections: int, heard: Callable[[Answer], None]) -> float:
    """Send every request, each with a number for its answer, until there is none; gives the seconds it took."""
    chooser = selectors.DefaultSelector()
    began = time.perf_counter()

    def send(connection: Connection) -> bool:
        following = next(asked, None)
        if following is None:
            return False
        connection.number, connection.began = following[0], time.perf_counter()
        connection.data.clear()
        with suppress(OSError):  # closed by the server meanwhile, or while a body it refuses was being sent
            connection.socket.sendall(following[1])
        return True

    def open_one() -> None:
        connection = Connection(socket.create_connection(("127.0.0.1", port), PATIENCE))
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if send(connection):
            chooser.register(connection.socket, selectors.EVENT_READ, connection)
        else:
            connection.socket.close()

    def renew(connection: Connection, *, again: bool) -> None:
        chooser.unregister(connection.socket)
        connection.socket.close()
        if again:
            open_one()

    for _ in range(connections):
        open_one()
    while chooser.get_map():
        for key, _ in chooser.select(1):
            connection: Connection = key.data
            try:
                part = connection.socket.recv(CHUNK)
            except OSError:
                part = b""
            connection.data += part
            answer = parsed(connection.data)
            if answer is None and part:
                continue
            status, body, lasts = answer or (0, b"the connection broke", False)
            heard(Answer(connection.number, status, body, time.perf_counter() - connection.began))
            if not (lasts and part and send(connection)):
                renew(connection, again=not (lasts and part))
        now = time.perf_counter()
        for key in [key for key in chooser.get_map().values() if now - key.data.began > PATIENCE]:
            heard(Answer(key.data.number, 0, b"no answer", now - key.data.began))
            renew(key.data, again=True)
    return time.perf_counter() - began


@dataclass(frozen=True)
class Load:
    """The figures of a load, in the columns of TorchServe's own benchmark."""

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


def in_order(
    requests: Sequence[bytes], order: Iterable[int], go_on: Callable[[], bool] = lambda: True
) -> Iterator[tuple[int, bytes]]:
    """`requests[n]` for every n of `order`, as long as `go_on` says so."""
    return ((number, requests[number]) for number in takewhile(lambda number: go_on(), order))


def measure(port: int, requests: Sequence[bytes], order: Sequence[int], connections: int, seconds: float) -> Load:
    """Send requests in an order for so many seconds; what that came to."""
    answers: list[Answer] = []
    end = time.perf_counter() + seconds
    asked = in_order(requests, order, lambda: time.perf_counter() < end)
    took = run(port, asked, connections, answers.append)
    bad = sum(answer.status != 200 for answer in answers)
    return Load(len(answers), bad, took, sorted(answer.seconds for answer in answers))


def measure_apart(port: int, requests: Sequence[bytes], order: Sequence[int], connections: int, seconds: float) -> Load:
    """The same from another process, which has nothing but this file to import."""
    told = [port, [b64encode(request).decode() for request in requests], list(order), connections, seconds]
    command = [sys.executable, "-I", __file__]
    done = subprocess.run(command, input=json.dumps(told), stdout=subprocess.PIPE, text=True, check=True)
    return Load(**json.loads(done.stdout))


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


if __name__ == "__main__":
    port, encoded, *rest = json.load(sys.stdin)
    sys.stdout.write(json.dumps(asdict(measure(port, [b64decode(text) for text in encoded], *rest))))
