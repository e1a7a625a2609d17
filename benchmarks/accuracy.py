"""Accuracy and transfer on F-EMNIST-1 (L1, L2, L10) and PMNIST (L3), and methods side by side.

    python benchmarks/accuracy.py --work DIR
    python benchmarks/accuracy.py --work DIR --parts methods --sequences pmnist --methods etcl wsn

`femnist1` and `mixed` have the recipes' settings, three seeds, beside what each part of the method is worth at the same
rates. ONE is a separate dense network for each task, learned with the same items, epochs, batches and augmentation;
`wsn` is masks alone, without any transfer; "without similarity" is the paper's ablation: Euclidean distance in its
place. `joint` is one dense network that learns all tasks of F-EMNIST-1 at once, which continual learning cannot: the
bound. `ensemble` lets all sub-networks of the runs of `femnist1` answer together. `preset` is the paper's choices to
the letter, on F-EMNIST-1 and on PMNIST with 6,000 and 57,000 items a task. `pmnist` compares the claimed weights of
every task bit by bit after every later one. `methods` is `etcl compare` on three sequences, with a third of the epochs
of F-EMNIST-1 and two thirds of those of the mixed one: the tables of docs/results.md. A run that DIR
holds is not learned again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from record import Figure, ends, in_words, learned, new_parser, say, spread, write_result
from torch import Tensor

from etcl_deploy.config import Config
from etcl_deploy.core.task import Task, percent_right
from etcl_deploy.learn.events import Event, TaskDone
from etcl_deploy.learn.methods import METHODS
from etcl_deploy.learn.trainer import accuracy, learn_sequence, predict
from etcl_deploy.network.layers import MaskedLayer
from etcl_deploy.runs.build import build_network
from etcl_deploy.runs.compare import compare
from etcl_deploy.runs.session import Session
from etcl_deploy.runs.task_loading import find_tasks
from etcl_deploy.settings import load_recipe

VARIANTS: dict[str, dict[str, Any]] = {  # what differs from the recipe
    "full": {},
    "one": {"method": "one"},
    "wsn": {"similar": "none"},
    "without-similarity": {"distance": "euclidean", "agreement": 0.0},
    "without-alignment": {"alignment": "off", "advice": 0.0},
    "without-bi-objective": {"backward": "off"},
}
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "femnist1": ("femnist1", {}),
    "femnist1, all taken for similar": ("femnist1", {"similar": "all"}),
    "pmnist, 6,000 items": ("pmnist", {}),
    "pmnist, 57,000 items": ("pmnist", {"sequence": {"permute": "mnist", "tasks": 10}}),
}
SEQUENCES: dict[str, dict[str, Any]] = {"femnist1": {"epochs": 10}, "pmnist": {"tasks": 5}, "mixed": {"epochs": 10}}
OWN = {("femnist1", "etcl"): {"learning_rate": 0.001}}  # better on validation items with so few epochs: choices.py
# ACC, FWT and BWT as the paper states them; of PMNIST with ten tasks, without FWT. Its mixed sequences are others.
PAPER: dict[str, dict[str, tuple[float, float | None, float | None]]] = {
    "femnist1": {
        "etcl": (80.32, 0.0948, 0.0141),
        "wsn": (78.10, 0.0825, 0.0),
        "supsup": (66.92, -0.0293, 0.0),
        "gpm": (75.18, 0.0372, 0.0218),
        "one": (69.85, None, None),
    },
    "pmnist": {
        "etcl": (97.11, None, 0.0),
        "wsn": (96.41, None, 0.0),
        "supsup": (96.03, None, 0.0),
        "piggyback": (95.73, None, 0.0),
        "hat": (90.35, None, 0.0),
        "gpm": (93.91, None, -0.03),
        "ewc": (89.97, None, -0.04),
        "one": (96.70, None, None),
    },
    "mixed": {},
}


def ablation(recipe: str, variant: str, seed: int, work: Path) -> dict[str, Any]:
    """What one variant of a recipe reaches with one seed."""
    changed = VARIANTS[variant]
    config = load_recipe(recipe, changed.get("method")).with_values({**changed, "seed": seed})
    run = learned(work / f"{variant}-{seed}", config).summary()
    say(f"{recipe} {variant} seed {seed}: ACC {run.acc:.2f}  BWT {run.bwt:+.4f}")
    return {
        "acc": run.acc,
        "bwt": run.bwt,
        "learned": [line[-1] for line in run.matrix],
        "at_end": run.matrix[-1],
        "similar_pairs": sum(map(len, run.similar.values())),
        "claimed": run.claimed,
    }


def by_seed(results: Mapping[str, Any], recipe: str, variant: str) -> dict[int, Any]:
    """What is recorded of one variant of a recipe; every seed is a part of its own."""
    name = f"{recipe} {variant} "
    return {int(part.removeprefix(name)): row for part, row in results.items() if part.startswith(name)}


def gains(rows: Mapping[int, Any], others: Mapping[int, Any]) -> dict[str, float | None]:
    """By how many points of ACC one variant is above another, over the seeds both have."""
    return spread([row["acc"] - others[seed]["acc"] for seed, row in rows.items() if seed in others])


def transferred(rows: Mapping[int, Any], alone: Mapping[int, Any]) -> dict[str, float | None]:
    """FWT: how much better tasks are when they are learned than alone, the first left out; a fraction."""
    values = []
    for seed in sorted(rows.keys() & alone.keys()):
        pairs = zip(rows[seed]["learned"], alone[seed]["learned"], strict=True)
        values.append(fmean((ours - theirs) / 100 for ours, theirs in list(pairs)[1:]))
    return spread(values)


def joint(seeds: list[int]) -> dict[str, Any]:
    """The mean accuracy, on the test items of every task, of one network that learned all of them together."""
    accuracies = []
    for seed in seeds:
        config = load_recipe("femnist1", "one").with_values({"method": "one", "density": 1.0, "seed": seed})
        tasks = find_tasks(config, None).tasks
        items = (
            torch.cat([getattr(task, part) for task in tasks]) for part in ("train_x", "train_y", "test_x", "test_y")
        )
        run = learn_sequence(build_network(config), [Task("all", tasks[0].classes, *items)], config.learning)
        accuracies.append(fmean(accuracy(run.network, task.test, "all") for task in tasks))
        say(f"seed {seed}: joint {accuracies[-1]:.2f}")
    return {"seeds": seeds, "acc": spread(accuracies)}


def ensemble(work: Path, seeds: list[int]) -> dict[str, Any]:
    """ACC of F-EMNIST-1 if every answer were the mean of what all ten sub-networks say, in ten times the time."""
    config = load_recipe("femnist1")
    tasks = find_tasks(config, None).tasks
    accuracies = []
    for seed in seeds:
        network = learned(work / f"full-{seed}", config.with_values({"seed": seed})).run.network
        rows = []
        for task in tasks:
            said = sum(predict(network, other.name, task.test_x).softmax(1) for other in tasks)
            rows.append(percent_right([(torch.as_tensor(said), task.test_y)]))
        accuracies.append(fmean(rows))
    say(f"ensemble of ten: ACC {in_words(spread(accuracies))}")
    return {"seeds": seeds, "acc": spread(accuracies)}


def preset(name: str, work: Path, seeds: list[int]) -> dict[str, Any]:
    """The paper's choices to the letter, to be held beside the figures of the paper."""
    recipe, changed = PRESETS[name]
    config = load_recipe(recipe, preset="paper").with_values(changed)
    runs = [learned(work / f"{name}-{seed}", config.with_values({"seed": seed})).summary() for seed in seeds]
    row = {"acc": spread([run.acc or 0.0 for run in runs]), "bwt": spread([run.bwt or 0.0 for run in runs])}
    say(f"{name:30s} ACC {in_words(row['acc'])}  BWT {in_words(row['bwt'])}")
    return {"seeds": seeds, **row, "similar_pairs": [sum(map(len, run.similar.values())) for run in runs]}


