"""Bundle: what was learned, ready to be used. The waist between learning and everything after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from etcl_deploy import atomic
from etcl_deploy.bundle import format
from etcl_deploy.bundle.codec import first_owner, pack, packed_size
from etcl_deploy.bundle.layout import Layout
from etcl_deploy.bundle.masks import CodedMasks, Masks, PackedMasks, code
from etcl_deploy.bundle.precision import PRECISIONS, expand, head_row
from etcl_deploy.bundle.sections import Sections, as_section, expect_keys, read_head, task_entry
from etcl_deploy.errors import BundleError, UnknownTaskError
from etcl_deploy.plan import Plan, PlanError
from etcl_deploy.preprocessing import Preprocessing

ENCODINGS = ("coded", "packed")
MAX_TASKS = 65_534
FEW, SPARSEST = 1 << 22, 32  # with coded masks a network has at most FEW + SPARSEST times as many weights as are used


@dataclass(frozen=True)
class BundledTask:
    """One task: who it is, its normalization (all steps in a row) and its head, which may be in few bits."""

    name: str
    classes: tuple[str, ...]
    density: float
    accuracy: float | None  # of the bundle on its test items, in percent
    learned: float | None  # the same as it was learned, in single precision
    norm: Tensor
    head: Mapping[str, Tensor]  # weight; bias, where the plan has one; scale, for int8

    def entry(self) -> dict[str, Any]:
        """What the manifest says of it."""
        words = {"name": self.name, "classes": list(self.classes), "density": self.density}
        return {**words, "accuracy": self.accuracy, "learned": self.learned}

    def head_values(self) -> dict[str, Tensor]:
        """Weight and bias in single precision, copied."""
        weight, scale = self.head["weight"], self.head.get("scale")
        values = {"weight": expand(weight, scale, head_row(*weight.shape)).clone()}
        return {**values, "bias": self.head["bias"].clone()} if "bias" in self.head else values


@dataclass(frozen=True)
class Bundle:
    """A backbone and the tasks that share it."""

    backbone: str
    plan: Plan
    preprocessing: Preprocessing
    stored: Tensor  # the weights as they are kept: all of them, or where masks are coded those some task selects
    scale: Tensor | None  # for int8: of every task and output channel, for the weights the task owns
    tasks: Mapping[str, BundledTask]
    masks: Masks
    run: Mapping[str, Any]
    encoding: str = "packed"
    digest: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)  # bytes of every section

    def task(self, name: str) -> BundledTask:
        """The task of that name."""
        if name not in self.tasks:
            raise UnknownTaskError(name, self.tasks)
        return self.tasks[name]

    def mask(self, name: str) -> Tensor:
        """Which weights a task uses, bool, all steps in a row."""
        return self.masks[self._number(name)]

    def bytes_of(self, name: str) -> dict[str, int]:
        """What the parts of a task take in the file."""
        parts = {"mask": ("mask",), "norm": ("norm",), "head": ("head/weight", "head/bias", "head/scale")}
        prefix = f"task/{self._number(name)}"
        return {part: sum(self.sizes.get(f"{prefix}/{own}", 0) for own in names) for part, names in parts.items()}

    def _number(self, name: str) -> int:
        self.task(name)
        return self._numbers[name]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.tasks)}

    @cached_property
    def layout(self) -> Layout:
        """How steps lie in a row."""
        return Layout(self.plan)

    @property
    def precision(self) -> str:
        """What the weights are kept in."""
        return next(name for name, dtype in PRECISIONS.items() if dtype == self.stored.dtype)

    @cached_property
    def kept(self) -> Tensor:
        """All weights as they are kept, 0 where no task selects one."""
        if not isinstance(self.masks, CodedMasks):
            return self.stored
        used = torch.from_numpy(self.masks.owners.used)
        if int(used.sum()) != len(self.stored):
            raise BundleError(f"the bundle is damaged: it has {len(self.stored)} weights, but {int(used.sum())} owned")
        whole = torch.zeros(len(used), dtype=self.stored.dtype)
        whole[used] = self.stored
        return whole

    @cached_property
    def weights(self) -> Tensor:
        """All weights in single precision, all steps in a row; where they are kept so, they are not copied."""
        if self.scale is None:
            return self.kept.float()
        row = self.layout.scale_row(self._owner(), len(self.tasks))
        return expand(self.kept, self.scale.flatten(), row)

    def _owner(self) -> Tensor:
        """Which task owns each weight."""
        if isinstance(self.masks, CodedMasks):
            return torch.from_numpy(self.masks.owners.owner.astype("int32"))
        masks = (self.masks[number] for number in range(len(self.tasks)))
        return first_owner(masks, len(self.tasks), self.layout.weight_count)


def to_bytes(bundle: Bundle, encoding: str) -> bytes:
    """The bytes of the file that holds this bundle in an encoding."""
    count, coded = len(bundle.tasks), encoding == "coded"
    sections, numbers = {}, {"backbone/weight": bundle.kept}
    if coded:
        used, sections["backbone/owner"], bits = code(bundle.masks, count, bundle.layout.layers)
        numbers["backbone/weight"] = bundle.kept[used]
        check_share(bundle.layout.weight_count, len(numbers["backbone/weight"]))
    else:
        bits = [pack(bundle.masks[number]) for number in range(count)]
    if bundle.scale is not None:
        numbers["backbone/scale"] = bundle.scale
    for number, (task, mask) in enumerate(zip(bundle.tasks.values(), bits, strict=True)):
        sections[f"task/{number}/mask"] = mask
        numbers[f"task/{number}/norm"] = task.norm
        numbers |= {f"task/{number}/head/{part}": tensor for part, tensor in task.head.items()}
    sections |= {name: as_section(tensor, coded=coded) for name, tensor in numbers.items()}
    manifest = {
        "backbone": {"name": bundle.backbone, "plan": bundle.plan.as_json()},
        "encoding": encoding,
        "precision": bundle.precision,
        "preprocessing": bundle.preprocessing.as_json(),
        "run": dict(bundle.run),
        "tasks": [task.entry() for task in bundle.tasks.values()],
    }
    return format.to_bytes(manifest, sections)


def check_share(weights: int, used: int) -> None:
    """Refuse coded masks that use so few weights that a small file would take a lot of memory to read."""
    if weights > FEW + SPARSEST * used:
        raise BundleError(f"of {weights} weights only {used} are used, too few for coded masks; packed ones hold them")


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
    expect_keys(manifest, "backbone", "encoding", "precision", "preprocessing", "run", "sections", "tasks")
    expect_keys(manifest["backbone"], "name", "plan")
    encoding, precision = manifest["encoding"], manifest["precision"]
    if encoding not in ENCODINGS:
        raise ValueError(f"encoding {encoding!r} is unknown; known: {', '.join(ENCODINGS)}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r} is unknown; known: {', '.join(PRECISIONS)}")
    plan = Plan.from_json(manifest["backbone"]["plan"])
    layout = Layout(plan)
    preprocessing = Preprocessing(**manifest["preprocessing"])
    if plan.input != (preprocessing.channels, preprocessing.height, preprocessing.width):
        raise ValueError("the images of the preprocessing do not fit the network")
    entries = [task_entry(value) for value in manifest["tasks"]]
    if not 1 <= len(entries) <= MAX_TASKS:
        raise ValueError(f"it holds {len(entries)} tasks; 1 to {MAX_TASKS} are right")
    if len({entry["name"] for entry in entries}) != len(entries):
        raise ValueError("two tasks have the same name")
    coded = encoding == "coded"
    left = Sections(sections, precision, coded=coded)
    stored = left.weights("backbone/weight", None if coded else layout.weight_count)
    scale = left.scale("backbone/scale", len(entries), layout.channel_count)
    bits, tasks = [], {}
    for number, entry in enumerate(entries):
        prefix = f"task/{number}"
        bits.append(left.bits(f"{prefix}/mask", None if coded else packed_size((layout.weight_count,))))
        norm = left.numbers(f"{prefix}/norm", layout.norm_count)
        head = read_head(left, prefix, len(entry["classes"]), plan)
        tasks[entry["name"]] = BundledTask(**entry, norm=norm, head=head)
    masks: Masks
    if coded:
        check_share(layout.weight_count, len(stored))
        masks = CodedMasks(left.bits("backbone/owner"), bits, layout.layers)
    else:
        masks = PackedMasks(bits, layout.weight_count)
    left.finish()
    name = manifest["backbone"]["name"]
    if not isinstance(name, str) or not name.encode():
        raise ValueError("the backbone needs a name")
    sizes = {section: tensor.nbytes for section, tensor in sections.items()}
    run = dict(manifest["run"])
    return Bundle(name, plan, preprocessing, stored, scale, tasks, masks, run, encoding, digest, sizes)
