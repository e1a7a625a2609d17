"""From a bundle file to a running server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etcl_deploy.bundle.bundle import load_bundle
from etcl_deploy.core import atomic
from etcl_deploy.export.to_mar import archive, check_name
from etcl_deploy.serve.process import start, stop
from etcl_deploy.serve.properties import DEFAULT_PORT, check_ports, cores
from etcl_deploy.serve.server import Server, check_not_running


@dataclass(frozen=True)
class ServeOptions:
    """How a bundle is to be served. `workers` None: one process for every core, each with one thread."""

    port: int = DEFAULT_PORT
    workers: int | None = None
    cache_bytes: int | None = None
    pinned: tuple[str, ...] = ()
    prefetch: bool = False
    pushes: bool = False

    def settings(self) -> dict[str, Any]:
        """The entries for the archive's model-config.yaml."""
        workers = self.workers or cores()
        cache = {} if self.cache_bytes is None else {"cacheBytes": self.cache_bytes}
        etcl = {**cache, "pinned": list(self.pinned), "prefetch": self.prefetch}
        return {"minWorkers": workers, "maxWorkers": workers, "etcl": etcl}


def serve_bundle(path: Path, name: str, model_store: Path, options: ServeOptions) -> Server:
    """Archive the bundle where needed and start a server on it."""
    check_name(name)
    check_not_running(name, model_store)
    check_ports(options.port)
    bundle = load_bundle(path)
    for task in options.pinned:
        bundle.task(task)
    settings, data = options.settings(), path.read_bytes()
    server = start(
        *(name, model_store, options.port, settings["minWorkers"]),
        pushes=options.pushes,
        prepare=lambda: archive(path, name, model_store, settings),
    )
    try:
        atomic.write_bytes(server.bundle, data)
    except BaseException:
        stop(server)
        raise
    return server
