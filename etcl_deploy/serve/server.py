"""A TorchServe of our own that runs, and the directory that describes it.

model_store/servers/NAME/   server.json, config.properties, metrics.yaml, key_file.json (tokens), server.log, logs/
                            bundle.etcl, the bundle that is served, as it was given: what a delta is applied to
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from etcl_deploy.client.client import REFUSED_TOKEN, RENEWAL_SECONDS, RENEWAL_TRIES, Client
from etcl_deploy.client.protocol import KEY_FILE, read, read_token
from etcl_deploy.errors import RequestError, ServeError, TokenError
from etcl_deploy.serve.properties import HOST

REQUEST_SECONDS = 300  # TorchServe unpacks an archive before it answers
START_SECONDS = 600  # as startupTimeout in model-config.yaml
SERVERS = "servers"
RECORD = "server.json"
BUNDLE = "bundle.etcl"


@dataclass(frozen=True)
class Server:
    """A server that was started: its process, its ports, its directory."""

    name: str
    directory: str
    port: int
    pid: int
    created: float  # when the process began, so that a recycled pid is not taken for ours
    temporary: str
    workers: int
    pushes: bool  # whether another bundle may take the place of the one it serves

    @property
    def store(self) -> Path:
        """The folder of archives it was started from."""
        return Path(self.directory).parent.parent

    @property
    def management_address(self) -> str:
        """Address of the management API."""
        return f"http://{HOST}:{self.port + 1}"

    @property
    def inference_url(self) -> str:
        """URL for predictions."""
        return f"http://{HOST}:{self.port}/predictions/{self.name}"

    @property
    def management_url(self) -> str:
        """URL of the model in the management API."""
        return f"{self.management_address}/models/{self.name}"

    @property
    def metrics_url(self) -> str:
        """URL of the metrics, for Prometheus."""
        return f"http://{HOST}:{self.port + 2}/metrics"

    @property
    def bundle(self) -> Path:
        """A copy of the bundle it serves."""
        return Path(self.directory) / BUNDLE

    @property
    def token_file(self) -> Path:
        """TorchServe's tokens; renewed when they expire."""
        return Path(self.directory) / KEY_FILE

    @property
    def log(self) -> Path:
        """The log of the server and its workers."""
        return Path(self.directory) / "server.log"

    def token(self, kind: str = "inference") -> str:
        """The current token for one of the two APIs."""
        try:
            return read_token(self.token_file, kind)
        except TokenError as error:
            raise ServeError(str(error)) from None

    def client(self, **settings: Any) -> Client:
        """A client for its predictions, with tokens that are read again when they expire."""
        return Client(self.inference_url, token_file=self.token_file, **settings)

    def manage(self, method: str, path: str, **parameters: str | int) -> Any:
        """The JSON answer of the management API. Raises ServeError with its message where it refuses."""
        for left in reversed(range(RENEWAL_TRIES + 1)):  # as a client does: the file may not hold a new token yet
            try:
                return self._manage(method, path, parameters)
            except TokenError as error:
                if not left:
                    raise ServeError(str(error)) from None
            time.sleep(RENEWAL_SECONDS)

    def _manage(self, method: str, path: str, parameters: Mapping[str, str | int]) -> Any:
        """One attempt of `manage`. Raises TokenError if there is no token, or a wrong one."""
        headers = {"Authorization": f"Bearer {read_token(self.token_file, 'management')}"}
        # Our server is on this machine: no proxy the environment names should see its tokens.
        try:
            with httpx.Client(trust_env=False, timeout=REQUEST_SECONDS, headers=headers) as http:
                answer = http.request(method, self.management_address + path, params=parameters)
            document = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise ServeError(f"{method} {path} of {self.name!r} failed: {type(error).__name__}: {error}") from None
        if not answer.is_success:
            message = document.get("message") if isinstance(document, dict) else document
            words = f"{method} {path} of {self.name!r} was answered {answer.status_code}: {message}"
            refusal = read(answer)
            refused = isinstance(refusal, RequestError) and (refusal.status, refusal.code) == REFUSED_TOKEN
            raise TokenError(words) if refused else ServeError(words)
        return document

    def describe(self, *, customized: bool = False, version: str = "") -> Any:
        """The model as the management API describes it; `customized` adds the handler's description of its tasks."""
        path = f"/models/{self.name}/{version}".rstrip("/")
        return self.manage("GET", path, **({"customized": "true"} if customized else {}))[0]

    def is_ready(self, version: str = "") -> bool:
        """Whether all its workers can answer."""
        states = [worker["status"] for worker in self.describe(version=version)["workers"]]
        return len(states) == self.workers and set(states) == {"READY"}

    def process(self) -> psutil.Process | None:
        """The running server process, or None."""
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.created) < 1 and process.status() != "zombie":
                return process
        return None

    def examples(self, task: str) -> tuple[str, str]:
        """A curl line with the current token and a Python snippet that ask for a prediction."""
        headers = [f"Authorization: Bearer {self.token()}", f"X-ETCL-Task: {task}"]
        words = [
            *("curl", self.inference_url),
            *(word for header in headers for word in ("-H", header)),
            *("-T", "image.png"),
        ]
        python = (
            "from etcl_deploy import Client\n\n"
            f"with Client({self.inference_url!r}, token_file={str(self.token_file)!r}) as client:\n"
            f"    print(client.predict('image.png', {task!r}))"
        )
        return shlex.join(words), python

    def as_json(self) -> dict[str, Any]:
        """The JSON of `etcl serve`."""
        return {
            "name": self.name,
            "running": self.process() is not None,
            "inference_url": self.inference_url,
            "management_url": self.management_url,
            "token_file": str(self.token_file),
            "log": str(self.log),
        }


def folder_of(name: str, model_store: Path) -> Path:
    """The directory of the server of that name."""
    return model_store / SERVERS / name


def check_not_running(name: str, model_store: Path) -> None:
    """Refuse to start what runs already."""
    running = find(name, model_store)
    if running and running.process():
        raise ServeError(f"{name!r} is already served at {running.inference_url}; stop it with --stop")


def find(name: str, model_store: Path) -> Server | None:
    """The server of that name, as recorded when it started; None if there is none."""
    return recorded(folder_of(name, model_store))


def recorded(directory: Path) -> Server | None:
    """The server a directory describes; None if it describes none."""
    try:
        return Server(**json.loads((directory / RECORD).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def known(name: str, model_store: Path) -> Server:
    """The server of that name. Raises ServeError if there is none."""
    server = find(name, model_store)
    if server is None:
        raise ServeError(f"no server named {name!r} was started from {model_store}")
    return server


def status(name: str, model_store: Path) -> dict[str, Any]:
    """The JSON of `etcl serve --status`, also for a server that was never started."""
    server = find(name, model_store)
    if server:
        return server.as_json()
    unknown = dict.fromkeys(("inference_url", "management_url", "token_file", "log"))
    return {"name": name, "running": False, **unknown}


def names(model_store: Path) -> list[str]:
    """The names of all recorded servers."""
    return sorted(path.parent.name for path in (model_store / SERVERS).glob(f"*/{RECORD}"))
