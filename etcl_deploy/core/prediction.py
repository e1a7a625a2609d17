"""An answer, the same from a Predictor, a server or a client; needs nothing but Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Prediction:
    """One answer: the task, the class it chose, and the probability of every class."""

    task: str
    label: str
    index: int
    scores: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        """The same as a JSON object."""
        return {"task": self.task, "label": self.label, "index": self.index, "scores": dict(self.scores)}
