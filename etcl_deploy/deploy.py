"""From a run to a bundle file, from a bundle file to a running server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from etcl_deploy.bundle.bundle import Bundle, load_bundle, save, to_bytes
from etcl_deploy.bundle.delta import apply_delta
from etcl_deploy.bundle.format import kind_of
from etcl_deploy.config import Config
from etcl_deploy.core import atomic
from etcl_deploy.core.atomic import check_replaceable
from etcl_deploy.core.pixels import png
from etcl_deploy.core.task import Items, parts
from etcl_deploy.errors import ServeError
from etcl_deploy.export.parity import seeded_images
from etcl_deploy.export.to_bundle import bundle_of, with_accuracies
from etcl_deploy.export.to_mar import archive, archive_version, archive_waiting, check_name, settings_of
from etcl_deploy.learn.metrics import percent_right
from etcl_deploy.learn.run import Run
from etcl_deploy.runtime.predictor import Predictor
from etcl_deploy.serve.process import start, stop
from etcl_deploy.serve.properties import DEFAULT_PORT, HOST, check_ports, default_workers
from etcl_deploy.serve.push import next_version, remove_others, switch
from etcl_deploy.serve.server import Server, check_not_running, find, names

EACH = 1024  # items that are looked at together


def bundle_run(
    run: Run,
    config: Config,
    path: Path,
    encoding: str = "coded",
    precision: str = "fp32",
    tests: Mapping[str, Items] | None = None,
) -> None:
    """Write everything needed to predict the run's tasks to `path`.

    In fewer bits than were learned, the accuracy of each task is measured anew on `tests`, by name, as far as they are
    there.
    """
    check_replaceable(path)
    accuracies = dict(zip(run.tasks, run.matrix[-1], strict=True))
    summary = run.summary(config)
    about = {
        **{key: summary[key] for key in ("method", "recipe", "seed", "matrix", "acc", "bwt")},
        "config": config.as_json(),
        "versions": dict(run.versions),
    }
    bundle = bundle_of(run.network, config.network.backbone, accuracies, about, precision)
    if precision != "fp32":
        predictor = Predictor(bundle)
        found = {
            name: _accuracy(predictor, name, items) for name, items in (tests or {}).items() if name in bundle.tasks
        }
        bundle = with_accuracies(bundle, {name: found.get(name) for name in bundle.tasks})
    save(path, to_bytes(bundle, encoding))


def _accuracy(predictor: Predictor, name: str, items: Items) -> float:
    """The share of items, in percent, that a task gets right."""
    found = zip(parts(items.images, EACH), parts(items.labels, EACH), strict=True)
    return percent_right((predictor.logits(name, images), labels) for images, labels in found)


@dataclass(frozen=True)
class Wishes:
    """How a bundle is to be served; None: as suits this machine."""

    port: int = DEFAULT_PORT
    workers: int | None = None
    cache_bytes: int | None = None
    pinned: tuple[str, ...] = ()
    prefetch: bool = False
    pushes: bool = False

    def settings(self) -> dict[str, Any]:
        """What it says in the archive's model-config.yaml."""
        workers = self.workers or default_workers()
        cache = {} if self.cache_bytes is None else {"cacheBytes": self.cache_bytes}
        etcl = {**cache, "pinned": list(self.pinned), "prefetch": self.prefetch}
        return {"minWorkers": workers, "maxWorkers": workers, "etcl": etcl}


def serve_bundle(path: Path, name: str, model_store: Path, wishes: Wishes) -> Server:
    """Archive the bundle where needed and start a server on it."""
    check_name(name)
    check_not_running(name, model_store)
    check_ports(wishes.port)
    bundle = load_bundle(path)
    for task in wishes.pinned:
        bundle.task(task)
    settings, data = wishes.settings(), path.read_bytes()
    server = start(
        *(name, model_store, wishes.port, settings["minWorkers"]),
        pushes=wishes.pushes,
        prepare=lambda: archive(path, name, model_store, settings),
    )
    try:
        atomic.write_bytes(server.bundle, data)
    except BaseException:
        stop(server)
        raise
    return server


def push_bundle(path: Path, server: Server) -> tuple[Bundle, str]:
    """Serve another bundle, or what a delta makes of the one that is served, in its place; gives it and its version."""
    directory, store = Path(server.directory), server.store
    with atomic.locked(directory):
        new = directory / "pushed.etcl"
        archived = store / f".{server.name}.mar"
        if kind_of(path) == "delta":
            data = apply_delta(server.bundle, path)
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
            archive_version(new, server.name, version, archived, settings)
            # All that needs room is written before the switch. After it, it is what is served: what a start by hand has
            # to load, and what the next delta belongs to.
            with archive_waiting(new, server.name, store, settings):
                switch(server, archived, version, _checks(bundle))
            new.replace(server.bundle)
        finally:
            archived.unlink(missing_ok=True)  # TorchServe has a copy of its own
            new.unlink(missing_ok=True)
        remove_others(server, version)
    return bundle, version


def find_server(url: str, model_store: Path) -> Server:
    """The server of a store that answers at a URL, that of its predictions or its management."""
    servers = [found for name in names(model_store) if (found := find(name, model_store))]
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
    found = {}
    for number, name in enumerate(bundle.tasks):
        image = images[number % len(images)]
        found[name] = (png(image), int(predictor.logits(name, image.unsqueeze(0)).argmax()))
    return found
