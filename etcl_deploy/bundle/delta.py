"""A delta: the difference between two bundles of a run. The old bundle and the delta give the new one, byte for byte.

A delta is a file as `format` describes, under the key `etcl-delta`. Its manifest:

    base            the digest of the bundle it belongs to
    bytes           the SHA-256 of the whole file of the bundle it gives
    run, tasks      as in the manifest of that bundle
    sections        as in every manifest

Its sections, with `<i>` the number of a task of the new bundle; they are as in a coded bundle, whatever its encoding:

    owner                     which of the weights nobody owned are owned by the new tasks
    weight                    those weights
    scale                     [new tasks, channels], with int8: their scales
    task/<i>/mask, norm, head/...     of every new task
    task/<i>/head/...                 of an old task whose head has changed since
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etcl_deploy.bundle import format, mask_coding
from etcl_deploy.bundle.bundle import Bundle, BundledTask, check_effort
from etcl_deploy.bundle.format import Buffer, map_file
from etcl_deploy.bundle.mask_coding import WeightOwners
from etcl_deploy.bundle.masks import Masks
from etcl_deploy.bundle.sections import (
    Sections,
    as_section,
    as_tensor,
    expect_keys,
    read_head,
    refusing,
    task_entries,
)
from etcl_deploy.core import atomic
from etcl_deploy.errors import BundleError

Names = tuple[str, str]  # of the two inputs, for errors


def make_delta(old: Buffer, new: Buffer, names: Names = ("the old bundle", "the new bundle")) -> bytes:
    """The delta from a bundle to a later one of the same run, both given as the bytes of their files."""
    before, after = (Bundle.from_bytes(data, name) for data, name in zip((old, new), names, strict=True))
    _check_follows(before, after)
    first, owners = len(before.tasks), _owners(after)
    sections = {"owner": as_tensor(mask_coding.encode_owners(owners, first))}
    numbers = {"weight": after.kept[_added(owners, first)]}
    numbers |= {} if after.scale is None else {"scale": after.scale[first:]}
    for number, task in enumerate(after.tasks.values()):
        known = before.tasks.get(task.name)
        if known is None:
            choice = range(number)[-mask_coding.CANDIDATES :]
            own, *near = (owners.by_owner(after.masks[other].numpy()) for other in (number, *choice))
            mask = mask_coding.encode_mask(owners, number, own, dict(zip(choice, near, strict=True)))
            sections[f"task/{number}/mask"] = as_tensor(mask)
            numbers[f"task/{number}/norm"] = task.norm
        if known is None or not all(_same(tensor, task.head[part]) for part, tensor in known.head.items()):
            numbers |= {f"task/{number}/head/{part}": tensor for part, tensor in task.head.items()}
    sections |= {name: as_section(tensor, coded=True) for name, tensor in numbers.items()}
    about = {"base": before.digest, "bytes": hashlib.sha256(new).hexdigest(), "run": dict(after.run)}
    return format.to_bytes({**about, "tasks": [task.entry() for task in after.tasks.values()]}, sections, format.DELTA)


def apply_delta(old: Buffer, delta: Buffer, names: Names = ("the old bundle", "the delta")) -> bytes:
    """The bytes of the new bundle, from those of the old one and of the delta."""
    data, stated = _applied(old, delta, names)
    if hashlib.sha256(data).hexdigest() != stated:
        raise BundleError(f"{names[1]} gives another bundle than it states; bundle the run again")
    return data


def write_delta(old_path: Path, new_path: Path, path: Path) -> None:
    """Write the delta between two files, once it is known to give the new one."""
    if path.exists() and any(path.samefile(source) for source in (old_path, new_path)):
        raise BundleError(f"{path} is one of the two bundles; name another file for the delta")
    old, new = map_file(old_path), map_file(new_path)
    delta = make_delta(old, new, (str(old_path), str(new_path)))
    if _applied(old, delta, (str(old_path), str(path)))[0] != new[:]:
        raise BundleError(f"{new_path} was written by another version of etcl_deploy; bundle its run again")
    atomic.write_bytes(path, delta)


def apply_delta_file(old_path: Path, path: Path) -> bytes:
    """The bytes of the new bundle, from the files of the old one and of the delta."""
    return apply_delta(map_file(old_path), map_file(path, "delta"), (str(old_path), str(path)))


def _applied(old: Buffer, delta: Buffer, names: Names) -> tuple[bytes, str]:
    """The bytes that a delta gives, and the digest it states for them."""
    old_name, name = names
    before = Bundle.from_bytes(old, old_name)
    manifest, sections, _ = format.from_bytes(delta, format.DELTA, name)
    with refusing(name, "delta"):
        expect_keys(manifest, "base", "bytes", "run", "sections", "tasks")
        if manifest["base"] != before.digest:
            raise BundleError(
                f"{name} belongs to the bundle with digest {str(manifest['base'])[:16]}..., but {old_name} has "
                f"{before.digest[:16]}..."
            )
        return _joined(before, manifest, sections).to_bytes(before.encoding), manifest["bytes"]


def _joined(old: Bundle, manifest: Mapping[str, Any], sections: Mapping[str, Tensor]) -> Bundle:
    """The new bundle: the old one with the sections of a delta."""
    left, layout, first = Sections(sections, old.precision, coded=True), old.layout, len(old.tasks)
    entries = task_entries(manifest["tasks"])
    before = [(task.name, task.classes) for task in old.tasks.values()]
    if [(entry["name"], entry["classes"]) for entry in entries[:first]] != before:
        raise ValueError("it does not begin with the tasks of the old bundle")
    check_effort(layout.weight_count, len(entries), old.stored.nbytes)
    owners = mask_coding.decode_owners(left.bits("owner").numpy().tobytes(), len(entries), _owners(old))
    masks = _Followed(old.masks, first, layout.weight_count)
    tasks: dict[str, BundledTask] = {}
    for number, entry in enumerate(entries):
        prefix, known = f"task/{number}", old.tasks.get(entry["name"])
        if known is None:
            data = left.bits(f"{prefix}/mask").numpy().tobytes()
            reference = mask_coding.reference_of(data, number)
            other = None if reference is None else owners.by_owner(masks[reference].numpy())
            masks.append(owners.in_place(mask_coding.decode_mask(owners, number, data, other)))
        norm = left.numbers(f"{prefix}/norm", layout.norm_count) if known is None else known.norm
        stays = known is not None and f"{prefix}/head/weight" not in sections
        head = known.head if known and stays else read_head(left, prefix, len(entry["classes"]), old.plan)
        tasks[entry["name"]] = BundledTask(**entry, norm=norm, head=head)
    more = left.scale("scale", len(entries) - first, layout.channel_count)
    scale = None if old.scale is None or more is None else torch.cat([old.scale, more])
    added = _added(owners, first)
    kept = old.kept.clone()
    kept[added] = left.weights("weight", int(added.sum()))
    left.finish()
    return replace(old, stored=kept, scale=scale, tasks=tasks, masks=masks, run=dict(manifest["run"]))


class _Followed:
    """The masks of a bundle, followed by those of new tasks, which are kept packed."""

    def __init__(self, masks: Masks, count: int, weights: int) -> None:
        self._masks, self._count, self._weights = masks, count, weights
        self._more: list[np.ndarray] = []

    def append(self, mask: np.ndarray) -> None:
        self._more.append(np.packbits(mask))

    def __getitem__(self, number: int) -> Tensor:
        if number < self._count:
            return self._masks[number]
        return torch.from_numpy(np.unpackbits(self._more[number - self._count], count=self._weights).view(np.bool_))


def _check_follows(old: Bundle, new: Bundle) -> None:
    """Refuse a new bundle that does not go on from the old one."""
    alike = ("backbone", "plan", "preprocessing", "precision")
    apart = [name for name in alike if getattr(old, name) != getattr(new, name)]
    if apart:
        raise BundleError(f"the two bundles differ in their {apart[0]}: they are not of one run, or not written alike")
    if old.encoding != new.encoding:
        raise BundleError(
            f"the two bundles differ in their encoding: `etcl bundle NEW --encoding {old.encoding} -o FILE` "
            "makes them alike"
        )
    names = list(old.tasks)
    if list(new.tasks)[: len(names)] != names or len(new.tasks) == len(names):
        raise BundleError(f"the new bundle does not go on from the old one, which has: {', '.join(names)[:200]}")
    for number, name in enumerate(names):
        a, b = old.tasks[name], new.tasks[name]
        if a.classes != b.classes or not torch.equal(old.masks[number], new.masks[number]) or not _same(a.norm, b.norm):
            raise BundleError(f"task {name!r} is another one in the new bundle: the two are not of one run")
    stay = torch.from_numpy(_owners(old).used)
    scales = (old.scale, new.scale[: len(names)]) if old.scale is not None and new.scale is not None else None
    if not _same(old.kept[stay], new.kept[stay]) or (scales and not _same(*scales)):
        raise BundleError(
            "the weights of the old tasks are others in the new bundle: the two are not of one run, or its method "
            "changes what it has learned"
        )


def _owners(bundle: Bundle) -> WeightOwners:
    masks: Iterator[np.ndarray] = (bundle.masks[number].numpy() for number in range(len(bundle.tasks)))
    return WeightOwners.of(masks, len(bundle.tasks), bundle.layout.layers)


def _added(owners: WeightOwners, first: int) -> Tensor:
    """The weights that the old bundle does not have: those of new owners."""
    return torch.from_numpy(owners.used & (owners.owner >= first))


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same bytes: to a number, 0 and -0 are the same."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
