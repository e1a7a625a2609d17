"""One TorchServe process and the directory that describes it.

model_store/servers/NAME/   server.json, config.properties, key_file.json (tokens), logs/
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from etcl_deploy import atomic
from etcl_deploy.errors import ServeError
from etcl_deploy.serve.java import find_java
from etcl_deploy.serve.properties import HOST, render

START_SECONDS = 120
STOP_SECONDS = 20
REQUEST_SECONDS = 60
RECORD = "server.json"
# Our server is on this machine: no proxy the environment names should see its tokens.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
WORKER_DIED = "Backend worker process died"  # what TorchServe logs before it tries again, for minutes


@dataclass(frozen=True)
class Server:
    """A server that was started: its process, its ports, its directory."""

    name: str
    directory: str
    port: int
    pid: int
    created: float  # when the process began, so that a recycled pid is not taken for ours
    temporary: str

    @property
    def inference_url(self) -> str:
        """Where predictions are asked for."""
        return f"http://{HOST}:{self.port}/predictions/{self.name}"

    @property
    def management_url(self) -> str:
        """Where the model is described."""
        return f"http://{HOST}:{self.port + 1}/models/{self.name}"

    @property
    def token_file(self) -> Path:
        """TorchServe's tokens; renewed when they expire."""
        return Path(self.directory) / "key_file.json"

    @property
    def log(self) -> Path:
        """Everything the server and its workers say."""
        return Path(self.directory) / "server.log"

    def token(self, kind: str = "inference") -> str:
        """The current token for one of the two APIs."""
        try:
            key: str = json.loads(self.token_file.read_text("utf-8"))[kind]["key"]
        except (OSError, ValueError, KeyError):
            raise ServeError(f"{self.token_file} holds no {kind} token") from None
        return key

    def ask(self, url: str, kind: str = "inference", body: bytes | None = None, **headers: str) -> Any:
        """The JSON answer of one request, with the token of its API; header names are written with underscores."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        sent["Authorization"] = f"Bearer {self.token(kind)}"
        with DIRECT.open(urllib.request.Request(url, body, sent), timeout=REQUEST_SECONDS) as answer:
            return json.load(answer)

    def describe(self, *, customized: bool = False) -> Any:
        """What the management API says of the model; `customized` adds what the handler says of its tasks."""
        suffix = "?customized=true" if customized else ""
        return self.ask(self.management_url + suffix, "management")[0]

    def process(self) -> psutil.Process | None:
        """The running server process, or None."""
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.created) < 1 and process.status() != "zombie":
                return process
        return None

    def example(self, task: str) -> str:
        """A curl line that asks for a prediction with the current token."""
        headers = f"-H 'Authorization: Bearer {self.token()}' -H 'X-ETCL-Task: {task}'"
        return f"curl {self.inference_url} {headers} -T image.png"

    def as_json(self) -> dict[str, Any]:
        """What `etcl serve` reports."""
        return {
            "name": self.name,
            "running": self.process() is not None,
            "inference_url": self.inference_url,
            "management_url": self.management_url,
            "token_file": str(self.token_file),
            "log": str(self.log),
        }


def start(name: str, model_store: Path, port: int, workers: int = 1) -> Server:
    """Start TorchServe on `model_store/name.mar` and wait until it answers; on failure nothing is left running."""
    check_not_running(name, model_store)
    java = find_java()
    store = model_store.resolve()
    directory = store / "servers" / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    # Short, and of its own: it holds the workers' sockets, whose paths are limited to about 100 characters.
    temporary = tempfile.mkdtemp(prefix="etcl-")
    config = directory / "config.properties"
    config.write_text(render(name, str(store), port), "utf-8")
    server = None
    try:
        server = _launch(name, directory, port, java.home, temporary, workers)
        atomic.write_bytes(directory / RECORD, json.dumps(asdict(server), indent=1).encode())
        _wait_until_ready(server)
    except BaseException:
        if server:
            stop(server)
        else:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return server


@contextmanager
def serving(name: str, model_store: Path, port: int, workers: int = 1) -> Iterator[Server]:
    """A server for the time of a `with` block."""
    server = start(name, model_store, port, workers)
    try:
        yield server
    finally:
        stop(server)


def stop(server: Server) -> bool:
    """End the server and its workers, by force if need be; True if it was running."""
    process = server.process()
    if process:
        family = [process]
        with suppress(psutil.Error):
            family += process.children(recursive=True)
            process.terminate()
        _, alive = psutil.wait_procs(family, timeout=STOP_SECONDS)
        for survivor in alive:
            with suppress(psutil.Error):
                survivor.kill()
        psutil.wait_procs(alive, timeout=STOP_SECONDS)
    shutil.rmtree(server.temporary, ignore_errors=True)
    (Path(server.directory) / RECORD).unlink(missing_ok=True)
    server.token_file.unlink(missing_ok=True)
    return process is not None


def check_not_running(name: str, model_store: Path) -> None:
    """Refuse to start what runs already."""
    running = find(name, model_store)
    if running and running.process():
        raise ServeError(f"{name!r} is already served at {running.inference_url}; stop it with --stop")


def find(name: str, model_store: Path) -> Server | None:
    """The server of that name, as it was recorded when started."""
    try:
        record = json.loads((model_store / "servers" / name / RECORD).read_text("utf-8"))
        return Server(**record)
    except (OSError, ValueError, TypeError):
        return None


def status(name: str, model_store: Path) -> dict[str, Any]:
    """What `etcl serve --status` reports, also of a server that was never started."""
    found = find(name, model_store)
    if found:
        return found.as_json()
    unknown = dict.fromkeys(("inference_url", "management_url", "token_file", "log"))
    return {"name": name, "running": False, **unknown}


def names(model_store: Path) -> list[str]:
    """The names of all recorded servers."""
    return sorted(path.parent.name for path in (model_store / "servers").glob(f"*/{RECORD}"))


def _launch(name: str, directory: Path, port: int, java_home: Path, temporary: str, workers: int) -> Server:
    # TorchServe lets TS_* variables override its configuration file, tokens included: keep ours in force.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TS_")}
    threads = max(1, (os.cpu_count() or 1) // workers)
    environment |= {
        "JAVA_HOME": str(java_home),
        "TEMP": temporary,
        "TMPDIR": temporary,
        "LOG_LOCATION": str(directory / "logs"),
        "METRICS_LOCATION": str(directory / "logs"),
        "OMP_NUM_THREADS": str(threads),
    }
    command = [sys.executable, "-m", "ts.model_server", "--start", "--no-config-snapshots"]
    # The store is in the configuration too, but TorchServe's launcher does not read escapes in it.
    command += ["--ts-config", str(directory / "config.properties"), "--model-store", str(directory.parent.parent)]
    with (directory / "server.log").open("wb") as log:
        launcher = subprocess.Popen(
            command,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the terminal is for us, who then stop it in order
        )
    try:
        launcher.wait(timeout=START_SECONDS)
        pid = int((Path(temporary) / ".model_server.pid").read_text())
        created = psutil.Process(pid).create_time()
    except BaseException as error:
        with suppress(OSError):
            os.killpg(launcher.pid, signal.SIGKILL)  # the launcher and the server it may have started
        if isinstance(error, OSError | ValueError | psutil.Error | subprocess.TimeoutExpired):
            raise ServeError(f"TorchServe did not start: {_last_words(directory)}") from None
        raise
    return Server(name, str(directory), port, pid, created, temporary)


def _wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process() is None:
            raise ServeError(f"TorchServe ended: {_last_words(Path(server.directory))}")
        if WORKER_DIED in server.log.read_text("utf-8", "replace"):
            raise ServeError(f"the model did not load: {_last_words(Path(server.directory))}")
        with suppress(OSError, ValueError, LookupError, ServeError):
            workers = server.describe()["workers"]
            if workers and all(worker["status"] == "READY" for worker in workers):
                return
        time.sleep(0.2)
    raise ServeError(f"TorchServe was not ready after {START_SECONDS} s: {_last_words(Path(server.directory))}")


def _last_words(directory: Path) -> str:
    """The last line of the log that looks like a reason, and where the rest is."""
    log = directory / "server.log"
    lines = log.read_text("utf-8", "replace").splitlines() if log.exists() else []
    reasons = [line for line in lines if "Error" in line or "Exception" in line or "ERROR" in line]
    last = (reasons or lines or ["no message"])[-1].partition("MODEL_LOG - ")
    return f"{(last[2] or last[0]).strip()[:300]} (see {log})"
