"""MaskedNetwork: one backbone, many tasks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from etcl_deploy.core.operations import along_channels
from etcl_deploy.core.plan import Plan, Step
from etcl_deploy.core.preprocessing import Preprocessing
from etcl_deploy.core.task import Images, parts
from etcl_deploy.errors import NetworkError, UnknownTaskError
from etcl_deploy.network import masks
from etcl_deploy.network.distributed import Batch
from etcl_deploy.network.layers import MaskedLayer
from etcl_deploy.network.mask_training import MaskTraining
from etcl_deploy.network.norms import MOMENTUM, TaskNorm, measuring
from etcl_deploy.network.state import Head, Masks, TaskState

EVALUATION_BATCH = 64  # items looked at together: few enough for what they give to stay near the processor


class MaskedNetwork(nn.Module):
    """A backbone described by a plan, shared by tasks that each see it through their own mask.

    `begin` starts a task, `finish` fixes it for ever, `select` goes back to a finished one. `forward` takes
    uint8 images `[batch, height, width, channels]` and gives the logits of the task that is selected.
    """

    def __init__(
        self,
        plan: Plan,
        preprocessing: Preprocessing,
        density: float,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        if not 0 < density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, not {density}")
        for step in plan.masked:
            if step.op != "bias" and not round(density * prod(step.weight_shape or ())):
                raise NetworkError(f"density {density} leaves layer {step.name!r} no weight; a higher one is needed")
        self.plan = plan
        self.preprocessing = preprocessing
        self.density = density
        self.finished: dict[str, TaskState] = {}
        self.masked_layers = {step.name: MaskedLayer(step, generator) for step in plan.masked}
        self.norm_layers = {step.name: TaskNorm(step) for step in plan.norms}
        self.masked = nn.ModuleDict(self.masked_layers)  # so that torch knows them
        self.norms = nn.ModuleDict(self.norm_layers)
        self.head = nn.ParameterDict()
        self.gates: Mapping[str, Tensor] = {}  # what the channels of a step's result are multiplied by, by step name
        self._learning: tuple[str, tuple[str, ...]] | None = None

    @property
    def work(self) -> dict[str, MaskTraining]:
        """The training state of the masked layers while a task is learned, by step name."""
        return {name: layer.work for name, layer in self.masked_layers.items() if layer.work}

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.masked.parameters()).device

    def begin(
        self,
        name: str,
        classes: tuple[str, ...],
        generator: torch.Generator,
        *,
        density: float | None = None,
        fresh_scores: bool = False,
        start: TaskState | None = None,
        with_head: bool = False,
    ) -> None:
        """Begin a task: masks follow the scores, normalization and head are new, claimed weights are frozen.

        `density` is the share of each layer's weights it uses, if not the network's own. With `start` it begins as that
        finished task: its mask, its normalization and, if its classes mean the same (`with_head`), its head.
        """
        if name in self.finished:
            raise ValueError(f"task {name!r} is already learned")
        self._abandon()
        for step, layer in self.masked_layers.items():
            if fresh_scores:
                layer.draw_scores(generator)
            if start:
                layer.select_mask(start.masks[step])
            layer.begin(self.density if density is None else density)
        for step, norm in self.norm_layers.items():
            norm.bind(start.norms[step] if start else None, trainable=True)
        head = self._fresh_head(len(classes), generator)
        if start and with_head:
            head = {key: value.clone() for key, value in start.head.items()}
        self._bind_head(head, trainable=True)
        self._learning = (name, classes)

    def shared_tensors(self) -> dict[str, Tensor]:
        """Weights and scores, which all tasks share, by name."""
        tensors = {f"{s}/weight": layer.weight.data for s, layer in self.masked_layers.items()}
        return tensors | {f"{s}/scores": layer.scores.data for s, layer in self.masked_layers.items()}

    def learning_tensors(self) -> dict[str, Tensor]:
        """The tensors that change while a task is learned, by name: weights, scores, normalization, head."""
        tensors = self.shared_tensors()
        for step, norm in self.norm_layers.items():
            tensors |= {f"{step}/{key}": getattr(norm, key).data for key in ("gamma", "beta", "mean", "var")}
        return tensors | {f"head/{key}": value.data for key, value in self.head.items()}

    @contextmanager
    def borrowing(self, state: TaskState) -> Iterator[None]:
        """Look through the mask of a finished task while another is learned."""
        try:
            for step, work in self.work.items():
                work.borrowed = state.masks[step]
            for norm in self.norm_layers.values():
                norm.momentum = 0.0  # the running statistics are those of the task's own mask
            yield
        finally:
            for work in self.work.values():
                work.borrowed = None
            for norm in self.norm_layers.values():
                norm.momentum = MOMENTUM

    def finish(
        self, batches: Iterable[Tensor], masks: Masks | None = None, claims: Masks | None = None, *, alone: bool = False
    ) -> TaskState:
        """Fix the task's mask, re-estimate its normalization over `batches`, claim its weights.

        Without `masks` they are those of the scores, without `claims` what they select. `alone`, the task keeps all
        weights as they are now for itself.
        """
        assert self._learning is not None, "begin a task first"
        name, classes = self._learning
        fixed = {step: layer.freeze(masks[step] if masks else None) for step, layer in self.masked_layers.items()}
        self.gates = {}
        self.estimate_norms(batches)
        state = TaskState(
            name,
            classes,
            fixed,
            {step: norm.state() for step, norm in self.norm_layers.items()},
            {key: value.detach().clone() for key, value in self.head.items()},
            {step: layer.weight.detach().clone() for step, layer in self.masked_layers.items()} if alone else None,
        )
        # Last, and quick: an interruption before this point leaves a task that was begun, nothing more.
        for step, mask in (fixed if claims is None else claims).items():
            self.masked_layers[step].claim(mask)
        self.finished[name] = state
        self._learning = None
        self.select(name)
        return state

    def select(self, name: str) -> None:
        """Bind mask, normalization and head of a finished task together, ready to predict."""
        state = self._finished(name)
        self._abandon()
        self._bind(state)
        self.eval()

    def _finished(self, name: str) -> TaskState:
        if name not in self.finished:
            raise UnknownTaskError(name, self.finished, "this run")
        return self.finished[name]

    def _bind(self, state: TaskState) -> None:
        """Mask, normalization and head together: never one without the others."""
        for step, layer in self.masked_layers.items():
            layer.mask = state.masks[step]
            layer.private_weight = state.weights[step] if state.weights else None
        for step, norm in self.norm_layers.items():
            norm.bind(state.norms[step])
        self._bind_head(state.head, trainable=False)
        self.gates = {}

    def restore(self, state: TaskState) -> None:
        """Take in a task that was finished in an earlier process."""
        self.finished[state.name] = state

    def change_head(self, name: str, head: Head) -> None:
        """Give a finished task another head; its mask and its normalization can never change."""
        self.finished[name] = replace(self.finished[name], head=head)

    def claimed(self) -> float:
        """The share of backbone weights some task owns."""
        return masks.density(layer.claimed for layer in self.masked_layers.values())

    @contextmanager
    def viewing(self, name: str | None = None) -> Iterator[None]:
        """Look at images as a finished task does (None: the task at hand), in evaluation mode; then go on as before.

        A task that is being learned is not left: its masks, normalization and head are back afterwards.
        """
        training, layers, norms = self.training, self.masked_layers.values(), self.norm_layers.values()
        masks = [(layer.mask, layer.private_weight) for layer in layers]
        bound = [(norm.gamma, norm.beta, norm.mean, norm.var) for norm in norms]
        head, gates = self.head, self.gates
        try:
            if name is not None:
                self._bind(self._finished(name))
            self.eval()
            yield
        finally:
            for layer, (mask, weight) in zip(layers, masks, strict=True):
                layer.mask, layer.private_weight = mask, weight
            for norm, (gamma, beta, mean, var) in zip(norms, bound, strict=True):
                norm.gamma, norm.beta, norm.mean, norm.var = gamma, beta, mean, var
            self.head, self.gates = head, gates
            self.train(training)

    def features(self, images: Tensor, batch: Batch | None = None) -> Tensor:
        """The input of the head, `[batch, features]`. A training step also passes the `batch` its images are of."""
        return self.plan.run(self.preprocessing.normalize(images), partial(self._apply_step, batch))

    @torch.no_grad()
    def embed(self, images: Images, name: str | None = None) -> Tensor:
        """Features of any number of images under a finished task, or with None under the task at hand."""
        with self.viewing(name):
            return torch.cat([self.features(part.to(self.device)) for part in parts(images, EVALUATION_BATCH)])

    def answer(self, features: Tensor) -> Tensor:
        """The head's logits for features, `[batch, classes]`."""
        return F.linear(features, self.head["weight"], self.head["bias"] if self.plan.head_bias else None)

    def forward(self, images: Tensor, batch: Batch | None = None) -> Tensor:
        """Logits of the task at hand, `[batch, classes]`."""
        return self.answer(self.features(images, batch))

    def _abandon(self) -> None:
        """Leave a task that was begun and not finished: nothing of it may touch the finished ones."""
        if self._learning is not None:
            for layer in self.masked_layers.values():
                if layer.work:
                    layer.end()
            self.gates = {}
            self._learning = None

    def _apply_step(self, batch: Batch | None, step: Step, x: Tensor) -> Tensor:
        if step.op == "dropout":
            return _drop(x, step.settings["percent"], batch) if self.training else x
        result: Tensor = self.norms[step.name](x, batch) if step.name in self.norms else self.masked[step.name](x)
        if step.name in self.gates:
            return result * along_channels(self.gates[step.name], result)
        return result

    def _fresh_head(self, classes: int, generator: torch.Generator) -> Head:
        bound = self.plan.features**-0.5
        return {
            key: torch.empty(shape).uniform_(-bound, bound, generator=generator).to(self.device)
            for key, shape in self.plan.head_shapes(classes).items()
        }

    def _bind_head(self, head: Head, *, trainable: bool) -> None:
        self.head = nn.ParameterDict({key: nn.Parameter(value, requires_grad=trainable) for key, value in head.items()})

    @torch.no_grad()
    def estimate_norms(self, batches: Iterable[Tensor]) -> None:
        """Set every batch norm's mean and variance to those over all items, under the final mask, nothing dropped."""
        norms = [norm for norm in self.norm_layers.values() if norm.step.op == "norm"]
        training = self.training
        self.eval()
        self.norms.train()
        with measuring(norms):
            for images in batches if norms else ():
                self.features(images.to(self.device))
        self.train(training)


def _drop(x: Tensor, percent: int, batch: Batch | None) -> Tensor:
    """`x` with about `percent` of its elements set to zero, and the rest scaled up in return."""
    if batch is None:
        drawn = torch.rand(x.shape, device=x.device)
    else:
        drawn = torch.rand((batch.count, *x.shape[1:]), generator=batch.generator, device=x.device)[batch.span]
    return torch.where(drawn >= percent / 100, x / (1 - percent / 100), 0)
