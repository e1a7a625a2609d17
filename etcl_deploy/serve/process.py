"""Start TorchServe, wait until it answers, stop it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from importlib import resources
from pathlib import Path

import psutil

from etcl_deploy.core import atomic
from etcl_deploy.errors import ServeError
from etcl_deploy.serve.java import find_java
from etcl_deploy.serve.properties import cores, render
from etcl_deploy.serve.server import RECORD, START_SECONDS, Server, check_not_running, folder_of, recorded
from etcl_deploy.serve.token_renewer import PID_FILE, renewer_of

STOP_SECONDS = 20
METRICS, PROPERTIES = "metrics.yaml", "config.properties"
WORKER_DIED = "Backend worker process died"  # what TorchServe logs before it tries again, for minutes


def start(
    name: str,
    model_store: Path,
    port: int,
    workers: int = 1,
    *,
    pushes: bool = False,
    prepare: Callable[[], object] = lambda: None,
) -> Server:
    """Start TorchServe on `model_store/name.mar` and wait until it answers; on failure nothing is left running.

    Of several processes that start the same name one does, and the others are refused; `prepare`, which may write the
    archive, is called by that one alone.
    """
    check_not_running(name, model_store)
    java = find_java()
    store = model_store.resolve()
    directory = folder_of(name, store)
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Short, and of its own: it holds the workers' sockets, whose paths are limited to about 100 characters.
    temporary = tempfile.mkdtemp(prefix="etcl-")
    server = None
    try:
        with atomic.locked(directory.parent, wait=True):
            check_not_running(name, model_store)  # again: another process may have been quicker
            prepare()
            _configure(directory, render(name, str(store), port, str(directory / METRICS), pushes=pushes))
            pid, created = _launch(directory, store, java.home, temporary, workers)
            server = Server(name, str(directory), port, pid, created, temporary, workers, pushes)
            atomic.write_bytes(directory / RECORD, json.dumps(asdict(server), indent=1).encode())
        _wait_until_ready(server)
        start_renewer(directory)
    except BaseException:
        if server:
            stop(server)
        else:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return server


@contextmanager
def serving(name: str, model_store: Path, port: int, workers: int = 1, *, pushes: bool = False) -> Iterator[Server]:
    """A server for the time of a `with` block."""
    server = start(name, model_store, port, workers, pushes=pushes)
    try:
        yield server
    finally:
        stop(server)


def stop(server: Server) -> bool:
    """End the server, its workers and its token renewer, by force if need be; True if it was running."""
    _stop_renewer(Path(server.directory))
    process = server.process()
    if process:
        family = [process]
        with suppress(psutil.Error):
            family += process.children(recursive=True)
            process.terminate()
        survivors = still_running(family, STOP_SECONDS)
        for survivor in survivors:
            with suppress(psutil.Error):
                survivor.kill()
        still_running(survivors, STOP_SECONDS)
    shutil.rmtree(server.temporary, ignore_errors=True)
    directory = Path(server.directory)
    with atomic.locked(directory.parent, wait=True) if directory.is_dir() else nullcontext():
        if recorded(directory) == server:  # and not one that was started while this one ended
            (directory / RECORD).unlink()
            server.token_file.unlink(missing_ok=True)
    return process is not None


def still_running(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that have not ended after so long.

    A process that has ended stays on the system's list until its parent takes note. Here that is often the first
    process of all, which in a container may do so late, or never.
    """
    deadline = time.monotonic() + seconds
    while (found := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _runs(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _configure(directory: Path, properties: str) -> None:
    """A new directory, with all that TorchServe reads when it starts."""
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "logs").mkdir(parents=True)
    (directory / METRICS).write_bytes((resources.files("etcl_deploy.handlers") / METRICS).read_bytes())
    (directory / PROPERTIES).write_text(properties, "utf-8")


def _launch(directory: Path, store: Path, java_home: Path, temporary: str, workers: int) -> tuple[int, float]:
    """Start TorchServe; gives its process and when that began."""
    # TorchServe lets TS_* variables override its configuration file, tokens included: keep ours in force.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TS_")}
    threads = max(1, cores() // workers)
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
    command += ["--ts-config", str(directory / PROPERTIES), "--model-store", str(store)]
    command += ["--log-config", str(resources.files("etcl_deploy.serve") / "log4j2.xml")]
    with (directory / "server.log").open("ab") as log:  # which TorchServe appends to as well
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
    return pid, created


def start_renewer(directory: Path) -> None:
    """A process that renews the server's tokens and ends with the server; nobody waits for it."""
    command = [sys.executable, "-m", "etcl_deploy.serve.token_renewer", str(directory)]
    # Started by a shell of no other use, it is nobody's child that would have to be waited for.
    with (directory / "token_renewer.log").open("wb") as log:
        subprocess.run(
            ["/bin/sh", "-c", '"$@" & echo $! > "$0"', str(directory / PID_FILE), *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=directory,  # where no module of the user's can take the place of one it needs
            start_new_session=True,
            check=True,
        )


def _stop_renewer(directory: Path) -> None:
    process = renewer_of(directory)
    if process:
        with suppress(psutil.Error):
            process.terminate()
        still_running([process], STOP_SECONDS)


def _wait_until_ready(server: Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process() is None:
            raise ServeError(f"TorchServe ended: {_last_words(Path(server.directory))}")
        if WORKER_DIED in server.log.read_text("utf-8", "replace"):
            raise ServeError(f"the model did not load: {_last_words(Path(server.directory))}")
        with suppress(LookupError, ServeError):
            if server.is_ready():
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
