"""Continual learning that ends in something you can deploy: learn, bundle, serve, export."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etcl_deploy.bundle.bundle import Bundle as Bundle
    from etcl_deploy.bundle.bundle import load_bundle as load_bundle
    from etcl_deploy.client.client import AsyncClient as AsyncClient
    from etcl_deploy.client.client import Client as Client
    from etcl_deploy.config import Config as Config
    from etcl_deploy.config import Learning as Learning
    from etcl_deploy.core.plan import Plan as Plan
    from etcl_deploy.core.prediction import Prediction as Prediction
    from etcl_deploy.core.preprocessing import Preprocessing as Preprocessing
    from etcl_deploy.core.task import Task as Task
    from etcl_deploy.errors import EtclError as EtclError
    from etcl_deploy.export.to_onnx import export_task as export_task
    from etcl_deploy.learn.run import Run as Run
    from etcl_deploy.learn.run import RunSummary as RunSummary
    from etcl_deploy.learn.trainer import learn_sequence as learn_sequence
    from etcl_deploy.network.masked_network import MaskedNetwork as MaskedNetwork
    from etcl_deploy.network.tracing.trace import mask_network as mask_network
    from etcl_deploy.runs.session import Session as Session
    from etcl_deploy.runs.session import add as add
    from etcl_deploy.runs.session import resume as resume
    from etcl_deploy.runs.session import train as train
    from etcl_deploy.runs.store import StoredRun as StoredRun
    from etcl_deploy.runs.store import load_run as load_run
    from etcl_deploy.runs.to_bundle import bundle_run as bundle_run
    from etcl_deploy.runtime.predictor import Predictor as Predictor
    from etcl_deploy.settings import load_recipe as load_recipe

# In a checkout export/ and handlers/ stand beside this folder; installed they are inside it.
if (Path(__file__).parent.parent / "pyproject.toml").exists():
    __path__.append(str(Path(__file__).parent.parent))

__version__ = "0.1.0"

# Every public name, by the module it comes from.
_PUBLIC = {
    "bundle.bundle": ["Bundle", "load_bundle"],
    "client.client": ["AsyncClient", "Client"],
    "config": ["Config", "Learning"],
    "core.plan": ["Plan"],
    "core.prediction": ["Prediction"],
    "core.preprocessing": ["Preprocessing"],
    "core.task": ["Task"],
    "errors": ["EtclError"],
    "export.to_onnx": ["export_task"],
    "learn.run": ["Run", "RunSummary"],
    "learn.trainer": ["learn_sequence"],
    "network.masked_network": ["MaskedNetwork"],
    "network.tracing.trace": ["mask_network"],
    "runs.session": ["Session", "add", "resume", "train"],
    "runs.store": ["StoredRun", "load_run"],
    "runs.to_bundle": ["bundle_run"],
    "runtime.predictor": ["Predictor"],
    "settings": ["load_recipe"],
}
_HOMES = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Names are imported when first used: `import etcl_deploy` is instant and needs no torch."""
    if name == "export":  # so that etcl_deploy.export.to_onnx is in reach after `import etcl_deploy`
        import_module("etcl_deploy.export.to_onnx")
        return import_module("etcl_deploy.export")
    if name not in _HOMES:
        raise AttributeError(f"module 'etcl_deploy' has no attribute {name!r}")
    return getattr(import_module(f"etcl_deploy.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
