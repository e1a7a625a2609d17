"""Bundle: what was learned, ready to be used. The waist between learning and everything after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from etcl_deploy import atomic
from etcl_deploy.bundle import format
from etcl_deploy.bundle.codec import packed_size
from etcl_deploy.errors import BundleError, UnknownTaskError
from etcl_deploy.plan import Plan, PlanError
from etcl_deploy.preprocessing import Preprocessing

ENCODING = "packed"
MAX_CLASSES = 100_000
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class BundledTask:
    """One task: who it is, and its tensors by step name as the format describes them."""

    name: str
    classes: tuple[str, ...]
    density: float
    accuracy: float | None  # on its test items, in percent
    masks: Mapping[str, Tensor]
    norms: Mapping[str, Tensor]
    head: Mapping[str, Tensor]

    def sections(self, index: int) -> dict[str, Tensor]:
        """The task's tensors under the names they have in the file."""
        parts = {"mask": self.masks, "norm": self.norms, "head": self.head}
        return {
            f"task/{index}/{part}/{key}": tensor for part, tensors in parts.items() for key, tensor in tensors.items()
        }

    def sizes(self) -> dict[str, int]:
        """Bytes of mask, normalization and head."""
        parts = {"mask": self.masks, "norm": self.norms, "head": self.head}
        return {part: sum(t.nbytes for t in tensors.values()) for part, tensors in parts.items()}


@dataclass(frozen=True)
class Bundle:
    """A backbone and the tasks that share it."""

    backbone: str
    plan: Plan
    preprocessing: Preprocessing
    weights: Mapping[str, Tensor]
    tasks: Mapping[str, BundledTask]
    run: Mapping[str, Any]
    digest: str

    def task(self, name: str) -> BundledTask:
        """The task of that name."""
        if name not in self.tasks:
            raise UnknownTaskError(name, self.tasks)
        return self.tasks[name]


def to_bytes(
    backbone: str,
    plan: Plan,
    preprocessing: Preprocessing,
    weights: Mapping[str, Tensor],
    tasks: Mapping[str, BundledTask],
    run: Mapping[str, Any],
) -> bytes:
    """The bundle file's bytes."""
    manifest = {
        "backbone": {"name": backbone, "plan": plan.as_json()},
        "encoding": ENCODING,
        "preprocessing": preprocessing.as_json(),
        "run": dict(run),
        "tasks": [
            {
                "name": task.name,
                "classes": list(task.classes),
                "density": task.density,
                "accuracy": task.accuracy,
            }
            for task in tasks.values()
        ],
    }
    sections = {f"backbone/{step}": weight for step, weight in weights.items()}
    for index, task in enumerate(tasks.values()):
        sections |= task.sections(index)
    return format.to_bytes(manifest, sections)


def save(path: Path, data: bytes) -> None:
    """Write a bundle's bytes, wholly or not at all."""
    atomic.write_bytes(path, data)


def load_bundle(path: str | Path) -> Bundle:
    """The bundle in a file. Every digest is checked; raises BundleError with the reason if anything is off."""
    path = Path(path)
    manifest, sections, digest = format.read(path)
    try:
        return _assemble(manifest, sections, digest)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, PlanError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise BundleError(f"{path} does not describe a bundle: {reason}") from None


def _assemble(manifest: Mapping[str, Any], sections: Mapping[str, Tensor], digest: str) -> Bundle:
    _expect_keys(manifest, "backbone", "encoding", "preprocessing", "run", "sections", "tasks")
    _expect_keys(manifest["backbone"], "name", "plan")
    if manifest["encoding"] != ENCODING:
        raise ValueError(f"encoding {manifest['encoding']!r} is unknown; known: {ENCODING}")
    plan = Plan.from_json(manifest["backbone"]["plan"])
    preprocessing = Preprocessing(**manifest["preprocessing"])
    if plan.input != (preprocessing.channels, preprocessing.height, preprocessing.width):
        raise ValueError("the images of the preprocessing do not fit the network")
    entries = [_entry(value) for value in manifest["tasks"]]
    if not entries:
        raise ValueError("it holds no task")
    if len({name for name, *_ in entries}) != len(entries):
        raise ValueError("two tasks have the same name")
    remaining = dict(sections)
    weights = _take(remaining, "backbone", _weight_shapes(plan))
    tasks = {}
    for index, (name, classes, density, accuracy) in enumerate(entries):
        prefix = f"task/{index}"
        tasks[name] = BundledTask(
            name,
            classes,
            density,
            accuracy,
            _checked_masks(plan, _take(remaining, f"{prefix}/mask", _mask_shapes(plan))),
            _take(remaining, f"{prefix}/norm", _norm_shapes(plan)),
            _take(remaining, f"{prefix}/head", _head_shapes(plan, len(classes))),
        )
    if remaining:
        raise ValueError(f"section {min(remaining)!r} belongs to nothing")
    name = manifest["backbone"]["name"]
    if not isinstance(name, str) or not name.encode():
        raise ValueError("the backbone needs a name")
    return Bundle(name, plan, preprocessing, weights, tasks, dict(manifest["run"]), digest)


