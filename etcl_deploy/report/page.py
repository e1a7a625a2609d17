"""The page: parts of it as data, and how they become HTML that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from etcl_deploy.core.templates import fill


@dataclass(frozen=True)
class Picture:
    """A drawing, and what it shows in words, for those who cannot see it."""

    label: str
    svg: str


@dataclass(frozen=True)
class Table:
    """Rows of texts; `folded` names a table that is shown when asked for."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page with a heading."""

    id: str
    title: str
    lead: str
    pictures: Sequence[Picture] = ()
    tables: Sequence[Table] = ()
    text: str = ""


@dataclass(frozen=True)
class Page:
    """All that is on the page."""

    title: str
    lead: str
    notes: Sequence[str]
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    footer: str

    def as_html(self) -> str:
        """One self-contained document; every text is escaped."""
        return fill("etcl_deploy.report", "page.html", vars(self))
