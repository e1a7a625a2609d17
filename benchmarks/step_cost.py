"""L7: one step of ours / one step of a plain dense network of the same shape.

    python benchmarks/step_cost.py

The dense side runs the same operations with plain parameters, the same data and the faster of Adam's ways (fused).
Ours is measured with a third of the weights claimed by an earlier task, as any task but the first has it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from record import read_options, write_result
from torch import Tensor, nn
from torch.nn import functional as F

from etcl_deploy.config import Config, Learning
from etcl_deploy.core.operations import apply_weight
from etcl_deploy.core.plan import Step
from etcl_deploy.core.task import Task
from etcl_deploy.learn.methods.etcl import Etcl
from etcl_deploy.network.masked_network import MaskedNetwork
from etcl_deploy.runs.build import build_network

CASES = {
    "resnet18": {"backbone": "resnet18", "size": 32, "channels": 3, "density": 0.4, "batch_size": 64},
    "fcn3": {"backbone": "fcn3", "width": 1000, "size": 28, "channels": 1, "density": 0.5, "batch_size": 10},
}
STEPS = {"resnet18": 5, "fcn3": 40}  # of each side in a row
QUICK = {"resnet18": 2, "fcn3": 20}
AIMS = {"resnet18": (1.2, 1.05), "fcn3": (2.0, 1.3)}


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
    progress, dense = Etcl(network, Learning(learning_rate=0.001)).prepare(task), Dense(network, len(classes))
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
        progress.descend(F.cross_entropy(network(images), labels))

    def other() -> None:
        images, labels = next(others)
        optimizer.zero_grad()
        F.cross_entropy(dense(images), labels).backward()
        optimizer.step()

    return ours, other


def measure(case: str, repeats: int, steps: int) -> dict[str, object]:
    """Both sides in turn, `repeats` times; the median of each, and of the ratios."""
    before = 3
    ours, other = sides(case, before + steps * repeats)
    for _ in range(before):
        ours(), other()
    found: list[tuple[float, float]] = []
    for _ in range(repeats):
        times = []
        for side in (ours, other):
            started = time.perf_counter()
            for _ in range(steps):
                side()
            times.append((time.perf_counter() - started) / steps)
        found.append((times[0], times[1]))
    ratios = sorted(a / b for a, b in found)
    now, aim = AIMS[case]
    return {
        "ratio": median(ratios),
        "ratios": [ratios[0], ratios[-1]],
        "ours": median(a for a, _ in found),
        "other": median(b for _, b in found),
        "unit": "seconds a step",
        "repeats": repeats,
        "settings": CASES[case],
        "now": now,
        "aim": aim,
    }


def main(say: Callable[[str], None]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = read_options(parser, repeats=5)
    steps = QUICK if arguments.quick else STEPS
    results = {case: measure(case, arguments.repeats, steps[case]) for case in CASES}
    for case, row in results.items():
        low, high = row["ratios"]
        say(f"{case}: {row['ratio']:.2f} ({low:.2f} to {high:.2f}); at most {row['now']}, aim {row['aim']}")
    write_result("step_cost", ["L7"], results, {})


if __name__ == "__main__":
    main(partial(print, flush=True))
