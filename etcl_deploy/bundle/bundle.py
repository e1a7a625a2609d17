"""Bundle: the learned tasks, ready to be used. The waist between learning and everything after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from etcl_deploy.bundle import format
from etcl_deploy.bundle.bits import check_padding, first_owner, pack, packed_size
from etcl_deploy.bundle.layout import Layout
from etcl_deploy.bundle.masks import CodedMasks, Masks, PackedMasks, code
from etcl_deploy.bundle.precision import PRECISIONS, expand
from etcl_deploy.bundle.sections import Sections, as_section, expect_keys, read_head, refusing, task_entries
from etcl_deploy.core import atomic
from etcl_deploy.core.plan import Plan
from etcl_deploy.core.preprocessing import Preprocessing
from etcl_deploy.errors import BundleError, UnknownTaskError

ENCODINGS = ("coded", "packed")
# With coded masks a network has at most FEW + SPARSEST * the bytes of its weights as many weights, and all tasks
# together at most LONGEST: they take memory and time to decode, however small the file is.
FEW, SPARSEST, LONGEST = 1 << 22, 32, 1 << 34


@dataclass(frozen=True)
class BundledTask:
    """One task: its name and classes, its normalization (all steps in a row) and its head, which may be in few bits."""

    name: str
    classes: tuple[str, ...]
    density: float
    accuracy: float | None  # of this bundle on the task's test items, in percent
    learned: float | None  # the same before weights were reduced to fewer bits
    norm: Tensor
    head: Mapping[str, Tensor]  # weight; bias, where the plan has one; scale, for int8

    def entry(self) -> dict[str, Any]:
        """Its entry in the manifest."""
        return {
            "name": self.name,
            "classes": list(self.classes),
            "density": self.density,
            "accuracy": self.accuracy,
            "learned": self.learned,
        }

    def head_values(self) -> dict[str, Tensor]:
        """Weight and bias in single precision, copied."""
        weight, scale = self.head["weight"], self.head.get("scale")
        values = {"weight": expand(weight, None if scale is None else scale.unsqueeze(1))}
        values |= {"bias": self.head["bias"]} if "bias" in self.head else {}
        # A tensor that still shares the file's memory would keep the whole file mapped.
        return {
            key: value.clone() if value.data_ptr() == self.head[key].data_ptr() else value
            for key, value in values.items()
        }


@dataclass(frozen=True)
class Bundle:
    """A backbone and the tasks that share it."""

    backbone: str
    plan: Plan
    preprocessing: Preprocessing
    stored: Tensor  # all weights in the bundle's precision; where masks are coded, only those some task selects
    scale: Tensor | None  # for int8: [tasks, output channels], of the weights each task owns
    tasks: Mapping[str, BundledTask]
    masks: Masks
    run: Mapping[str, Any]
    encoding: str = "packed"
    digest: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)  # bytes of every section

    @classmethod
    def from_bytes(cls, data: format.Buffer, name: str = "the bundle", *, check: bool = True) -> Bundle:
        """The bundle in a file's bytes; errors call it `name`. Raises BundleError if anything is wrong.

        Tensors share the memory of `data` where that can be written to, as a mapped file can. Without `check` no
        digest of a section is compared, so that a section is read when it is used.
        """
        manifest, sections, digest = format.from_bytes(data, format.BUNDLE, name, check=check)
        with refusing(name, "bundle"):
            return _assemble(manifest, sections, digest, check=check)

    def to_bytes(self, encoding: str) -> bytes:
        """The bytes of the file that holds this bundle in an encoding."""
        coded = encoding == "coded"
        numbers, bits = self._parts(coded=coded)
        sections = {name: as_section(tensor, coded=coded) for name, tensor in numbers.items()} | bits
        if coded:
            try:
                check_effort(self.layout.weight_count, len(self.tasks), sections["backbone/weight"].nbytes)
            except ValueError as error:
                raise BundleError(str(error)) from None
        manifest = {
            "backbone": {"name": self.backbone, "plan": self.plan.as_json()},
            "encoding": encoding,
            "precision": self.precision,
            "preprocessing": self.preprocessing.as_json(),
            "run": dict(self.run),
            "tasks": [task.entry() for task in self.tasks.values()],
        }
        return format.to_bytes(manifest, sections)

    def _parts(self, *, coded: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The sections of a file: those that hold numbers, and those that hold bits."""
        count, bits = len(self.tasks), {}
        numbers = {"backbone/weight": self.kept}
        if coded:
            used, bits["backbone/owner"], masks = code(self.masks, count, self.layout.layers)
            numbers["backbone/weight"] = self.kept[used]
        else:
            masks = [pack(self.masks[number]) for number in range(count)]
        if self.scale is not None:
            numbers["backbone/scale"] = self.scale
        for number, (task, mask) in enumerate(zip(self.tasks.values(), masks, strict=True)):
            bits[f"task/{number}/mask"] = mask
            numbers[f"task/{number}/norm"] = task.norm
            numbers |= {f"task/{number}/head/{part}": tensor for part, tensor in task.head.items()}
        return numbers, bits

    def task(self, name: str) -> BundledTask:
        """The task of that name."""
        if name not in self.tasks:
            raise UnknownTaskError(name, self.tasks)
        return self.tasks[name]

    def mask(self, name: str) -> Tensor:
        """Which weights a task uses, bool, all steps in a row."""
        return self.masks[self.number(name)]

    def bytes_of(self, name: str) -> dict[str, int]:
        """Bytes that each part of a task takes in the file."""
        parts = {"mask": ("mask",), "norm": ("norm",), "head": ("head/weight", "head/bias", "head/scale")}
        prefix = f"task/{self.number(name)}"
        return {part: sum(self.sizes.get(f"{prefix}/{own}", 0) for own in names) for part, names in parts.items()}

    def number(self, name: str) -> int:
        """The position of a task among all."""
        self.task(name)
        return self._numbers[name]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.tasks)}

    @cached_property
    def layout(self) -> Layout:
        """Where the weights and norms of each step lie in a flat tensor."""
        return Layout(self.plan)

    @property
    def precision(self) -> str:
        """The precision of the weights: "fp32", "fp16" or "int8"."""
        return next(name for name, dtype in PRECISIONS.items() if dtype == self.stored.dtype)

    @cached_property
    def kept(self) -> Tensor:
        """All weights in the bundle's precision, 0 where no task selects one."""
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
        """All weights in single precision, all steps in a row; not copied if the bundle has that precision."""
        if self.scale is None:
            return self.kept.float()
        row = self.layout.scale_row(self._owner(), len(self.tasks))
        return expand(self.kept, self.scale.flatten()[row])

    def decode_all(self) -> None:
        """Decode every weight and mask once: loading alone leaves coded ones undecoded."""
        _ = self.weights
        for name in self.tasks:
            self.mask(name)

    def _owner(self) -> Tensor:
        """The number of the task that owns each weight."""
        if isinstance(self.masks, CodedMasks):
            return torch.from_numpy(self.masks.owners.owner.astype("int32"))
        masks = (self.masks[number] for number in range(len(self.tasks)))
        return first_owner(masks, len(self.tasks), self.layout.weight_count)


