"""Continual learning that ends in something you can deploy: learn, bundle, serve, export."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etcl_deploy.bundle.bundle import Bundle, load_bundle
    from etcl_deploy.client.client import AsyncClient, Client
    from etcl_deploy.config import Learning
    from etcl_deploy.core.plan import Plan
    from etcl_deploy.core.prediction import Prediction
    from etcl_deploy.core.preprocessing import Preprocessing
    from etcl_deploy.core.task import Task
    from etcl_deploy.errors import EtclError
    from etcl_deploy.learn.run import Run
    from etcl_deploy.learn.trainer import learn_sequence
    from etcl_deploy.network.masked_network import MaskedNetwork
    from etcl_deploy.network.tracing.trace import mask_network
    from etcl_deploy.runtime.predictor import Predictor

# In a checkout export/ and handlers/ stand beside this folder; installed they are inside it.
if (Path(__file__).parent.parent / "pyproject.toml").exists():
    __path__.append(str(Path(__file__).parent.parent))

__version__ = "0.1.0"
__all__ = [
    "AsyncClient",
    "Bundle",
    "Client",
    "EtclError",
    "Learning",
    "MaskedNetwork",
    "Plan",
    "Prediction",
    "Predictor",
    "Preprocessing",
    "Run",
    "Task",
    "learn_sequence",
    "load_bundle",
    "mask_network",
]

_HOMES = {
    "AsyncClient": "client.client",
    "Bundle": "bundle.bundle",
    "Client": "client.client",
    "EtclError": "errors",
    "Learning": "config",
    "MaskedNetwork": "network.masked_network",
    "Plan": "core.plan",
    "Prediction": "core.prediction",
    "Predictor": "runtime.predictor",
    "Preprocessing": "core.preprocessing",
    "Run": "learn.run",
    "Task": "core.task",
    "learn_sequence": "learn.trainer",
    "load_bundle": "bundle.bundle",
    "mask_network": "network.tracing.trace",
}


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