def _entry(value: Any) -> tuple[str, tuple[str, ...], float, float | None]:
    """A task's name, classes, density and accuracy, each of exactly its type and in its range."""
    _expect_keys(value, "name", "classes", "density", "accuracy")
    name, classes, density, accuracy = (value[key] for key in ("name", "classes", "density", "accuracy"))
    texts = [name, *classes] if isinstance(classes, list) else [None]
    if not all(isinstance(text, str) and text and text.encode() for text in texts):
        raise ValueError("a task needs a name and a list of class names")
    if not 1 <= len(classes) <= MAX_CLASSES or len(set(classes)) != len(classes):
        raise ValueError(f"task {name!r} needs 1 to {MAX_CLASSES} different classes")
    if type(density) is not float or not 0 <= density <= 1:
        raise ValueError(f"task {name!r} has density {density!r}; it lies between 0.0 and 1.0")
    if accuracy is not None and (type(accuracy) is not float or not 0 <= accuracy <= 100):
        raise ValueError(f"task {name!r} has accuracy {accuracy!r}; it lies between 0.0 and 100.0, or is null")
    return name, tuple(classes), density, accuracy


def _expect_keys(value: Any, *keys: str) -> None:
    if not isinstance(value, dict) or set(value) != set(keys):
        raise ValueError(f"expected an object with exactly the keys {', '.join(keys)}")


def _weight_shapes(plan: Plan) -> Shapes:
    return {step.name: step.weight_shape or () for step in plan.masked}


def _mask_shapes(plan: Plan) -> Shapes:
    return {name: (packed_size(shape),) for name, shape in _weight_shapes(plan).items()}


def _norm_shapes(plan: Plan) -> Shapes:
    return {step.name: (2, step.settings["features"]) for step in plan.norms}


def _head_shapes(plan: Plan, classes: int) -> Shapes:
    shapes: Shapes = {"weight": (classes, plan.features)}
    return {**shapes, "bias": (classes,)} if plan.head_bias else shapes


def _take(sections: dict[str, Tensor], prefix: str, shapes: Shapes) -> dict[str, Tensor]:
    """Move the named sections out of `sections`, each checked for its shape and type."""
    taken = {}
    for name, shape in shapes.items():
        tensor = sections.pop(f"{prefix}/{name}")
        dtype = "U8" if prefix.endswith("/mask") else "F32"
        if tuple(tensor.shape) != shape or format.DTYPES.get(tensor.dtype) != dtype:
            raise ValueError(f"section '{prefix}/{name}' should be {dtype} {list(shape)}")
        if dtype == "F32" and not tensor.isfinite().all():
            raise ValueError(f"section '{prefix}/{name}' holds numbers that are not finite")
        taken[name] = tensor
    return taken


def _checked_masks(plan: Plan, masks: dict[str, Tensor]) -> dict[str, Tensor]:
    """The masks themselves, once their padding bits are known to be 0."""
    for name, shape in _weight_shapes(plan).items():
        used = prod(shape) % 8
        if used and int(masks[name][-1]) >> used:
            raise ValueError(f"the mask of step {name!r} has a padding bit set")
    return masks


def weight_count(plan: Plan) -> int:
    """How many backbone weights a mask covers."""
    return sum(prod(shape) for shape in _weight_shapes(plan).values())
