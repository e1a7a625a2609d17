"""From a run to a bundle file, from a bundle file to a running server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from etcl_deploy.atomic import check_replaceable
from etcl_deploy.bundle.bundle import save, to_bytes
from etcl_deploy.config import Config
from etcl_deploy.export.to_bundle import bundle_of, with_accuracies
from etcl_deploy.export.to_mar import archive
from etcl_deploy.learn.run import Run
from etcl_deploy.learn.task import Items
from etcl_deploy.runtime.predictor import Predictor
from etcl_deploy.serve.properties import check_ports
from etcl_deploy.serve.server import Server, check_not_running, start


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
    right = predictor.logits(name, items.images).argmax(1) == items.labels
    return 100 * int(right.sum()) / len(right)


def serve_bundle(path: Path, name: str, model_store: Path, port: int, workers: int) -> Server:
    """Archive the bundle where needed and start a server on it."""
    check_not_running(name, model_store)
    check_ports(port)
    archive(path, name, model_store, {"minWorkers": workers, "maxWorkers": workers})
    return start(name, model_store, port, workers)