def pmnist(seeds: list[int]) -> dict[str, Any]:
    """ACC and BWT, and of how many layers a claimed bit changed."""
    runs, changed = [], []
    for seed in seeds:
        claimed: list[dict[str, tuple[Tensor, bytes]]] = []
        changed.append(0)

        def look(event: Event, claimed: list[dict[str, tuple[Tensor, bytes]]] = claimed) -> None:
            if isinstance(event, TaskDone):
                layers = event.run.network.masked_layers
                for before in claimed:
                    changed[-1] += sum(_owned(layers[name], mask) != data for name, (mask, data) in before.items())
                masks = {name: layer.claimed.clone() for name, layer in layers.items()}
                claimed.append({name: (mask, _owned(layers[name], mask)) for name, mask in masks.items()})

        with TemporaryDirectory() as directory:
            run = learned(Path(directory) / "run", load_recipe("pmnist").with_values({"seed": seed}), look)
            runs.append(run.summary().as_json())
        say(f"seed {seed}: ACC {runs[-1]['acc']:.2f}, {changed[-1]} layers changed")
    result = {"acc": spread([run["acc"] for run in runs]), "bwt": [run["bwt"] for run in runs]}
    return {**result, "layers_changed_after_being_claimed": changed}


def _owned(layer: MaskedLayer, mask: Tensor) -> bytes:
    """The weights under a mask, bit by bit."""
    return layer.weight.detach()[mask].numpy().tobytes()


