"""From settings to a network: one of ours, or what a function of the user's gives."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from etcl_deploy.config import Config
from etcl_deploy.core.plan import Plan, PlanError
from etcl_deploy.core.preprocessing import Preprocessing
from etcl_deploy.errors import ConfigError
from etcl_deploy.network.backbones import BACKBONES
from etcl_deploy.network.builder import Image
from etcl_deploy.network.masked_network import MaskedNetwork
from etcl_deploy.network.tracing.trace import mask_network


def preprocessing_of(config: Config) -> Preprocessing:
    """The preprocessing the config describes."""
    images = config.images
    return Preprocessing(images.size, images.size, images.channels, images.mean, images.std)


def build_network(config: Config) -> MaskedNetwork:
    """A network with fresh scores, and weights that are fresh or from a file, as the config describes it."""
    preprocessing, settings = preprocessing_of(config), config.network
    image = (preprocessing.channels, preprocessing.height, preprocessing.width)
    width = {} if settings.width is None else {"width": settings.width}
    if ":" in settings.backbone:
        module = _users_module(settings.backbone, width, config.learning.seed)
        density, seed = settings.density, config.learning.seed
        network = mask_network(module, image, preprocessing=preprocessing, density=density, seed=seed)
    else:
        plan = _our_plan(settings.backbone, image, width)
        generator = torch.Generator().manual_seed(config.learning.seed)
        network = MaskedNetwork(plan, preprocessing, settings.density, generator)
    if config.learning.weights:
        _read_weights(network, Path(config.learning.weights))
    return network


def _our_plan(backbone: str, image: Image, width: Mapping[str, int]) -> Plan:
    if backbone not in BACKBONES:
        known = f"{', '.join(sorted(BACKBONES))}, or your own as package.module:function"
        raise ConfigError(f"unknown backbone {backbone!r}; known: {known}")
    try:
        plan = BACKBONES[backbone](image, **width)
        _ = plan.shapes
    except PlanError as error:
        raise ConfigError(f"{backbone} does not fit images of {image}: {error}") from None
    return plan


def _read_weights(network: MaskedNetwork, path: Path) -> None:
    """Take the backbone from a file of tensors `STEP/weight`, such as a run directory's backbone file."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"weights: cannot read {path}: {error}") from None
    for step, layer in network.masked_layers.items():
        tensor = tensors.get(f"{step}/weight")
        if tensor is None or tensor.shape != layer.weight.shape:
            shape = "no tensor" if tensor is None else f"shape {list(tensor.shape)}"
            raise ConfigError(f"weights: {path} has {shape} for {step}/weight; {list(layer.weight.shape)} is right")
        with torch.no_grad():
            layer.weight.copy_(tensor)


def choose_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one; asking for CUDA where there is none is an error."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no CUDA device is available here; use --device cpu or auto")
    return torch.device(name)


def _users_module(backbone: str, width: Mapping[str, int], seed: int) -> nn.Module:
    """The network that a function of the user's gives, named as `package.module:function`."""
    with _working_directory_importable(), torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        function = _imported(backbone)
        torch.manual_seed(seed)  # what torch's layers draw their weights from
        try:
            module = function(**width)
        except Exception as error:
            raise ConfigError(f"{backbone} could not be called: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{backbone} must give a torch.nn.Module, not a {type(module).__name__}")
    return module


def _imported(name: str) -> Callable[..., object]:
    """The function or class behind `package.module:function`."""
    module_name, _, function_name = name.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:  # importing runs the user's code
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"backbone {name!r}: cannot import module {module_name!r}: {reason}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"backbone {name!r}: module {module_name!r} has no function {function_name!r}")
    return cast("Callable[..., object]", function)


@contextmanager
def _working_directory_importable() -> Iterator[None]:
    """Modules of the current directory can be imported, and the path is as before afterwards."""
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path[:] = before
