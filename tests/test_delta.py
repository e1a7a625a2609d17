"""An old bundle and a delta give the new bundle, byte for byte."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import Learned
from factories import made_bundle, parts_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli import answer, fails

from etcl_deploy.bundle import float_coding, format
from etcl_deploy.bundle.bundle import Bundle, load_bundle
from etcl_deploy.bundle.delta import apply_delta, make_delta, write_delta
from etcl_deploy.bundle.sections import as_section, as_tensor
from etcl_deploy.errors import BundleError
from etcl_deploy.runs.to_bundle import bundle_of

PRECISIONS = ["fp32", "fp16", "int8"]


def first_tasks(learned: Learned, count: int, precision: str = "fp32", **changes: object) -> Bundle:
    """The bundle as it was after `count` tasks."""
    network = learned.run.network
    whole = dict(network.finished)
    try:
        network.finished = dict(list(whole.items())[:count])
        made = bundle_of(network, "resnet18", {}, {"tasks": count}, precision)
    finally:
        network.finished = whole
    return replace(made, **changes)


@pytest.fixture
def two(learned: Learned) -> bytes:
    return first_tasks(learned, 2).to_bytes("coded")


@pytest.fixture
def files(learned: Learned, two: bytes, tmp_path: Path) -> tuple[Path, Path]:
    """The bundle of two tasks and that of three."""
    old, new = tmp_path / "o.etcl", tmp_path / "n.etcl"
    old.write_bytes(two)
    new.write_bytes(first_tasks(learned, 3).to_bytes("coded"))
    return old, new


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("encoding", ["coded", "packed"])
def test_a_delta_gives_the_new_bundle(learned: Learned, encoding: str, precision: str) -> None:
    """Of one task or several, one after another, in every encoding and precision; and it is smaller."""
    versions = [first_tasks(learned, n, precision).to_bytes(encoding) for n in range(1, 6)]
    held = versions[0]
    for old, new in pairwise(versions):
        delta = make_delta(old, new)
        held = apply_delta(held, delta)
        assert held == new
        assert len(delta) < 0.6 * len(held)
    assert apply_delta(versions[0], make_delta(versions[0], versions[-1])) == held


@settings(deadline=None, max_examples=10)
@given(
    st.sampled_from([("fcn3", 4, 3), ("resnet18", 1, 8), ("lenet5", 1, 8)]),
    st.lists(st.integers(1, 9), min_size=2, max_size=4, unique=True),
    st.floats(0, 1),
    st.sampled_from(PRECISIONS),
    st.integers(0, 2**32),
)
def test_all_ways_lead_to_the_same_bytes(
    network: tuple[str, int, int], counts: list[int], density: float, precision: str, seed: int
) -> None:
    """Read and written again, converted there and back, or brought up to date step by step: any bundle."""
    bundles = [made_bundle(count, *network, density, precision, seed) for count in sorted(counts)]
    for encoding, other in (("coded", "packed"), ("packed", "coded")):
        versions = [bundle.to_bytes(encoding) for bundle in bundles]
        for data in versions:
            assert Bundle.from_bytes(data).to_bytes(encoding) == data
            assert Bundle.from_bytes(Bundle.from_bytes(data).to_bytes(other)).to_bytes(encoding) == data
        held = versions[0]
        for old, new in pairwise(versions):
            held = apply_delta(held, make_delta(old, new))
            assert held == new


def test_a_changed_head_travels(learned: Learned, two: bytes) -> None:
    """That of an old task too, if it has changed since, and no other."""
    new = first_tasks(learned, 3)
    name = next(iter(new.tasks))
    better = replace(new.tasks[name], head={**new.tasks[name].head, "weight": new.tasks[name].head["weight"] + 1})
    data = replace(new, tasks={**new.tasks, name: better}).to_bytes("coded")
    delta = make_delta(two, data)
    assert apply_delta(two, delta) == data
    _, sections, _ = format.from_bytes(delta, format.DELTA)
    assert {key for key in sections if "head/weight" in key} == {"task/0/head/weight", "task/2/head/weight"}


def test_a_delta_fits_one_bundle_only(learned: Learned, two: bytes) -> None:
    """Another old bundle is refused; so are two that are not of one run, or not written alike."""
    later = first_tasks(learned, 3)
    three = later.to_bytes("coded")
    with pytest.raises(BundleError, match=r"^the delta belongs to the bundle with digest .*, but the old bundle has "):
        apply_delta(first_tasks(learned, 1).to_bytes("coded"), make_delta(two, three))
    bits = [mask.clone() for mask in later.masks]
    bits[0][:50] ^= True
    first = next(iter(later.tasks.values()))
    renamed = replace(first, classes=tuple(f"{name}!" for name in first.classes))
    shifted = replace(first, norm=first.norm + 1)
    other_masks, other_classes, other_norm = (
        replace(later, masks=bits),
        *(replace(later, tasks={**later.tasks, first.name: task}) for task in (renamed, shifted)),
    )
    refused = [
        (three, two, "does not go on from the old one"),
        (two, two, "does not go on from the old one"),
        (two, later.to_bytes("packed"), "differ in their encoding"),
        (two, first_tasks(learned, 3, "fp16").to_bytes("coded"), "differ in their precision"),
        (two, replace(later, stored=later.stored + 1).to_bytes("coded"), "weights of the old tasks are others"),
        (two, other_masks.to_bytes("coded"), "is another one in the new bundle"),
        (two, other_classes.to_bytes("coded"), "is another one in the new bundle"),
        (two, other_norm.to_bytes("coded"), "is another one in the new bundle"),
    ]
    for old, new, reason in refused:
        with pytest.raises(BundleError, match=reason):
            make_delta(old, new)


def test_scales_of_old_tasks_stay(learned: Learned) -> None:
    """With int8 they are part of old weights."""
    new = first_tasks(learned, 3, "int8")
    assert new.scale is not None
    with pytest.raises(BundleError, match="weights of the old tasks are others"):
        make_delta(
            first_tasks(learned, 2, "int8").to_bytes("coded"), replace(new, scale=new.scale * 2).to_bytes("coded")
        )


def test_a_zero_may_change_its_sign(learned: Learned) -> None:
    """What is another byte travels, though it is the same number."""
    signed = []
    for count, zero in ((2, 0.0), (3, -0.0)):
        bundle = first_tasks(learned, count)
        task = next(iter(bundle.tasks.values()))
        weight = task.head["weight"].clone()
        weight[0, 0] = zero
        tasks = {**bundle.tasks, task.name: replace(task, head={**task.head, "weight": weight})}
        signed.append(replace(bundle, tasks=tasks).to_bytes("coded"))
    assert apply_delta(signed[0], make_delta(*signed)) == signed[1]


def test_nothing_is_lost_to_a_wrong_name_or_a_bad_delta(files: tuple[Path, Path], tmp_path: Path) -> None:
    """A delta does not replace one of its bundles; one that gives no bundle leaves the old one in its place."""
    old, new = files
    before, path = old.read_bytes(), tmp_path / "d"
    assert "is one of the two bundles" in fails("delta", old, new, "--output", old)
    with pytest.raises(BundleError, match=r"n\.etcl is one of the two bundles"):
        write_delta(old, new, new)
    write_delta(old, new, path)
    manifest, sections = parts_of(path, format.DELTA)
    manifest["tasks"][2]["name"] = manifest["tasks"][1]["name"]
    path.write_bytes(format.to_bytes(manifest, sections, format.DELTA))
    assert "d does not describe a delta: two tasks have the same name" in fails("apply", old, path, "--output", old)
    assert old.read_bytes() == before
    write_delta(old, new, path)
    answer("apply", old, path, "--output", old)
    assert old.read_bytes() == new.read_bytes()


def test_a_bundle_that_is_not_written_as_today_has_no_delta(files: tuple[Path, Path], tmp_path: Path) -> None:
    """A reader takes it, but no delta gives its bytes: the message names the bundle, and nothing is left behind."""
    old, new = files
    manifest, sections = parts_of(new)
    norm = load_bundle(new).tasks["turned"].norm
    # As a writer keeps numbers where coding saves nothing.
    sections["task/2/norm"] = as_tensor(float_coding.HEAD.pack(len(norm), 0) + norm.numpy().tobytes())
    new.write_bytes(format.to_bytes(manifest, sections))
    assert torch.equal(load_bundle(new).tasks["turned"].norm, norm)
    with pytest.raises(BundleError, match=r"n\.etcl was written by another version of etcl_deploy"):
        write_delta(old, new, tmp_path / "d")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["n.etcl", "o.etcl"]


def test_a_damaged_delta_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Every flipped bit is found; and a whole one with the wrong content, too."""
    old, new = (path.read_bytes() for path in files)
    delta = make_delta(old, new)
    for place in range(0, len(delta), max(1, len(delta) // 60)):
        damaged = bytearray(delta)
        damaged[place] ^= 16
        with pytest.raises(BundleError):
            apply_delta(old, damaged)
    (tmp_path / "d").write_bytes(delta)
    manifest, whole = parts_of(tmp_path / "d", format.DELTA)
    norm = float_coding.decode(whole["task/2/norm"].numpy().data, torch.float32, range(10_000))
    wrong = [
        ({**manifest, "extra": 1}, whole, "exactly the keys"),
        ({**manifest, "tasks": manifest["tasks"][1:]}, whole, "does not begin with the tasks"),
        (manifest, {**whole, "weight": whole["weight"][:-4]}, "'weight': its words do not end"),
        (manifest, {**whole, "weight": as_section(torch.ones(7), coded=True)}, "'weight': it holds 7 numbers, not"),
        (manifest, {**whole, "more": torch.zeros(1)}, "belongs to nothing"),
        (manifest, {name: tensor for name, tensor in whole.items() if name != "owner"}, "is missing"),
        (manifest, {**whole, "owner": whole["owner"][:-4]}, "do not end|cut off|does not describe"),
        (manifest, {**whole, "task/2/norm": as_section(norm + 1, coded=True)}, "another bundle than it states"),
    ]
    for about, content, reason in wrong:
        with pytest.raises(BundleError, match=reason):
            apply_delta(old, format.to_bytes(about, content, format.DELTA))


def test_from_the_command_line(files: tuple[Path, Path], tmp_path: Path) -> None:
    """`etcl delta`, `etcl apply`, and what is said of files that are no bundle, or no delta."""
    old, new = files
    made = answer("delta", old, new, "--output", tmp_path / "d")
    assert made["bytes"] == (tmp_path / "d").stat().st_size < made["new"] == new.stat().st_size
    done = answer("apply", old, tmp_path / "d", "--output", tmp_path / "again.etcl")
    assert done["ok"] and done["digest"] == load_bundle(new).digest
    assert (tmp_path / "again.etcl").read_bytes() == new.read_bytes()
    assert "it is a delta" in fails("verify", tmp_path / "d")
    assert "it is a bundle" in fails("apply", old, new, "--output", tmp_path / "x.etcl")
    assert not (tmp_path / "x.etcl").exists()