def config_of(sequence: str, method: str) -> Config:
    """The settings of a method on a sequence, with the first seed."""
    changed = {**SEQUENCES[sequence], **OWN.get((sequence, method), {}), "seed": 0}
    return load_recipe(sequence, method).with_values(changed)


def methods(sequence: str, names: list[str], work: Path, seeds: int) -> dict[str, Any]:
    """The row of every method that `work` has runs of, those learned now included."""
    wanted = {name: config_of(sequence, name) for name in names}
    made = compare(wanted, work, seeds=seeds, session=Session("cpu", note=lambda text: say(f"{sequence}: {text}")))
    for failure in made.failed:
        say(failure)
    rows = {row["method"]: row for row in made.as_json()["methods"]}
    for method, row in rows.items():
        own = [run for run in made.runs if run["method"] == method]
        pairs = Counter(f"{b} {a}" for run in own for a, others in run["similar"].items() for b in others)
        row["similar_pairs"] = dict(pairs)  # and with how many seeds
        row["claimed"], row["tasks"] = fmean(run["claimed"] or 0 for run in own), own[0]["tasks"]
        row["at_end"] = [fmean(column) for column in zip(*(run["matrix"][-1] for run in own), strict=True)]
    return rows


def table(sequence: str, rows: Mapping[str, Any]) -> Iterator[str]:
    """The rows of a sequence as lines of Markdown, the best ACC first."""
    forms = ("{:.2f}", "{:+.3f}", "{:+.3f}")
    yield "| method | ACC, % | FWT | BWT | minutes | MB | the paper's ACC | FWT | BWT |"
    yield "|---" * 9 + "|"
    for method, row in sorted(rows.items(), key=lambda item: -item[1]["acc"]["mean"]):
        cells = [f"`{method}`"]
        cells += [_plus_minus(row[key], form) for key, form in zip(("acc", "fwt", "bwt"), forms, strict=True)]
        cells += [f"{row['seconds']['mean'] / 60:.1f}", f"{row['bytes']['mean'] / 1e6:.2f}"]
        theirs = PAPER[sequence].get(method, (None, None, None))
        cells += ["" if value is None else form.format(value) for value, form in zip(theirs, forms, strict=True)]
        yield "| " + " | ".join(cells) + " |"


def ablations(results: Mapping[str, Any], recipe: str) -> Iterator[str]:
    """What is recorded of the variants of a recipe, as lines of Markdown; the last column seed by seed."""
    found = {variant: by_seed(results, recipe, variant) for variant in VARIANTS}
    yield "| variant | changed | ACC, % | FWT | BWT | seeds | points of ACC the full method is above it |"
    yield "|---" * 7 + "|"
    for variant, rows in found.items():
        if not rows:
            continue
        figures = [spread([row["acc"] for row in rows.values()])]
        figures += [transferred(rows, found["one"]), spread([row["bwt"] for row in rows.values()])]
        forms = ("{:.2f}", "{:+.3f}", "{:+.3f}")
        cells = [_plus_minus(figure, form) for figure, form in zip(figures, forms, strict=True)]
        if variant == "one":
            cells[1] = ""
        gain = "" if variant == "full" else _plus_minus(gains(found["full"], rows), "{:+.2f}")
        changed = " ".join(f"`{name}={value}`" for name, value in VARIANTS[variant].items())
        yield f"| {variant} | {changed} | {' | '.join(cells)} | {', '.join(map(str, sorted(rows)))} | {gain} |"


