"""The cost of learning: one step beside a plain dense step (L7), a task with similar ones before it beside none (L12).

    python benchmarks/step_cost.py
    python benchmarks/step_cost.py --parts task --epochs 10

`step`: the dense side runs the same operations with plain parameters, the same data and the faster of Adam's ways
(fused). Ours is measured with a third of the weights claimed by an earlier task, as any task but the first has it.
`task`: comparing, probing, embedding the items under every similar task and improving every head are all counted, over
the recipe's number of epochs. With fewer the ratio is larger, since most of this is done once a task.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from record import Figure, new_parser, say, write_result
from torch import Tensor, nn
from torch.nn import functional as F

from etcl_deploy.config import Config, Learning
from etcl_deploy.core.operations import apply_weight
from etcl_deploy.core.plan import Step
from etcl_deploy.core.task import Task
from etcl_deploy.learn.events import Event, TaskDone, TaskStarted
from etcl_deploy.learn.methods import TaskContext
from etcl_deploy.learn.methods.etcl import Etcl
from etcl_deploy.learn.run import Run
from etcl_deploy.learn.trainer import learn_sequence, training_step
from etcl_deploy.network.distributed import Batch
from etcl_deploy.network.masked_network import MaskedNetwork
from etcl_deploy.runs.build import build_network
from etcl_deploy.runs.task_loading import find_tasks
from etcl_deploy.settings import load_recipe

CASES = {
    "resnet18": {"backbone": "resnet18", "size": 32, "channels": 3, "density": 0.4, "batch_size": 64},
    "fcn3": {"backbone": "fcn3", "width": 1000, "size": 28, "channels": 1, "density": 0.5, "batch_size": 10},
}
STEPS = {"resnet18": 5, "fcn3": 40}  # of each side in a row
LIMITS = {
    "resnet18": ("resnet18, batch 64", "<= 1.2", "<= 1.05"),
    "fcn3": ("fcn3, h = 1000, batch 10", "<= 2", "<= 1.3"),
}
BEFORE = 3  # steps before any is measured


class Dense(nn.Module):
    """The network without masks: plain weights, plain batch normalization, one head."""

    def __init__(self, network: MaskedNetwork, classes: int) -> None:
        super().__init__()
        self.network = [network]  # in a list: not a part of this module
        weights = {name: layer.weight.detach().clone() for name, layer in network.masked_layers.items()}
        self.weights = nn.ParameterDict({name: nn.Parameter(weight) for name, weight in weights.items()})
        self.norms = nn.ModuleDict({s.name: nn.BatchNorm2d(s.settings["features"]) for s in network.plan.norms})
        self.head = nn.Linear(network.plan.features, classes, bias=network.plan.head_bias)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        network = self.network[0]
        return self.head(network.plan.run(network.preprocessing.normalize(images), self._apply))

    def _apply(self, step: Step, x: Tensor) -> Tensor:
        if step.name in self.norms:
            return self.norms[step.name](x)
        return apply_weight(step.op, step.settings, x, self.weights[step.name])


def sides(case: str, count: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """One step of ours, one of the dense network; each can be taken `count` times."""
    config = Config().with_values(CASES[case])
    network, learning = build_network(config), config.learning
    classes, generator = tuple(str(n) for n in range(10)), torch.Generator().manual_seed(0)
    for layer in network.masked_layers.values():
        layer.claimed = torch.rand(layer.claimed.shape, generator=generator) < 1 / 3
    network.begin("task", classes, generator)
    nothing = torch.empty(0)
    task = Task("task", classes, nothing, nothing, nothing, nothing)
    method, items = Etcl(network, Learning(learning_rate=0.001)), task.training
    progress = method.prepare(TaskContext(task, items, items, {}, generator, lambda event: None))
    dense = Dense(network, len(classes))
    optimizer = torch.optim.Adam(dense.parameters(), lr=0.001, fused=True)
    network.train()
    dense.train()

    # New items at every step: on the same ones the loss falls to nothing and numbers too small for the processor.
    shape = (learning.batch_size, *network.preprocessing.shape)
    drawn = [
        (
            torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8),
            torch.randint(0, len(classes), shape[:1], generator=generator),
        )
        for _ in range(count)
    ]
    batches, others = iter(drawn), iter(drawn)

    def ours() -> None:
        images, labels = next(batches)
        training_step(method, progress, Batch(images, labels, len(labels), progress.dropout), 0.5)

    def other() -> None:
        images, labels = next(others)
        optimizer.zero_grad()
        F.cross_entropy(dense(images), labels).backward()
        optimizer.step()

    return ours, other


def step(case: str, repeats: int) -> dict[str, Any]:
    """Both sides in turn, so many steps each."""
    count = STEPS[case]
    ours, other = sides(case, BEFORE + count * repeats)
    for _ in range(BEFORE):
        ours(), other()
    times = []
    for _ in range(repeats):
        pair = []
        for side in (ours, other):
            began = time.perf_counter()
            for _ in range(count):
                side()
            pair.append((time.perf_counter() - began) / count)
        times.append((pair[0], pair[1]))
    return {**beside(times), "unit": "seconds a step", "settings": CASES[case]}


def seconds_of_last(before: Run, tasks: Sequence[Task], options: Learning) -> float:
    """How long the last of the tasks takes after the others."""
    run = deepcopy(before)
    clock: list[float] = []

    def note(event: Event) -> None:
        if isinstance(event, TaskStarted | TaskDone):
            clock.append(time.perf_counter())

    learn_sequence(run.network, tasks[-1:], options, note, before=run, earlier=tasks[:-1])
    return clock[1] - clock[0]


def task(similar: int, changed: Mapping[str, Any], repeats: int) -> dict[str, Any]:
    """One task of F-EMNIST-1 after others that are all similar, and after the same ones with transfer switched off."""
    config = load_recipe("femnist1").with_values(changed)
    tasks = find_tasks(config, None).tasks[: similar + 1]
    # The tasks before it take the same time however well they were learned.
    before = learn_sequence(build_network(config), tasks[:-1], replace(config.learning, epochs=1))
    with_similar, alone = (config.with_values({"similar": value}).learning for value in ("all", "none"))
    times = []
    for _ in range(repeats):
        times.append((seconds_of_last(before, tasks, with_similar), seconds_of_last(before, tasks, alone)))
        say(f"with {similar} similar tasks {times[-1][0]:.1f} s, with none {times[-1][1]:.1f} s")
    return {**beside(times), "unit": "seconds a task"}


def beside(times: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """The median of each side, and of the ratios with their range."""
    ratios = [ours / other for ours, other in times]
    sides = {"ours": median(ours for ours, _ in times), "other": median(other for _, other in times)}
    return {"ratio": median(ratios), "ratios": [min(ratios), max(ratios)], **sides, "repeats": len(times)}


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """The recorded results, held against their targets."""
    if "task" in results:
        row = results["task"]
        what = "learning a task with similar tasks before it / with none, time: what probe, advice and heads cost"
        yield Figure("L12", what, row["ratio"], "<= 1.25", "<= 1.1", row["ratios"], _sides(row))
    for case, (label, now, aim) in LIMITS.items():
        row = results["step"][case]
        what = f"our step / a plain dense training step, time: {label}"
        yield Figure("L7", what, row["ratio"], now, aim, row["ratios"], _sides(row))


def _sides(row: Mapping[str, Any]) -> str:
    return f"{row['ours']:.3g} and {row['other']:.3g} {row['unit']}, median of {row['repeats']}"


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--parts", nargs="+", default=("step", "task"), choices=("step", "task"))
    parser.add_argument("--repeats", type=int, help="else 15 of steps, 5 of a task")
    parser.add_argument("--similar", type=int, default=5, help="tasks before it, all similar")
    parser.add_argument("--epochs", type=int, default=load_recipe("femnist1").learning.epochs)
    parser.add_argument("--width", type=int, help="of another network than the recipe's")
    arguments = parser.parse_args()
    if "step" in arguments.parts:
        steps = {case: step(case, arguments.repeats or 15) for case in CASES}
        for case, row in steps.items():
            say(f"{case}: {row['ratio']:.2f} ({row['ratios'][0]:.2f} to {row['ratios'][1]:.2f})")
        if arguments.record:
            write_result("step_cost", "step", steps, {})
    if "task" in arguments.parts:
        changed = {"epochs": arguments.epochs, "width": arguments.width}
        row = task(arguments.similar, changed, arguments.repeats or 5)
        say(f"ratio {row['ratio']:.3f}")
        if arguments.record:
            write_result("step_cost", "task", row, {"similar": arguments.similar, **changed})


if __name__ == "__main__":
    main()
