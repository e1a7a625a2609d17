"""Settings of an experiment: frozen dataclasses, read from TOML, changed with `--set key=value`.

Every default stands here and nowhere else. A recipe says only where it differs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from math import inf
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from etcl_deploy.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Images:
    """What every image is brought to before the network sees it."""

    size: int = 32  # height and width, in pixels
    channels: int = 3  # 3 colour, 1 grey
    mean: float = 0.5  # (x / 255 - mean) / std
    std: float = 0.5
    test_share: float = 0.2  # held back for testing, per class, where the data has no test part


@dataclass(frozen=True)
class Network:
    """The backbone all tasks share."""

    backbone: str = "resnet18"
    width: int | None = None  # hidden units (fcn3) or channels of the first stage (resnet18)
    density: float = 0.5  # share of each layer's weights a task's mask selects


@dataclass(frozen=True)
class Learning:
    """How one task is learned."""

    epochs: int = 20
    batch_size: int = 32
    optimizer: Literal["adam", "sgd"] = "adam"
    learning_rate: float = 0.003
    schedule: Literal["cosine", "constant"] = "cosine"  # of the learning rate, over a task's epochs
    momentum: float = 0.9  # of sgd
    weight_decay: float = 0.0  # of weights and heads; never of scores
    # The paper draws the scores once and carries them on; the authors' MNIST script draws them for each task.
    scores: Literal["carry", "fresh"] = "carry"
    seed: int = 0


@dataclass(frozen=True)
class Config:
    """One experiment. `sequence` names where the tasks come from; `recipe` is the file it was read from."""

    recipe: str | None = None
    sequence: str | None = None
    tasks: int | None = None  # only the first so many
    images: Images = field(default_factory=Images)
    network: Network = field(default_factory=Network)
    learning: Learning = field(default_factory=Learning)

    def as_json(self) -> dict[str, Any]:
        """The same as nested JSON objects."""
        return asdict(self)

    def with_values(self, values: Mapping[str, Any]) -> Config:
        """A copy with some fields changed, addressed by their bare names (`epochs`, `density`, ...)."""
        config = self
        for key, value in values.items():
            config = _set(config, key, value)
        return _checked(config)


SECTIONS: dict[str, Any] = {"images": Images, "network": Network, "learning": Learning}
Part = TypeVar("Part", Config, Images, Network, Learning)


def load_recipe(name: str) -> Config:
    """The recipe of that name, from the ones that ship with the package."""
    folder = resources.files("etcl_deploy.recipes")
    known = sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))
    if name not in known:
        raise ConfigError(f"unknown recipe {name!r}; known: {', '.join(known)}. For your own images: --data DIR")
    return config_from(tomllib.loads((folder / f"{name}.toml").read_text("utf-8")), recipe=name)


def config_from(values: Mapping[str, Any], recipe: str | None = None) -> Config:
    """The settings in nested tables, as TOML and JSON have them; unknown keys are refused."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if key not in SECTIONS:
            flat[key] = value
            continue
        known = [f.name for f in fields(SECTIONS[key])]
        for inner, setting in value.items():
            if inner not in known:
                raise ConfigError(f"unknown key {inner!r} in [{key}]; known: {', '.join(known)}")
            flat[inner] = setting
    return Config(recipe=recipe).with_values(flat)


def parse_settings(pairs: Iterable[str]) -> dict[str, Any]:
    """`key=value` words as typed values: numbers and true/false as in TOML, anything else as text."""
    values = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set takes key=value, not {pair!r}")
        try:
            values[key.strip()] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            values[key.strip()] = text.strip()
    return values


def _set(config: Config, key: str, value: Any) -> Config:
    for name in SECTIONS:
        section = getattr(config, name)
        if key in (f.name for f in fields(section)):
            changes: dict[str, Any] = {name: _replaced(section, key, value)}
            return replace(config, **changes)
    if key not in _all_keys():
        raise ConfigError(f"unknown setting {key!r}; known: {', '.join(_all_keys())}")
    return _replaced(config, key, value)


def _replaced(part: Part, key: str, value: Any) -> Part:
    changes = {key: _typed(key, value, get_type_hints(type(part))[key])}
    return replace(part, **changes)


def _all_keys() -> list[str]:
    own = [f.name for f in fields(Config) if f.name not in SECTIONS]
    return own + [f.name for section in SECTIONS.values() for f in fields(section)]


def _typed(key: str, value: Any, hint: Any) -> Any:
    """`value` if it is of the field's type (whole numbers do for fractions), else an error."""
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ConfigError(f"{key} must be one of {', '.join(get_args(hint))}, not {value!r}")
        return value
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if float in kinds and type(value) is int:
        return float(value)
    if type(value) not in kinds:
        names = " or ".join("nothing" if k is type(None) else k.__name__ for k in kinds)
        raise ConfigError(f"{key} must be {names}, not {value!r}")
    return value


def _checked(config: Config) -> Config:
    """The config itself, once its values are known to lie where they make sense."""
    images, network, learning = config.images, config.network, config.learning
    rules = [
        (config.tasks is None or config.tasks >= 1, "tasks", "at least 1", config.tasks),
        (1 <= images.size <= 2048, "size", "1 to 2048", images.size),
        (images.channels in (1, 3), "channels", "1 or 3", images.channels),
        (-1000 <= images.mean <= 1000, "mean", "-1000 to 1000", images.mean),
        (0.001 <= images.std <= 1000, "std", "0.001 to 1000", images.std),
        (0 < images.test_share < 1, "test_share", "between 0 and 1", images.test_share),
        (0 < network.density <= 1, "density", "above 0, at most 1", network.density),
        (
            network.width is None or 1 <= network.width <= 65536,
            "width",
            "1 to 65536",
            network.width,
        ),
        (learning.epochs >= 1, "epochs", "at least 1", learning.epochs),
        (learning.batch_size >= 2, "batch_size", "at least 2", learning.batch_size),
        (0 < learning.learning_rate < inf, "learning_rate", "above 0", learning.learning_rate),
        (0 <= learning.momentum < 1, "momentum", "0 up to 1", learning.momentum),
        (0 <= learning.weight_decay < inf, "weight_decay", "0 or more", learning.weight_decay),
        (0 <= learning.seed < 1 << 40, "seed", "0 to 2**40", learning.seed),
    ]
    for holds, key, what, value in rules:
        if not holds:
            raise ConfigError(f"{key} must be {what}, not {value}")
    return config
