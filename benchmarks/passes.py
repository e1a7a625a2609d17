"""Before and after: what the whole path took at an earlier revision, and what it takes now.

    python benchmarks/passes.py --before 4ed1c00

Both trees are measured by this script, in turns, each time in processes of their own: a step of training, comparing a
new task with ten earlier ones, writing a bundle of forty tasks, making a cold task ready, one prediction from a PNG
file, the start of commands, the first answer of a server. Networks are those of the targets; data and masks are made up
(masks of neighbouring tasks differ a little, as they do when scores are carried on). Everything has one thread, so that
other work on the machine delays both sides alike. Given are medians over rounds, and
of each round the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import step_cost
import torch
from record import read_options, write_result
from served import images, made_bundle, write_made

from etcl_deploy.bundle.bundle import load_bundle
from etcl_deploy.client.client import Client
from etcl_deploy.config import Config
from etcl_deploy.core.pixels import png
from etcl_deploy.core.task import Items
from etcl_deploy.learn.signature import Comparer, TaskSignature, describe_inputs, seen_by_head
from etcl_deploy.network.masks import keep_top
from etcl_deploy.runs.build import build_network
from etcl_deploy.runtime.onnx_engine import OnnxEngine
from etcl_deploy.runtime.predictor import Predictor
from etcl_deploy.serve.properties import any_free_port

ROOT = Path(__file__).parent.parent
EARLIER = 10  # tasks a new one is compared with
BUNDLED = 40
STEPS = {"fcn3": 60, "resnet18": 4}
# What the profiler showed of each stage, and what was done about it.
FOUND = {
    "a step of fcn3, h = 1000, batch 10": (
        "memory: every pass over a million weights counts. The mask is no longer written down, selecting is one pass "
        "of torch's own, and what lies near the threshold is found eight values at a time"
    ),
    "a step of resnet18, batch 64": "within a few percent of a dense step (L7): nothing to gain around it",
    "comparing with 10 tasks": (
        "passes through 10 sub-networks; 64 items at a time in the place of 256 stay near the processor"
    ),
    "writing a bundle of 40 tasks": "running sums over bits; ones are counted group by group now",
    "a cold task": "converting bits to numbers; eight numbers are looked up for every byte of a mask now",
    "a prediction from a PNG file": "onnxruntime takes nearly all of it",
    "etcl --help": "imports of typer and rich",
    "etcl predict": "two thirds are torch's import",
    "etcl serve, to the first answer": "Java, then torch's import in the workers",
    "etcl serve --stop": "half was waiting for dead processes to be taken off the system's list",
}


def several(call: Callable[[], object], times: int) -> float:
    """Seconds of one call, the median of so many after the first."""
    call()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return median(found)


def step_of(case: str) -> float:
    ours, _ = step_cost.sides(case, 1 + STEPS[case])
    return several(ours, STEPS[case])


def comparing() -> float:
    config, generator = Config().with_values(step_cost.CASES["resnet18"]), torch.Generator().manual_seed(0)
    network = build_network(config)
    comparer, classes = Comparer(network, config.learning.similarity), tuple("0123456789")
    items = torch.stack(images(600))
    labels = torch.randint(0, len(classes), (300,), generator=generator)
    signatures = {}
    for number in range(EARLIER):
        name = f"task-{number}"
        network.begin(name, classes, generator, fresh_scores=True)
        network.finish([items[:300]])
        seen = seen_by_head(network, Items(items[:300], labels), name)
        signatures = comparer.original(items[:300]), comparer.learned(items[:300], name)
        signatures[name] = TaskSignature(*signatures, describe_inputs(seen, len(classes), 0.99))
    return several(lambda: comparer.compare(items[300:], signatures), 1)


def bundling() -> float:
    bundle, chance = made_bundle(BUNDLED), torch.Generator().manual_seed(0)
    scores, masks = torch.rand(bundle.layout.weight_count, generator=chance), []
    for _ in range(BUNDLED):
        scores = (scores + 0.05 * torch.randn(len(scores), generator=chance)).abs()
        masks.append(torch.cat([keep_top(layer, 0.4) for layer in scores.split(bundle.layout.layers)]))
    alike = replace(bundle, masks=masks)
    return several(lambda: alike.to_bytes("coded"), 2)


def cold_task() -> float:
    with TemporaryDirectory() as directory:
        bundle = load_bundle(write_made(Path(directory) / "made.etcl", 100))
        engine, names = OnnxEngine(bundle), iter(bundle.tasks)
        return several(lambda: engine.release(engine.materialize(next(names))), 99)


def prediction() -> float:
    with TemporaryDirectory() as directory:
        bundle, file = load_bundle(write_made(Path(directory) / "made.etcl", 2)), png(images(1)[0])
        predictor = Predictor(bundle, engine=OnnxEngine(bundle))
        return several(lambda: predictor.predict([file], ["task-0"]), 100)


def etcl(*words: object) -> float:
    """Seconds a command takes."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "etcl_deploy", *map(str, words)]
    subprocess.run(command, check=True, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def serving(bundle: Path, image: Path) -> tuple[float, float]:
    """Seconds from `etcl serve` to the first answer, and of `etcl serve --stop`."""
    place = ["--name", "made", "--model-store", bundle.parent / "store"]
    port = any_free_port()
    began = time.perf_counter()
    etcl("serve", bundle, *place, "--port", port)
    try:
        token_file = bundle.parent / "store" / "servers" / "made" / "key_file.json"
        with Client(f"http://127.0.0.1:{port}/predictions/made", token_file=token_file) as client:
            client.predict(image, "task-0")
        answered = time.perf_counter() - began
    finally:
        stopped = etcl("serve", "--stop", *place)
    return answered, stopped


def one_side() -> dict[str, float]:
    """Seconds of all stages, in the order of `FOUND`, with the package this process imports."""
    with TemporaryDirectory() as directory:
        bundle, image = write_made(Path(directory) / "made.etcl", 10), Path(directory) / "image.png"
        image.write_bytes(png(images(1)[0]))
        inside = [step_of("fcn3"), step_of("resnet18"), comparing(), bundling(), cold_task(), prediction()]
        commands = [etcl("--help"), etcl("predict", bundle, "--task", "task-0", image), *serving(bundle, image)]
    return dict(zip(FOUND, [*inside, *commands], strict=True))


def side_of(tree: Path) -> dict[str, float]:
    """The same in a process that takes the package, and what benchmarks share, from a tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tree / "benchmarks" / Path(__file__).name), "--side"]
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main(say: Callable[[str], None]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="HEAD~1", help="the revision to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", action="store_true", help="measure one tree, that of PYTHONPATH, and print it")
    arguments = read_options(parser, rounds=2)
    if arguments.side:
        say(json.dumps(one_side()))
        return
    with TemporaryDirectory() as directory:
        before = Path(directory) / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(before), arguments.before], check=True)
        shutil.copy(__file__, before / "benchmarks")
        try:
            rounds = [(side_of(before), side_of(ROOT)) for _ in range(arguments.rounds)]
        finally:
            subprocess.run([*git, "remove", "--force", str(before)], check=True)
    result = {}
    for stage, found in FOUND.items():
        old, new = ([side[stage] for side in sides] for sides in zip(*rounds, strict=True))
        ratios = [after / earlier for earlier, after in zip(old, new, strict=True)]
        result[stage] = {"before": median(old), "after": median(new), "ratio": median(ratios), "ratios": ratios}
        result[stage] |= {"unit": "seconds", "found": found}
        spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        say(f"{stage}: {median(old):.4g} s -> {median(new):.4g} s, {spread}")
    write_result("passes", [], result, {"before": arguments.before, "rounds": arguments.rounds})


if __name__ == "__main__":
    main(partial(print, flush=True))