def _plus_minus(figure: Mapping[str, float | None], form: str) -> str:
    """A mean with its deviation, if there is one; nothing of nothing."""
    mean, deviation = figure["mean"], figure["deviation"]
    if mean is None:
        return ""
    return form.format(mean) + ("" if deviation is None else f" ± {form.format(deviation).lstrip('+')}")


def figures(results: Mapping[str, Any]) -> Iterator[Figure]:
    """The recorded results, held against their targets."""
    full, permuted = by_seed(results, "femnist1", "full"), results["pmnist"]
    rows = {
        "ACC": spread([row["acc"] for row in full.values()]),
        "FWT": transferred(full, by_seed(results, "femnist1", "one")),
        "BWT": spread([row["bwt"] for row in full.values()]),
    }
    for target, name, now, aim in (("L1", "ACC", 86.0, 88), ("L2", "FWT", 0.06, 0.08), ("L2", "BWT", 0.035, 0.045)):
        theirs = PAPER["femnist1"]["etcl"][("ACC", "FWT", "BWT").index(name)]
        seeds = f"{len(full)} seeds; the paper has {theirs}"
        what = f"F-EMNIST-1: {name}, mean over seeds"
        yield Figure(target, what, rows[name]["mean"] or 0.0, f">= {now}", f">= {aim}", ends(rows[name]), seeds)
    acc, changed = permuted["acc"], permuted["layers_changed_after_being_claimed"]
    theirs = f"{len(changed)} seeds; the paper has 97.11, with 6,000 items a task where ours have 57,000"
    yield Figure("L3", "PMNIST, 10 tasks: ACC", acc["mean"], ">= 97.1", ">= 97.8", ends(acc), theirs)
    yield Figure("L3", "PMNIST, 10 tasks: layers with a claimed bit changed", max(changed), "= 0", "= 0")
    for recipe, heading in (("femnist1", "F-EMNIST-1"), ("mixed", "mixed")):
        for name in ("similarity", "alignment", "bi-objective"):
            part = by_seed(results, recipe, f"without-{name}")
            if not part:
                continue
            gain = gains(by_seed(results, recipe, "full"), part)
            clearly = len(part) >= 3 and gain["mean"] > 2 * gain["deviation"]
            asks = "" if clearly else "by two deviations, of three seeds"
            what = f"points of ACC the full method gains over that without {name}, {heading}"
            yield Figure("L10", what, gain["mean"], ">= 0", "> 0", ends(gain), f"seeds: {len(part)}", asks)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="where runs are kept")
    parts = ("femnist1", "mixed", "joint", "ensemble", "preset", "pmnist", "methods")
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--presets", nargs="+", default=list(PRESETS), choices=PRESETS)
    parser.add_argument("--sequences", nargs="+", default=list(SEQUENCES), choices=SEQUENCES)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results: dict[str, Any] = {}
    settings: dict[str, Any] = {name: load_recipe(name).as_json() for name in ("femnist1", "mixed", "pmnist")}
    settings |= {"joint": settings["femnist1"], "ensemble": settings["femnist1"]}
    for recipe in ("femnist1", "mixed"):
        for variant in arguments.variants if recipe in arguments.parts else ():
            for seed in arguments.seeds:
                part = f"{recipe} {variant} {seed}"
                results[part] = ablation(recipe, variant, seed, arguments.work / recipe)
                settings[part] = {"changed": VARIANTS[variant]}
    if "joint" in arguments.parts:
        results["joint"] = joint(arguments.seeds)
    if "ensemble" in arguments.parts:
        results["ensemble"] = ensemble(arguments.work / "femnist1", arguments.seeds)
    for name in arguments.presets if "preset" in arguments.parts else ():
        results[f"preset {name}"] = preset(name, arguments.work / "preset", arguments.seeds)
        settings[f"preset {name}"] = {"changed": PRESETS[name]}
    if "pmnist" in arguments.parts:
        results["pmnist"] = pmnist(arguments.seeds)
    if "methods" in arguments.parts:
        results["methods"], settings["methods"] = {}, {"sequences": SEQUENCES, "seeds": len(arguments.seeds)}
        for name in arguments.sequences:
            rows = methods(name, arguments.methods, arguments.work / name, len(arguments.seeds))
            results["methods"][name] = rows
            say("\n".join([f"\n{name}", *table(name, rows)]))
    for part, result in results.items() if arguments.record else ():
        write_result("accuracy", part, result, settings[part])


if __name__ == "__main__":
    main()
