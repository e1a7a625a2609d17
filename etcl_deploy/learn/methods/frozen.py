"""Masks over weights that never change: only what is selected is learned.

`supsup`: Supermasks in Superposition (Wortsman et al., NeurIPS 2020), over a random network. `piggyback`: Mallya et
al., ECCV 2018, over a network trained on the first task or read from a file; its masks keep the share `density` of the
largest scores here, where the paper keeps those above a threshold.
"""

from __future__ import annotations

import torch

from etcl_deploy.learn.methods.method import Method, TaskContext
from etcl_deploy.learn.task_training import TaskTraining


class _Frozen(Method):
    """A mask a task, of scores of its own, over weights that stay as they are."""

    dense = False
    forgets = False
    learns_weights = False
    learns_scores = True

    def begin(self, context: TaskContext) -> TaskTraining:
        """Every task starts with scores of its own."""
        self.network.begin(
            context.task.name, context.task.classes, context.generator, density=self.density, fresh_scores=True
        )
        return self.prepare(context)


class Supsup(_Frozen):
    """Over random weights: in a layer they differ only by their sign, as in the paper."""

    @torch.no_grad()
    def begin(self, context: TaskContext) -> TaskTraining:
        """The first task finds weights of one magnitude, that keeps the scale of what passes through its mask."""
        for layer in self.network.masked_layers.values() if not context.past else ():
            if layer.step.op != "bias":
                layer.weight.copy_(layer.weight.sign() * (2 / self.density / layer.weight[0].numel()) ** 0.5)
        return super().begin(context)


class Piggyback(_Frozen):
    """A mask a task over weights that the first task, or somebody else, has learned."""

    def begin(self, context: TaskContext) -> TaskTraining:
        """The first task learns the weights, all of them, unless they come from a file; the others a mask."""
        founding = not context.past and not self.options.weights
        self.dense = self.learns_weights = founding
        self.learns_scores = not founding
        return super().begin(context)
