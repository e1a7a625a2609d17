"""Checks of this machine: what works, what is missing, and how to get it."""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

from etcl_deploy.errors import ServeError
from etcl_deploy.serve.java import find_java
from etcl_deploy.serve.properties import DEFAULT_PORT, check_ports

ONNXRUNTIME = ("onnxruntime-gpu", "onnxruntime")  # each platform has one of them; both install the same module


@dataclass(frozen=True)
class Check:
    """The result of one check; `etcl doctor` fails when something `needed` is missing."""

    name: str
    ok: bool
    found: str
    hint: str = ""
    needed: bool = True


def examine() -> list[Check]:
    """All checks, in the order they are shown."""
    return [_python(), *(_package(*names) for names in _dependencies()), _cuda(), _java(), _ports()]


def _python() -> Check:
    ok = (3, 10) <= sys.version_info < (3, 14)
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    return Check("Python", ok, found, "" if ok else "use Python 3.10 to 3.13")


def _dependencies() -> list[tuple[str, ...]]:
    """The packages this one declares for every platform, each with its alternatives."""
    dependencies: list[tuple[str, ...]] = []
    try:
        requirements = requires("etcl-deploy") or []
    except PackageNotFoundError:  # a checkout on the path: it is not installed, and says so
        return [("etcl-deploy",)]
    for requirement in requirements:
        name = re.split(r"[^\w-]", requirement)[0]
        if name == ONNXRUNTIME[0]:
            dependencies.append(ONNXRUNTIME)
        elif ";" not in requirement:  # no condition: neither an extra nor one platform's
            dependencies.append((name,))
    return dependencies


def _package(*names: str) -> Check:
    for name in names:
        try:
            return Check(name, True, version(name))
        except PackageNotFoundError:
            continue
    return Check(names[-1], False, "not installed", f"pip install {names[-1]}")


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
