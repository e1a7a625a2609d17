"""Settings as people write them: recipes in TOML, records in JSON, `--set key=value`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from etcl_deploy.config import Config, ConfigSection
from etcl_deploy.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Each preset with the files and tables it is made of; where they differ, the later one holds.
PRESETS = {"paper": ("paper",), "authors": ("paper", "authors")}


def recipe_names() -> list[str]:
    """The recipes that ship with the package."""
    folder = resources.files("etcl_deploy.recipes")
    return sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))


def preset_names() -> list[str]:
    """The presets: choices of settings for the method etcl, by name."""
    return sorted(PRESETS)


def load_recipe(name: str, method: str | None = None, preset: str | None = None) -> Config:
    """The recipe of that name, or in the user's file NAME.toml, with the settings of `method`, or of `preset`.

    A table `[methods.NAME]` holds the settings in which a method differs, by their bare names. It must not give the
    method another budget. A table `[presets.NAME]` holds what a preset says of this data set, budget and tasks
    included; with a preset there are no settings of methods.
    """
    path = Path(name)
    try:
        values = tomllib.loads(_text(name))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"cannot read {name}: {error}") from None
    methods, presets = (_tables(name, word, values.pop(word, {})) for word in ("methods", "presets"))
    stated = values.pop("preset", None)
    config = config_from({"recipe": path.stem, **values})
    # Whichever is asked for, all must be right.
    for key, table in methods.items():
        if config.with_values({**table, "method": key}).budget() != config.budget():
            raise ConfigError(f"{name}: [methods.{key}] can say how it learns, not another network, epochs or images")
    for key in presets:
        with_preset(config.with_values({"method": "etcl"}), key, presets)
    chosen = method or config.learning.method
    if preset is None and chosen == "etcl":  # others are compared with a recipe whatever its preset
        preset = stated
    if preset is not None:
        return with_preset(config.with_values({"method": chosen}), preset, presets)
    return config.with_values({**methods.get(chosen, {}), "method": chosen})


def with_preset(config: Config, preset: str, own: Mapping[str, Mapping[str, Any]] = MappingProxyType({})) -> Config:
    """The settings changed by a preset: by what it says of all data, then by what `own` says, of this data set."""
    if preset not in preset_names():
        raise ConfigError(f"unknown preset {preset!r}; known: {', '.join(preset_names())}")
    values: dict[str, Any] = {}
    for layer in PRESETS[preset]:
        values |= tomllib.loads((resources.files("etcl_deploy.presets") / f"{layer}.toml").read_text("utf-8"))
    for layer in PRESETS[preset]:
        values |= own.get(layer, {})
    fixed = [key for key in ("recipe", "preset", "method") if key in values]
    if fixed:
        raise ConfigError(f"a preset cannot change {fixed[0]}; leave it out of [presets.{preset}]")
    return config.with_values({**values, "preset": preset})


def _tables(name: str, word: str, tables: Any) -> dict[str, dict[str, Any]]:
    """The tables `[word.NAME]` of a recipe."""
    for table in tables.values() if isinstance(tables, dict) else [tables]:
        if not isinstance(table, dict):
            raise ConfigError(f"{name}: [{word}.NAME] must be a table of settings, not {table!r}")
    checked: dict[str, dict[str, Any]] = tables
    return checked


def about_recipe(name: str) -> str:
    """The description in the recipe's first line."""
    return _text(name).partition("\n")[0].removeprefix("# ")


def _text(name: str) -> str:
    if name.endswith(".toml"):
        return Path(name).read_text("utf-8")
    if name not in recipe_names():
        known = ", ".join(recipe_names())
        raise ConfigError(
            f"unknown recipe {name!r}; known: {known}. A file of your own: NAME.toml. Your own images: --data DIR"
        )
    return (resources.files("etcl_deploy.recipes") / f"{name}.toml").read_text("utf-8")


def config_from(values: Mapping[str, Any]) -> Config:
    """The settings in nested tables, as TOML and JSON have them; unknown keys are refused."""
    return Config().with_values(flat(values))


def missing_from(values: Mapping[str, Any]) -> list[str]:
    """The settings that nested tables do not name."""
    named = flat(values)
    return [key for key in flat(Config().as_json()) if key not in named]


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in nested tables by their bare names."""
    return dict(_flat(values, Config(), ""))


def _flat(values: Mapping[str, Any], section: ConfigSection, path: str) -> Iterator[tuple[str, Any]]:
    known = [f.name for f in fields(section)]  # type: ignore[arg-type]
    for key, value in values.items():
        if key not in known:
            where = f" in [{path}]" if path else ""
            raise ConfigError(f"unknown key {key!r}{where}; known: {', '.join(known)}")
        inner = getattr(section, key)
        if not isinstance(inner, ConfigSection):
            yield key, value
        elif isinstance(value, Mapping):
            yield from _flat(value, inner, f"{path}.{key}".lstrip("."))
        else:
            raise ConfigError(f"{key} must be a table of settings, not {value!r}")


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
