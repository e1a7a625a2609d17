"""A page as data, and its HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from etcl_deploy.core.templates import fill


@dataclass(frozen=True)
class Table:
    """Rows of texts. With `folded` the table is closed at first and that text opens it."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading."""

    id: str
    title: str
    lead: str
    pictures: Mapping[str, str] = field(default_factory=dict)  # SVG, by its description for screen readers
    tables: Sequence[Table] = ()
    text: str = ""


@dataclass(frozen=True)
class Page:
    """Everything on the page."""

    title: str
    lead: str
    notes: Sequence[str]
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    footer: str

    def as_html(self) -> str:
        """One self-contained document; every text is escaped."""
        return fill("etcl_deploy.report", "page.html", vars(self))
