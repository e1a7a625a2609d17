"""From a run to a bundle file, from a bundle file to a running server."""

from __future__ import annotations

from pathlib import Path

from etcl_deploy.bundle.bundle import save
from etcl_deploy.config import Config
from etcl_deploy.errors import BundleError
from etcl_deploy.export.to_bundle import bundle_bytes
from etcl_deploy.export.to_mar import archive
from etcl_deploy.learn.run import Run
from etcl_deploy.serve.properties import check_ports
from etcl_deploy.serve.server import Server, check_not_running, start


def bundle_run(run: Run, config: Config, path: Path) -> None:
    """Write everything needed to predict the run's tasks to `path`."""
    if path.is_dir():
        raise BundleError(f"{path} is a directory; name a file ending in .etcl")
    accuracies = dict(zip(run.tasks, run.matrix[-1], strict=True))
    summary = run.summary(config)
    about = {
        **{key: summary[key] for key in ("method", "recipe", "seed", "matrix", "acc", "bwt")},
        "config": config.as_json(),
        "versions": dict(run.versions),
    }
    save(path, bundle_bytes(run.network, config.network.backbone, accuracies, about))


def serve_bundle(path: Path, name: str, model_store: Path, port: int, workers: int) -> Server:
    """Archive the bundle where needed and start a server on it."""
    check_not_running(name, model_store)
    check_ports(port)
    archive(path, name, model_store, {"minWorkers": workers, "maxWorkers": workers})
    return start(name, model_store, port, workers)
