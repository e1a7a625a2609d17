"""Which data sets are there: below the data root each has a folder of its own name with its makers' files, or one file
NAME.npz (see npz.py), which may hold a part of it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from etcl_deploy.data import npz
from etcl_deploy.data.catalog import DATA_SETS
from etcl_deploy.data.dataset import DataSet
from etcl_deploy.data.sequences import sequence_of
from etcl_deploy.data.source import Source
from etcl_deploy.errors import ConfigError, DataError
from etcl_deploy.settings import about_recipe, load_recipe, recipe_names

VARIABLE = "ETCL_DATA"


def data_root(chosen: Path | None = None) -> Path:
    """The folder recipes find their data in: `chosen`, else $ETCL_DATA, else ~/.cache/etcl_deploy."""
    return chosen or Path(os.environ.get(VARIABLE) or Path.home() / ".cache" / "etcl_deploy")


def data_set(name: str) -> DataSet:
    """The data set of that name."""
    if name not in DATA_SETS:
        raise ConfigError(f"unknown data set {name!r}; known: {', '.join(DATA_SETS)}")
    return DATA_SETS[name]


def place_of(name: str, root: Path) -> Path | None:
    """Where a data set is, its folder or its .npz file; None if nowhere."""
    folder, packed = root / name, root / f"{name}.npz"
    if not data_set(name).lacks(folder):
        return folder
    return packed if packed.exists() else None


def read_data_set(name: str, root: Path) -> tuple[Source, str | None]:
    """The data set below `root`, and in words which part of it is missing."""
    known, place = data_set(name), place_of(name, root)
    if place is None:
        lacking = ", ".join(known.lacks(root / name))
        raise DataError(
            f"{known.title} is neither in {root / name} (missing: {lacking}) nor {root / f'{name}.npz'}"
            f"{_pickled(known, root / name)}; `etcl data check` with the recipe's name says where to get it; another "
            f"folder can be named with --data-root DIR or {VARIABLE}=DIR"
        )
    if place.is_dir():
        source = known.read(place)
    elif known.read_npz:
        source = known.read_npz(place)
    else:
        source = npz.read_npz(place, name, known.classes)
    return replace(source, name=name), _lacking(known, place, (len(source.train), len(source.test)))


def _lacking(known: DataSet, place: Path, here: tuple[int, int]) -> str | None:
    """The missing part of a data set, in words."""
    if not known.items or all(there >= stated for there, stated in zip(here, known.items, strict=True)):
        return None
    train, test = (f"{there:,} of {stated:,}" for there, stated in zip(here, known.items, strict=True))
    return f"{known.title}: {train} training and {test} test items are in {place.name}"


def _pickled(known: DataSet, folder: Path) -> str:
    """A word on a version that must not be read, where it is there."""
    if not known.pickled or not (folder / known.pickled).exists():
        return ""
    return (
        f" ({folder / known.pickled} is pickled, and pickles can run code: they are never read; its makers have the "
        "same images as 'binary version (suitable for C programs)')"
    )


def list_recipes(root: Path | None) -> list[dict[str, Any]]:
    """The rows of `etcl recipes`."""
    rows = []
    for name in recipe_names():
        config = load_recipe(name)
        sequence = sequence_of(config.sequence)
        there = {data: place_of(data, data_root(root)) is not None for data in sequence.data}
        about = {"name": name, "about": about_recipe(name), "network": config.network.backbone}
        rows.append({**about, "tasks": sequence.count, "data": there, "ready": all(there.values())})
    return rows


def check_recipe(name: str, root: Path | None) -> list[dict[str, Any]]:
    """The rows of `etcl data check`: the data sets a recipe needs."""
    return [_entry(data, data_root(root)) for data in sequence_of(load_recipe(name).sequence).data]


def _entry(name: str, root: Path) -> dict[str, Any]:
    """One row of `etcl data check`."""
    known, place = data_set(name), place_of(name, root)
    partial = None
    if place and known.items and not place.is_dir():
        shapes = npz.shapes_in(place)
        partial = _lacking(known, place, (shapes.get("train_y", (0,))[0], shapes.get("test_y", (0,))[0]))
    needed = not place or partial
    return {
        "name": name,
        "title": known.title,
        "home": known.home,
        "terms": known.terms,
        "place": str(place) if place else None,
        "partial": partial,
        "missing": [] if place else known.lacks(root / name),
        "pickled": _pickled(known, root / name).strip(" ()"),
        "folder": str(root / name),
        "download": sum(file.bytes for file in known.files) if known.files and needed else None,
        "by_hand": known.by_hand if needed else "",
    }
