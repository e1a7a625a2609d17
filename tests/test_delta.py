"""An old bundle and a delta give the new bundle, byte for byte."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from conftest import Learned
from factories import made_bundle
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli import answer, fails

from etcl_deploy.bundle import float_coding as values
from etcl_deploy.bundle import format
from etcl_deploy.bundle.bundle import Bundle, load_bundle, to_bytes
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


def written(bundle: Bundle, path: Path, encoding: str = "coded") -> Path:
    path.write_bytes(to_bytes(bundle, encoding))
    return path


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("encoding", ["coded", "packed"])
def test_a_delta_gives_the_new_bundle(learned: Learned, tmp_path: Path, encoding: str, precision: str) -> None:
    """Of one task or several, one after another, in every encoding and precision; and it is smaller."""
    files = [written(first_tasks(learned, n, precision), tmp_path / f"{n}.etcl", encoding) for n in range(1, 6)]
    held = files[0].read_bytes()
    for old, new in pairwise(files):
        (tmp_path / "d").write_bytes(make_delta(old, new))
        (tmp_path / "held.etcl").write_bytes(held)
        held = apply_delta(tmp_path / "held.etcl", tmp_path / "d")
        assert held == new.read_bytes()
        assert (tmp_path / "d").stat().st_size < 0.6 * len(held)
    (tmp_path / "d").write_bytes(make_delta(files[0], files[-1]))
    assert apply_delta(files[0], tmp_path / "d") == held


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
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundles = [made_bundle(count, *network, density, precision, seed) for count in sorted(counts)]
        for encoding, other in (("coded", "packed"), ("packed", "coded")):
            files = [written(bundle, folder / f"{n}.etcl", encoding) for n, bundle in enumerate(bundles)]
            for path in files:
                converted = written(load_bundle(path), folder / "converted.etcl", other)
                assert to_bytes(load_bundle(path), encoding) == path.read_bytes()
                assert to_bytes(load_bundle(converted), encoding) == path.read_bytes()
            held = folder / "held.etcl"
            held.write_bytes(files[0].read_bytes())
            for old, new in pairwise(files):
                write_delta(old, new, folder / "d")
                held.write_bytes(apply_delta(held, folder / "d"))
                assert load_bundle(held).digest == load_bundle(new).digest and held.read_bytes() == new.read_bytes()


def test_a_changed_head_travels(learned: Learned, tmp_path: Path) -> None:
    """That of an old task too, if it has changed since, and no other."""
    old, new = first_tasks(learned, 2), first_tasks(learned, 3)
    name = next(iter(new.tasks))
    better = replace(new.tasks[name], head={**new.tasks[name].head, "weight": new.tasks[name].head["weight"] + 1})
    new = replace(new, tasks={**new.tasks, name: better})
    files = written(old, tmp_path / "old.etcl"), written(new, tmp_path / "new.etcl")
    (tmp_path / "d").write_bytes(make_delta(*files))
    assert apply_delta(files[0], tmp_path / "d") == files[1].read_bytes()
    _, sections, _ = format.read(tmp_path / "d", format.DELTA)
    assert {key for key in sections if "head/weight" in key} == {"task/0/head/weight", "task/2/head/weight"}


def test_a_delta_fits_one_bundle_only(learned: Learned, tmp_path: Path) -> None:
    """Another old bundle is refused; so are two that are not of one run, or not written alike."""
    two, three = written(first_tasks(learned, 2), tmp_path / "2.etcl"), written(first_tasks(learned, 3), tmp_path / "3")
    (tmp_path / "d").write_bytes(make_delta(two, three))
    one = written(first_tasks(learned, 1), tmp_path / "1.etcl")
    with pytest.raises(BundleError, match="belongs to the bundle with digest"):
        apply_delta(one, tmp_path / "d")
    with pytest.raises(BundleError, match="does not go on from the old one"):
        make_delta(three, two)
    with pytest.raises(BundleError, match="does not go on from the old one"):
        make_delta(two, two)
    with pytest.raises(BundleError, match="differ in their encoding"):
        make_delta(two, written(first_tasks(learned, 3), tmp_path / "p.etcl", "packed"))
    with pytest.raises(BundleError, match="differ in their precision"):
        make_delta(two, written(first_tasks(learned, 3, "fp16"), tmp_path / "h.etcl"))
    moved = first_tasks(learned, 3)
    with pytest.raises(BundleError, match="weights of the old tasks are others"):
        make_delta(two, written(replace(moved, stored=moved.stored + 1), tmp_path / "m.etcl"))
    bits = [mask.clone() for mask in moved.masks]
    bits[0][:50] ^= True
    first = next(iter(moved.tasks.values()))
    renamed = replace(first, classes=tuple(f"{name}!" for name in first.classes))
    shifted = replace(first, norm=first.norm + 1)
    others = [replace(moved, tasks={**moved.tasks, first.name: task}) for task in (renamed, shifted)]
    for other in (replace(moved, masks=bits), *others):
        with pytest.raises(BundleError, match="is another one in the new bundle"):
            make_delta(two, written(other, tmp_path / "n.etcl"))


def test_scales_of_old_tasks_stay(learned: Learned, tmp_path: Path) -> None:
    """With int8 they are part of old weights."""
    new = first_tasks(learned, 3, "int8")
    assert new.scale is not None
    files = [
        written(first_tasks(learned, 2, "int8"), tmp_path / "2.etcl"),
        written(replace(new, scale=new.scale * 2), tmp_path / "3.etcl"),
    ]
    with pytest.raises(BundleError, match="weights of the old tasks are others"):
        make_delta(*files)


def test_a_zero_may_change_its_sign(learned: Learned, tmp_path: Path) -> None:
    """What is another byte travels, though it is the same number."""
    signed = []
    for count, zero in ((2, 0.0), (3, -0.0)):
        bundle = first_tasks(learned, count)
        task = next(iter(bundle.tasks.values()))
        weight = task.head["weight"].clone()
        weight[0, 0] = zero
        tasks = {**bundle.tasks, task.name: replace(task, head={**task.head, "weight": weight})}
        signed.append(written(replace(bundle, tasks=tasks), tmp_path / f"{count}.etcl"))
    write_delta(*signed, tmp_path / "d")
    assert apply_delta(signed[0], tmp_path / "d") == signed[1].read_bytes()


def test_nothing_is_lost_to_a_wrong_name_or_a_bad_delta(learned: Learned, tmp_path: Path) -> None:
    """A delta does not replace one of its bundles; one that gives no bundle leaves the old one in its place."""
    old, new = (
        written(first_tasks(learned, 2), tmp_path / "o.etcl"),
        written(first_tasks(learned, 3), tmp_path / "n.etcl"),
    )
    before = old.read_bytes()
    assert "is one of the two bundles" in fails("delta", old, new, "--output", old)
    with pytest.raises(BundleError, match=r"n\.etcl is one of the two bundles"):
        write_delta(old, new, new)
    path = tmp_path / "d"
    path.write_bytes(make_delta(old, new))
    manifest, sections, _ = format.read(path, format.DELTA)
    manifest = {key: value for key, value in json.loads(json.dumps(manifest)).items() if key != "sections"}
    whole = {name: tensor.clone() for name, tensor in sections.items()}
    manifest["tasks"][0]["classes"].append("more")
    path.write_bytes(format.to_bytes(manifest, whole, format.DELTA))
    assert "does not begin with the tasks of the old bundle" in fails("apply", old, path, "--output", old)
    assert old.read_bytes() == before
    manifest["tasks"][0]["classes"].pop()
    manifest["tasks"][2]["name"] = manifest["tasks"][1]["name"]
    path.write_bytes(format.to_bytes(manifest, whole, format.DELTA))
    assert "two tasks have the same name" in fails("apply", old, path, "--output", old)
    write_delta(old, new, path)
    answer("apply", old, path, "--output", old)
    assert old.read_bytes() == new.read_bytes()


def test_a_bundle_that_is_not_written_as_today_has_no_delta(learned: Learned, tmp_path: Path) -> None:
    """A reader takes it, but no delta gives its bytes: the message names the bundle, and nothing is left behind."""
    old, new = (
        written(first_tasks(learned, 2), tmp_path / "o.etcl"),
        written(first_tasks(learned, 3), tmp_path / "n.etcl"),
    )
    manifest, sections, _ = format.read(new)
    norm = load_bundle(new).tasks["turned"].norm
    plain = values.HEAD.pack(len(norm), 0) + norm.numpy().tobytes()  # what a writer does where coding saves nothing
    others = {name: tensor.clone() for name, tensor in sections.items()} | {"task/2/norm": as_tensor(plain)}
    new.write_bytes(format.to_bytes({key: value for key, value in manifest.items() if key != "sections"}, others))
    assert torch.equal(load_bundle(new).tasks["turned"].norm, norm)
    with pytest.raises(BundleError, match=r"n\.etcl was written by another version of etcl_deploy"):
        write_delta(old, new, tmp_path / "d")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["n.etcl", "o.etcl"]


def test_a_damaged_delta_is_refused(learned: Learned, tmp_path: Path) -> None:
    """Every flipped bit is found; and a whole one with the wrong content, too."""
    old, new = (
        written(first_tasks(learned, 2), tmp_path / "o.etcl"),
        written(first_tasks(learned, 3), tmp_path / "n.etcl"),
    )
    good, path = make_delta(old, new), tmp_path / "d"
    for place in range(0, len(good), max(1, len(good) // 60)):
        damaged = bytearray(good)
        damaged[place] ^= 16
        path.write_bytes(damaged)
        with pytest.raises(BundleError):
            apply_delta(old, path)
    path.write_bytes(good)
    manifest, sections, _ = format.read(path, format.DELTA)
    manifest = {key: value for key, value in json.loads(json.dumps(manifest)).items() if key != "sections"}
    whole = {name: tensor.clone() for name, tensor in sections.items()}
    norm = values.decode(whole["task/2/norm"].numpy().data, torch.float32, range(10_000))
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
        path.write_bytes(format.to_bytes(about, content, format.DELTA))
        with pytest.raises(BundleError, match=reason):
            apply_delta(old, path)


def test_from_the_command_line(learned: Learned, tmp_path: Path) -> None:
    """`etcl delta`, `etcl apply`, and what is said of files that are no bundle, or no delta."""
    old, new = (
        written(first_tasks(learned, 4), tmp_path / "o.etcl"),
        written(first_tasks(learned, 5), tmp_path / "n.etcl"),
    )
    made = answer("delta", old, new, "--output", tmp_path / "d")
    assert made["bytes"] == (tmp_path / "d").stat().st_size < made["new"] == new.stat().st_size
    done = answer("apply", old, tmp_path / "d", "--output", tmp_path / "again.etcl")
    assert done["ok"] and done["digest"] == load_bundle(new).digest
    assert (tmp_path / "again.etcl").read_bytes() == new.read_bytes()
    assert "it is a delta" in fails("verify", tmp_path / "d")
    assert "it is a bundle" in fails("apply", old, new, "--output", tmp_path / "x.etcl")
    assert not (tmp_path / "x.etcl").exists()
