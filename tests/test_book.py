"""A reader written from docs/bundle-format.md alone, in plain arithmetic, with nothing of the code that writes."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from etcl_deploy.bundle.bundle import load_bundle

GOLDEN = ROOT / "tests" / "golden"
WIDTHS = {"fp32": 4, "fp16": 2, "int8": 1}


class Words:
    """The words after `end` bytes of a section, and the state."""

    def __init__(self, data: bytes, end: int) -> None:
        start = end + -end % 4
        assert not any(data[end:start])
        self.words = list(struct.unpack(f"<{(len(data) - start) // 4}I", data[start:]))
        self.state = 0

    def symbol(self, slots: Sequence[int]) -> int:
        while self.state < 2**32 and self.words:
            self.state = self.state * 2**32 + self.words.pop()
        k, start, number = self.state % 2**24, 0, 0
        while start + slots[number] <= k:
            start, number = start + slots[number], number + 1
        self.state = self.state // 2**24 * slots[number] + k - start
        return number

    def groups(self, sizes: Sequence[int], levels: bytes) -> list[list[int]]:
        bits = [[int(level == 64)] * size for size, level in zip(sizes, levels, strict=True)]
        for level in range(1, 64):
            chosen = [number for number, own in enumerate(levels) if own == level]
            total = sum(sizes[number] for number in chosen)
            joined = [byte >> bit & 1 for byte in self._bytes(level, -(-total // 8)) for bit in range(8)]
            assert not any(joined[total:])
            for number in chosen:
                bits[number], joined = joined[: sizes[number]], joined[sizes[number] :]
        return bits

    def _bytes(self, level: int, count: int) -> list[int]:
        p = round(2**16 * math.sin(math.pi * level / 128) ** 2)
        ones = [bin(byte).count("1") for byte in range(256)]
        slots = [1 + p**j * (2**16 - p) ** (8 - j) * (2**24 - 256) // 2**128 for j in ones]
        slots[0 if level < 32 else 255] += 2**24 - sum(slots)
        return [self.symbol(slots) for _ in range(count)]

    def finish(self) -> None:
        assert not self.words and self.state == 0


def numbers(data: bytes, width: int) -> bytes:
    count, kinds = struct.unpack_from("<IH", data)
    if not kinds:
        return data[6:]
    tops = [top for top in range(256) if data[6 + top // 8] >> top % 8 & 1]
    shares = [share + 1 for share in struct.unpack_from(f"<{kinds}H", data, 38)]
    assert len(tops) == kinds and sum(shares) == 2**16
    rest = 38 + 2 * kinds
    words = Words(data, rest + count * (width - 1))
    found = bytearray()
    for number in range(count):
        top = words.symbol([256 * share for share in shares]) if kinds > 1 else 0
        found += bytes(data[rest + plane * count + number] for plane in range(width - 1)) + bytes([tops[top]])
    words.finish()
    return bytes(found)


def weight_sizes(plan: dict[str, Any]) -> list[int]:
    sizes = []
    for _, operation, _, s in plan["steps"]:
        if operation == "conv2d":
            high, wide = s["kernel"] if isinstance(s["kernel"], list) else (s["kernel"], s["kernel"])
            sizes.append(s["out"] * (s["in"] // s["groups"]) * high * wide)
        elif operation in ("linear", "bias"):
            sizes.append(s["in"] * s["out"] if operation == "linear" else s["features"])
    return sizes


def owners_of(data: bytes, tasks: int, steps: list[range]) -> dict[int, int]:
    words, owner = Words(data, tasks * len(steps)), dict[int, int]()
    for task in range(tasks):
        groups = [[place for place in step if place not in owner] for step in steps]
        levels = data[task * len(steps) : (task + 1) * len(steps)]
        for group, bits in zip(groups, words.groups([*map(len, groups)], levels), strict=True):
            owner |= {place: task for place, bit in zip(group, bits, strict=True) if bit}
    words.finish()
    return owner


def mask_of(data: bytes, task: int, owner: dict[int, int], steps: list[range], masks: list[set[int]]) -> set[int]:
    (reference,) = struct.unpack_from("<H", data)
    assert reference <= task
    groups: list[list[int]] = []
    for step in steps:
        earlier = sorted((owner[place], place) for place in step if owner.get(place, task) < task)
        for age in sorted({(task - own).bit_length() for own, _ in earlier}, reverse=True):
            groups.append([place for own, place in earlier if (task - own).bit_length() == age])
    words = Words(data, 2 + len(groups))
    found = {place for place, own in owner.items() if own == task}
    for group, bits in zip(groups, words.groups([*map(len, groups)], data[2 : 2 + len(groups)]), strict=True):
        chosen = {place for place, bit in zip(group, bits, strict=True) if bit}
        found |= chosen ^ (masks[reference - 1] & set(group)) if reference else chosen
    words.finish()
    return found


def read(path: Path) -> tuple[dict[str, Any], list[set[int]], bytes, dict[str, bytes]]:
    """Manifest, masks as sets of weights, all weights, and whatever else there is, by section."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    first, text = header.pop("__metadata__")["etcl"].split("\n", 1)
    assert first == "1 " + hashlib.sha256(text.encode()).hexdigest()
    manifest = json.loads(text)
    sections = {}
    for name, about in header.items():
        begin, end = about["data_offsets"]
        sections[name] = content = data[start + begin : start + end]
        assert hashlib.sha256(content).hexdigest() == manifest["sections"][name]["sha256"]
    ends = list(accumulate(weight_sizes(manifest["backbone"]["plan"])))
    steps = [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    tasks, width = range(len(manifest["tasks"])), WIDTHS[manifest["precision"]]
    masks: list[set[int]] = []
    if manifest["encoding"] == "packed":
        for task in tasks:
            bits = sections.pop(f"task/{task}/mask")
            masks.append({place for place in range(ends[-1]) if bits[place // 8] >> place % 8 & 1})
        return manifest, masks, sections.pop("backbone/weight"), sections
    owner = owners_of(sections.pop("backbone/owner"), len(tasks), steps)
    for task in tasks:
        masks.append(mask_of(sections.pop(f"task/{task}/mask"), task, owner, steps, masks))
    used = numbers(sections.pop("backbone/weight"), width)
    parts = iter([used[place : place + width] for place in range(0, len(used), width)])
    weights = b"".join(next(parts) if place in owner else bytes(width) for place in range(ends[-1]))
    assert not [*parts]
    others = {name: numbers(data, width if name.endswith("head/weight") else 4) for name, data in sections.items()}
    return manifest, masks, weights, others


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.glob("*.etcl")))
def test_the_text_is_enough_to_write_a_reader(name: str) -> None:
    """It finds the masks, weights, norms and heads that ours finds, to the bit."""
    manifest, masks, weights, others = read(GOLDEN / name)
    bundle = load_bundle(GOLDEN / name)
    assert [task["name"] for task in manifest["tasks"]] == list(bundle.tasks)
    assert weights == bundle.kept.numpy().tobytes()
    for number, (mask, task) in enumerate(zip(masks, bundle.tasks.values(), strict=True)):
        assert mask == set(bundle.mask(task.name).nonzero().flatten().tolist())
        assert others.pop(f"task/{number}/norm") == task.norm.numpy().tobytes()
        for part, tensor in task.head.items():
            assert others.pop(f"task/{number}/head/{part}") == tensor.numpy().tobytes()
    assert others == ({} if bundle.scale is None else {"backbone/scale": bundle.scale.numpy().tobytes()})
