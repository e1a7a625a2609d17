"""What later tasks added to a bundle, in a file of its own: with the old bundle it gives the new one, byte for byte.

A delta is a file as `format` describes, under the key `etcl-delta`. Its manifest:

    base            the digest of the bundle it belongs to
    result          the digest of the bundle it gives
    bytes           the SHA-256 of that bundle's whole file
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
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etcl_deploy.bundle import coded, format
from etcl_deploy.bundle.bundle import Bundle, BundledTask, load_bundle, to_bytes
from etcl_deploy.bundle.coded import Owners
from etcl_deploy.bundle.sections import Sections, as_section, as_tensor, expect_keys, read_head, task_entry
from etcl_deploy.errors import BundleError


def make_delta(old_path: Path, new_path: Path) -> bytes:
    """What a later bundle of the same run has that the old one has not."""
    old, new = load_bundle(old_path), load_bundle(new_path)
    before, masks = _masks(old), _masks(new)
    first = len(before)
    _check_follows(old, new, before, masks)
    data = to_bytes(new, new.encoding)
    if data != new_path.read_bytes():
        raise BundleError(f"{new_path} was written by another version of etcl_deploy; bundle its run again")
    owners = Owners.of(masks, len(masks), new.layout.layers)
    sections = {"owner": as_tensor(coded.encode_owners(owners, first))}
    numbers = {"weight": new.kept[_added(owners, first)]}
    numbers |= {} if new.scale is None else {"scale": new.scale[first:]}
    for number, task in enumerate(new.tasks.values()):
        known = old.tasks.get(task.name)
        if known is None:
            near = {other: owners.by_owner(masks[other]) for other in range(number)[-coded.CANDIDATES :]}
            mask = coded.encode_mask(owners, number, owners.by_owner(masks[number]), near)
            sections[f"task/{number}/mask"] = as_tensor(mask)
            numbers[f"task/{number}/norm"] = task.norm
        if known is None or not _same(known.head, task.head):
            numbers |= {f"task/{number}/head/{part}": tensor for part, tensor in task.head.items()}
    sections |= {name: as_section(tensor, coded=True) for name, tensor in numbers.items()}
    about = {"base": old.digest, "result": new.digest, "bytes": hashlib.sha256(data).hexdigest()}
    return format.to_bytes(
        {**about, "run": dict(new.run), "tasks": [task.entry() for task in new.tasks.values()]}, sections, format.DELTA
    )


def apply_delta(old_path: Path, path: Path) -> bytes:
    """The bytes of the new bundle."""
    old = load_bundle(old_path)
    manifest, sections, _ = format.read(path, format.DELTA)
    try:
        expect_keys(manifest, "base", "result", "bytes", "run", "sections", "tasks")
        if manifest["base"] != old.digest:
            raise BundleError(
                f"{path} belongs to the bundle with digest {str(manifest['base'])[:16]}..., but {old_path} has "
                f"{old.digest[:16]}..."
            )
        data = to_bytes(_joined(old, manifest, sections), old.encoding)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise BundleError(f"{path} does not describe a delta: {reason}") from None
    if hashlib.sha256(data).hexdigest() != manifest["bytes"]:
        raise BundleError(f"{path} gives another bundle than it states; bundle the run again")
    return data


def _joined(old: Bundle, manifest: Mapping[str, Any], sections: Mapping[str, Tensor]) -> Bundle:
    left, layout = Sections(sections, old.precision, coded=True), old.layout
    listed = [task_entry(value) for value in manifest["tasks"]]
    masks = _masks(old)
    first = len(masks)
    if [entry["name"] for entry in listed[:first]] != list(old.tasks):
        raise ValueError("it does not begin with the tasks of the old bundle")
    before = Owners.of(masks, first, layout.layers)
    owners = coded.decode_owners(left.bits("owner").numpy().tobytes(), len(listed), before)
    tasks: dict[str, BundledTask] = {}
    for number, entry in enumerate(listed):
        prefix, known = f"task/{number}", old.tasks.get(entry["name"])
        if known is None:
            data = left.bits(f"{prefix}/mask").numpy().tobytes()
            reference = coded.reference_of(data, number)
            other = None if reference is None else owners.by_owner(masks[reference])
            masks.append(owners.in_place(coded.decode_mask(owners, number, data, other)))
            norm = left.numbers(f"{prefix}/norm", layout.norm_count)
        else:
            norm = known.norm
        changed = known is None or f"{prefix}/head/weight" in sections
        head = read_head(left, prefix, len(entry["classes"]), old.plan) if changed or known is None else known.head
        tasks[entry["name"]] = BundledTask(**entry, norm=norm, head=head)
    more = left.scale("scale", len(listed) - first, layout.channel_count)
    scale = None if old.scale is None or more is None else torch.cat([old.scale, more])
    added = _added(owners, first)
    kept = old.kept.clone()
    kept[added] = left.weights("weight", int(added.sum()))
    left.finish()
    bits = [torch.from_numpy(mask) for mask in masks]
    return replace(old, stored=kept, scale=scale, tasks=tasks, masks=bits, run=dict(manifest["run"]))


def _check_follows(old: Bundle, new: Bundle, before: list[np.ndarray], masks: list[np.ndarray]) -> None:
    """Refuse a new bundle that does not go on from the old one."""
    alike = ("backbone", "plan", "preprocessing", "encoding", "precision")
    apart = [name for name in alike if getattr(old, name) != getattr(new, name)]
    if apart:
        raise BundleError(f"the two bundles differ in their {apart[0]}: they are not of one run, or not written alike")
    names = list(old.tasks)
    if list(new.tasks)[: len(names)] != names or len(new.tasks) == len(names):
        raise BundleError(f"the new bundle does not go on from the old one, which has: {', '.join(names)[:200]}")
    for name, mine, theirs in zip(names, before, masks, strict=False):
        a, b = old.tasks[name], new.tasks[name]
        if a.classes != b.classes or not np.array_equal(mine, theirs) or not torch.equal(a.norm, b.norm):
            raise BundleError(f"task {name!r} is another one in the new bundle: the two are not of one run")
    stay = torch.from_numpy(Owners.of(before, len(before), old.layout.layers).used)
    if not torch.equal(old.kept[stay], new.kept[stay]) or not _same_scales(old, new):
        raise BundleError("the weights of the old tasks are others in the new bundle: the two are not of one run")


def _added(owners: Owners, first: int) -> Tensor:
    """Which weights the old bundle does not have: those of new owners."""
    return torch.from_numpy(owners.used & (owners.owner >= first))


def _same_scales(old: Bundle, new: Bundle) -> bool:
    return old.scale is None or new.scale is None or torch.equal(old.scale, new.scale[: len(old.scale)])


def _masks(bundle: Bundle) -> list[np.ndarray]:
    return [bundle.masks[number].numpy() for number in range(len(bundle.tasks))]


def _same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(tensor, b[part]) for part, tensor in a.items())
