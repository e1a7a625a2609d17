"""L3: PMNIST, ten permutations of MNIST, with the recipe's settings; and that no claimed bit ever changes.

python benchmarks/pmnist.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from record import in_words, measure_once, measured, read_options, spread, write_result
from torch import Tensor

from etcl_deploy.config import Config
from etcl_deploy.learn.events import Event, TaskDone
from etcl_deploy.network.layers import MaskedLayer
from etcl_deploy.runs.session import train
from etcl_deploy.settings import load_recipe

QUICK = {"tasks": 3, "epochs": 3}


def learn(config: Config, say: Callable[[str], None]) -> dict[str, object]:
    """One run, with the claimed weights of every task compared after every later one."""
    seed = config.learning.seed
    claimed: list[dict[str, tuple[Tensor, bytes]]] = []
    changed = 0

    def compare(event: Event) -> None:
        nonlocal changed
        if not isinstance(event, TaskDone):
            return
        layers = event.run.network.masked_layers
        for checkpoint in claimed:
            changed += sum(owned(layers[name], mask) != data for name, (mask, data) in checkpoint.items())
        claimed.append({n: (layer.claimed.clone(), owned(layer, layer.claimed)) for n, layer in layers.items()})
        say(f"seed {seed}: {event.task} {event.run.matrix[-1][-1]:.2f} %, {event.run.network.claimed():.0%} claimed")

    with TemporaryDirectory() as directory:
        run = train(config, None, Path(directory) / "run", "cpu", compare)
    return {**run.summary(config), "layers_changed_after_being_claimed": changed}


def config_of(changed: dict[str, int], seed: str) -> Config:
    """The recipe's settings, some of them changed."""
    return load_recipe("pmnist").with_values({**changed, "seed": int(seed)})


def owned(layer: MaskedLayer, mask: Tensor) -> bytes:
    """The weights under a mask, bit by bit."""
    return layer.weight.detach()[mask].numpy().tobytes()


def main(say: Callable[[str], None]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = read_options(parser, seeds=[0])
    settings = partial(config_of, QUICK if arguments.quick else {})
    for seed in map(str, arguments.seeds):
        measure_once(partial(learn, settings(seed), say), "pmnist", seed, settings(seed).as_json())
    runs = measured("pmnist", lambda seed: settings(seed).as_json()).values()
    result = {
        "acc": spread([run["acc"] for run in runs]),
        "bwt": [run["bwt"] for run in runs],
        "layers_changed_after_being_claimed": [run["layers_changed_after_being_claimed"] for run in runs],
        "paper": {"acc": 97.11, "one": 96.70, "differs": "6,000 training items a task, ours 57,000"},
    }
    say(f"ACC {in_words(result['acc'])} (paper 97.11)")
    recipe = load_recipe("pmnist").with_values(QUICK if arguments.quick else {})
    write_result("pmnist", ["L3"], result, recipe.as_json())


if __name__ == "__main__":
    main(partial(print, flush=True))
