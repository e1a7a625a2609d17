"""Pages from templates."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources

from jinja2 import Environment, StrictUndefined


def fill(package: str, name: str, values: Mapping[str, object]) -> str:
    """The template of that name in a package, filled with values: each is escaped, and none may be missing."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    source = (resources.files(package) / name).read_text("utf-8")
    return environment.from_string(source).render(values) + "\n"
