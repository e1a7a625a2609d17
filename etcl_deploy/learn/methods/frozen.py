"""Masks over weights that never change: only what is selected is learned.

`supsup`: Supermasks in Superposition (Wortsman et al., NeurIPS 2020), over a random network. `piggyback`: Mallya et
al., ECCV 2018, over a network trained on the first task or read from a file; its masks keep the share `density` of the
largest scores here, where the paper keeps those above a threshold.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from etcl_deploy.config import Learning
from etcl_deploy.errors import ConfigError
from etcl_deploy.learn.lesson import Lesson
from etcl_deploy.learn.methods.method import Assignment, Method
from etcl_deploy.learn.network import MaskedNetwork


class Supsup(Method):
    """A mask a task over weights drawn once."""

    dense = False
    forgets = False
    learns_weights = False
    learns_scores = True

    def begin(self, given: Assignment) -> Lesson:
        """Every task starts with scores of its own."""
        self.network.begin(given.task.name, given.task.classes, given.generator, fresh_scores=True)
        return self.lesson(given.task)


class Piggyback(Supsup):
    """A mask a task over weights that the first task, or somebody else, has learned."""

    def __init__(self, network: MaskedNetwork, options: Learning) -> None:
        super().__init__(network, options)
        if options.others.weights and not network.finished:
            _read_weights(network, Path(options.others.weights))

    def begin(self, given: Assignment) -> Lesson:
        """The first task learns the weights, all of them, unless they come from a file; the others a mask."""
        founding = not given.past and not self.options.others.weights
        self.learns_weights, self.learns_scores = founding, not founding
        for layer in self.network.masked_layers.values():
            layer.density = 1.0 if founding else self.network.density
        return super().begin(given)


def _read_weights(network: MaskedNetwork, path: Path) -> None:
    """Take the backbone from a file of tensors `STEP/weight`, such as a run directory's backbone file."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"weights: cannot read {path}: {error}") from None
    for step, layer in network.masked_layers.items():
        found = tensors.get(f"{step}/weight")
        if found is None or found.shape != layer.weight.shape:
            shape = "no tensor" if found is None else f"shape {list(found.shape)}"
            raise ConfigError(f"weights: {path} has {shape} for {step}/weight; {list(layer.weight.shape)} is right")
        with torch.no_grad():
            layer.weight.copy_(found)