def check_effort(weights: int, tasks: int, size: int) -> None:
    """Refuse coded masks that would take much memory or time to read from a small file; `size`: bytes of weights."""
    if weights > FEW + SPARSEST * size:
        raise ValueError(f"{size} bytes of {weights} weights are too few for coded masks; packed ones hold them")
    if weights * tasks > LONGEST:
        raise ValueError(f"{tasks} tasks of {weights} weights are too many for coded masks; packed ones hold them")


def save(path: Path, data: bytes) -> None:
    """Write a bundle's bytes, wholly or not at all. Bytes that cannot be read again are not written."""
    Bundle.from_bytes(data, str(path))
    atomic.write_bytes(path, data)


def load_bundle(path: str | Path) -> Bundle:
    """The bundle in a file, which is mapped. Every digest is checked; raises BundleError if anything is wrong."""
    return Bundle.from_bytes(format.map_file(Path(path)), str(path))


def reload_bundle(path: Path, digest: str) -> Bundle:
    """A bundle that was loaded before, in fresh memory: of its masks only those that are used are read again."""
    bundle = Bundle.from_bytes(format.map_file(path), str(path), check=False)
    if bundle.digest != digest:
        raise BundleError(f"{path} was replaced while it was being read")
    return bundle


def _assemble(manifest: Mapping[str, Any], sections: Mapping[str, Tensor], digest: str, *, check: bool) -> Bundle:
    """The bundle of a manifest and its sections. Raises ValueError or KeyError where they are not one."""
    expect_keys(manifest, "backbone", "encoding", "precision", "preprocessing", "run", "sections", "tasks")
    expect_keys(manifest["backbone"], "name", "plan")
    encoding, precision = manifest["encoding"], manifest["precision"]
    if encoding not in ENCODINGS:
        raise ValueError(f"encoding {encoding!r} is unknown; known: {', '.join(ENCODINGS)}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision {precision!r} is unknown; known: {', '.join(PRECISIONS)}")
    plan = Plan.from_json(manifest["backbone"]["plan"])
    layout = Layout(plan)
    if not layout.weight_count:
        raise ValueError("its network has no weights")
    expect_keys(manifest["preprocessing"], *Preprocessing.__dataclass_fields__)
    preprocessing = Preprocessing(**manifest["preprocessing"])
    if plan.input != (preprocessing.channels, preprocessing.height, preprocessing.width):
        raise ValueError("the images of the preprocessing do not fit the network")
    name, run = manifest["backbone"]["name"], manifest["run"]
    if not isinstance(name, str) or not name.encode():
        raise ValueError("the backbone needs a name")
    if not isinstance(run, dict):
        raise ValueError("what it says of its run is no object")
    entries, count, coded = task_entries(manifest["tasks"]), layout.weight_count, encoding == "coded"
    left = Sections(sections, precision, coded=coded)

    def packed(number: int) -> Tensor:
        return left.bits(f"task/{number}/mask", packed_size((count,)))

    masks: Masks
    if coded:
        check_effort(count, len(entries), sections["backbone/weight"].nbytes)
        stored = left.weights_up_to("backbone/weight", count)
        bits = [left.bits(f"task/{number}/mask") for number in range(len(entries))]
        masks = CodedMasks(left.bits("backbone/owner"), bits, layout.layers)
    else:
        stored = left.weights("backbone/weight", count)
        masks = PackedMasks(packed, count)
    scale = left.scale("backbone/scale", len(entries), layout.channel_count)
    tasks = {}
    for number, entry in enumerate(entries):
        if check and not coded:
            check_padding(packed(number), count)
        norm = left.numbers(f"task/{number}/norm", layout.norm_count)
        head = read_head(left, f"task/{number}", len(entry["classes"]), plan)
        tasks[entry["name"]] = BundledTask(**entry, norm=norm, head=head)
    if check:
        left.finish()
    sizes = {section: format.size_of(described) for section, described in manifest["sections"].items()}
    return Bundle(name, plan, preprocessing, stored, scale, tasks, masks, run, encoding, digest, sizes)
