"""Replace the bundle that is served, while traffic flows.

The new bundle is registered as a further version. It is asked about every task and must answer like the bundle. Then it
becomes the default, and the old version is removed once it has answered all its requests. An error before the switch
leaves the old version as it was.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from etcl_deploy.bundle.bundle import Bundle, load_bundle, save
from etcl_deploy.bundle.delta import apply_delta_file
from etcl_deploy.bundle.format import kind_of, map_file
from etcl_deploy.client.client import Client
from etcl_deploy.core import atomic
from etcl_deploy.core.pixels import png
from etcl_deploy.errors import EtclError, ServeError
from etcl_deploy.export.parity import seeded_images
from etcl_deploy.export.to_mar import VERSION, settings_of, write_archive
from etcl_deploy.runtime.predictor import Predictor
from etcl_deploy.serve.properties import HOST
from etcl_deploy.serve.server import START_SECONDS, Server, find, names

DRAIN_SECONDS = 130  # longer than the server lets a worker take for an answer


def live_version(server: Server) -> str:
    """The version that answers now."""
    version: str = server.describe()["modelVersion"]
    return version


def next_version(server: Server) -> str:
    """A version number above all others."""
    known = server.manage("GET", f"/models/{server.name}/all")
    return f"{1 + max(int(model['modelVersion'].partition('.')[0]) for model in known)}.0"


def switch(server: Server, archive: Path, version: str, checks: Mapping[str, tuple[bytes, int]]) -> None:
    """Make `archive`, a file in the server's store, the version that answers.

    `checks` holds for every task an image and the class it must get. On any failure the live version stays, and a
    ServeError says what failed.
    """
    if not server.pushes:
        raise ServeError(f"{server.name!r} was started without --allow-push; start it again with it")
    live = live_version(server)
    try:
        # Not synchronous: TorchServe would wait in a thread that answers requests.
        server.manage("POST", "/models", url=archive.name, initial_workers=server.workers, synchronous="false")
        _wait_until_ready(server, version)
        _check_answers(server, version, checks)
        server.manage("PUT", f"/models/{server.name}/{version}/set-default")
    except BaseException as error:
        with suppress(EtclError):
            if live_version(server) == version:  # it was only the answer that got lost
                return
            server.manage("DELETE", f"/models/{server.name}/{version}")
        if isinstance(error, EtclError):
            raise ServeError(f"the new bundle is not served, version {live} still is: {error}") from None
        raise


def remove_others(server: Server, version: str) -> None:
    """Remove all other versions, each when it has answered all its requests."""
    for model in server.manage("GET", f"/models/{server.name}/all"):
        old = model["modelVersion"]
        if old != version:
            try:
                _drain(server, old)
                server.manage("DELETE", f"/models/{server.name}/{old}")
            except ServeError as error:
                raise ServeError(f"the new bundle is served, but version {old} could not be removed: {error}") from None


def _wait_until_ready(server: Server, version: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.is_ready(version):
            return
        time.sleep(0.2)
    raise ServeError(f"its workers were not ready after {START_SECONDS} s (see {server.log})")


def _check_answers(server: Server, version: str, checks: Mapping[str, tuple[bytes, int]]) -> None:
    """Ask the new version about every task."""
    with Client(f"{server.inference_url}/{version}", token_file=server.token_file) as client:
        answers = client.predict_many([image for image, _ in checks.values()], list(checks))
    for (task, (_, expected)), answer in zip(checks.items(), answers, strict=True):
        if isinstance(answer, Exception):
            raise answer
        if answer.index != expected:
            raise ServeError(f"task {task!r} gives class {answer.index} where the bundle gives {expected}")


def _drain(server: Server, version: str) -> None:
    """Wait until every worker of a version has answered a question asked after the switch."""
    deadline = time.monotonic() + DRAIN_SECONDS
    done: set[int] = set()
    last = "it was still busy"
    while time.monotonic() < deadline:
        try:
            model: Any = server.describe(customized=True, version=version)
        except ServeError as error:  # a worker that died meanwhile is started again: there is time
            last = str(error)
            time.sleep(0.2)
            continue
        done.add(model["customizedMetadata"]["worker"])
        waiting = model["jobQueueStatus"]["pendingRequests"]
        if not waiting and done >= {worker["pid"] for worker in model["workers"]}:
            return
        time.sleep(0.02)
    raise ServeError(f"{last} after {DRAIN_SECONDS} s")


def push_bundle(path: Path, server: Server) -> tuple[Bundle, str]:
    """Serve another bundle, or the result of a delta to the served one. Returns the new bundle and its version."""
    directory, store = Path(server.directory), server.store
    with atomic.locked(directory):
        new = directory / "pushed.etcl"
        archived = store / f".{server.name}.mar"
        if kind_of(map_file(path)) == "delta":
            data = apply_delta_file(server.bundle, path)
        else:
            load_bundle(path)  # so that a refusal names the user's file
            data = path.read_bytes()
        try:
            save(new, data)
            bundle = load_bundle(new)
            settings = settings_of(store / f"{server.name}.mar")
            for task in settings["etcl"]["pinned"]:
                bundle.task(task)
            version = next_version(server)
            write_archive(new, server.name, version, archived, settings)
            # All that needs room is written before the switch. After it, it is what is served: what a start by hand has
            # to load, and what the next delta belongs to.
            with atomic.replacing(store / f"{server.name}.mar") as waiting:
                write_archive(new, server.name, VERSION, waiting, settings)
                switch(server, archived, version, _checks(bundle))
            new.replace(server.bundle)
        finally:
            archived.unlink(missing_ok=True)  # TorchServe has a copy of its own
            new.unlink(missing_ok=True)
        remove_others(server, version)
    return bundle, version


def find_server(url: str, model_store: Path) -> Server:
    """The server of a store that answers at a URL, that of its predictions or its management."""
    servers = [server for name in names(model_store) if (server := find(name, model_store))]
    try:
        asked = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ServeError(f"{url!r} is no URL: {error}") from None
    for server in servers:
        here = asked.host in (HOST, "localhost") and asked.port in (server.port, server.port + 1)
        if here and server.process():
            return server
    known = ", ".join(server.management_url for server in servers) or "none"
    raise ServeError(f"no server at {url} was started from {model_store} (known: {known}); see --model-store")


def _checks(bundle: Bundle) -> dict[str, tuple[bytes, int]]:
    """An image for every task, and the class it gets."""
    predictor = Predictor(bundle, cache_bytes=0)
    images = seeded_images(bundle.preprocessing)
    checks = {}
    for number, name in enumerate(bundle.tasks):
        image = images[number % len(images)]
        checks[name] = (png(image), int(predictor.logits(name, image.unsqueeze(0)).argmax()))
    return checks
