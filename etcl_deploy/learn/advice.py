"""Advice: what similar tasks say of a new one's training items. Pure, but for their answers, which are given.

Their sub-networks are frozen, so they are asked once. Labels are partly replaced by what they say on average: by more
where more of them are asked, since many know better than one, and less and less while the task is learned, so that in
the end it can know better than all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F


class Advice:
    """The labels of training items, and what each of some tasks says of the first of them: class probabilities."""

    def __init__(self, labels: Tensor, classes: int, said: Mapping[str, Tensor], share: float) -> None:
        """`share` is how much of a label advice may be, if very many give it."""
        self._labels = labels
        self._classes = classes
        self._said = {name: probabilities.to(labels.device) for name, probabilities in said.items()}
        self._share = share

    def __bool__(self) -> bool:
        """Whether anybody gives advice."""
        return bool(self._said) and self._share > 0

    def targets(self, weight: float = 1.0, without: str | None = None) -> Tensor:
        """Class probabilities `[items, classes]`: labels with `weight` of the advice, a task's own left out."""
        targets = F.one_hot(self._labels, self._classes).to(torch.get_default_dtype())
        said = [probabilities for name, probabilities in self._said.items() if name != without]
        share = self._share * weight * len(said) / (len(said) + 1)
        if not share:
            return targets
        advice = torch.stack(said).mean(0)
        advised = targets[: len(advice)]
        # Only of classes that the advice knows as such: of others it would teach another name.
        knows = (advised.T @ advice).argmax(1) == torch.arange(self._classes, device=advice.device)
        advised.lerp_(advice, share * (advised @ knows.to(advice).unsqueeze(1)))
        return targets
