from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from conftest import Learned
from factories import made_bundle, parts_of
from safetensors.torch import save as save_tensors
from safetensors.torch import save_file
from test_cli import fails
from torch import Tensor

from etcl_deploy.bundle import format
from etcl_deploy.bundle.bundle import Bundle, load_bundle, reload_bundle, save
from etcl_deploy.bundle.layout import split
from etcl_deploy.bundle.sections import as_section, task_entries
from etcl_deploy.bundle.summary import summarize
from etcl_deploy.errors import BundleError, UnknownTaskError
from etcl_deploy.runs.store import load_run
from etcl_deploy.runs.to_bundle import bundle_run


def put(sections: dict[str, Tensor], name: str, numbers: Tensor) -> None:
    """Other numbers in a section, kept as those before."""
    sections[name] = as_section(numbers, coded=sections[name].dtype == torch.uint8)


def stated(text: str) -> dict[str, str]:
    """The metadata of a file with this manifest, with the right digest."""
    return {"etcl": f"1 {format.digest_of(text)}\n{text}"}


def test_a_bundle_holds_what_was_learned(learned: Learned) -> None:
    """Masks, norms, heads, classes, accuracy, and of the backbone what some task claims."""
    bundle, network = learned.bundle, learned.run.network
    assert list(bundle.tasks) == list(network.finished)
    weights = split(bundle.weights, bundle.layout.weights)
    for name, layer in network.masked_layers.items():
        assert torch.equal(weights[name], torch.where(layer.claimed, layer.weight.detach(), 0))
    for position, (name, task) in enumerate(bundle.tasks.items()):
        state = network.finished[name]
        assert task.classes == state.classes
        assert task.accuracy == task.learned == learned.run.matrix[-1][position]
        masks = split(bundle.mask(name), bundle.layout.weights)
        assert all(torch.equal(masks[step], mask) for step, mask in state.masks.items())
        assert all(torch.equal(task.head_values()[key], state.head[key]) for key in state.head)


def test_same_run_same_bytes(learned: Learned, tmp_path: Path) -> None:
    """Bundling again, also from the saved run, gives the same file."""
    stored = load_run(learned.directory)
    bundle_run(stored, tmp_path / "again.etcl")
    assert (tmp_path / "again.etcl").read_bytes() == learned.path.read_bytes()


def test_every_kind_of_byte_is_guarded(bundle_file: Path) -> None:
    """A flipped bit anywhere is found before use: header, manifest, digests, every section."""
    data = bundle_file.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    chance = random.Random(0)
    positions = [*range(8), *chance.sample(range(8, header), 250), *chance.sample(range(header, len(data)), 250)]
    for position in positions:
        damaged = bytearray(data)
        damaged[position] ^= 1 << chance.randrange(8)
        bundle_file.write_bytes(damaged)
        with pytest.raises(BundleError):
            load_bundle(bundle_file)


def test_a_file_that_is_too_short_or_too_long_is_refused(bundle_file: Path) -> None:
    """Cut anywhere, or with a byte more."""
    data = bundle_file.read_bytes()
    for other in (*(data[: int(share * len(data))] for share in (0.0001, 0.001, 0.5, 0.9, 0.999)), data + b"\0"):
        bundle_file.write_bytes(other)
        with pytest.raises(BundleError, match=r"copy\.etcl is truncated, damaged or not a bundle"):
            load_bundle(bundle_file)


def test_bytes_are_enough(learned: Learned) -> None:
    """No file is needed, either way; an error then names no path."""
    data = learned.path.read_bytes()
    bundle = Bundle.from_bytes(data)
    assert bundle.to_bytes("coded") == data
    assert Bundle.from_bytes(bytearray(data)).digest == Bundle.from_bytes(memoryview(data)).digest == bundle.digest
    with pytest.raises(BundleError, match=r"^the bundle is empty; a bundle has at least a header"):
        Bundle.from_bytes(b"")


def test_empty_missing_directory_and_strangers_are_refused(tmp_path: Path) -> None:
    """Each with its own reason."""
    empty, other, tensors = tmp_path / "empty.etcl", tmp_path / "other.etcl", tmp_path / "tensors.etcl"
    empty.touch()
    other.write_bytes(b"PK\3\4" + bytes(5000))
    save_file({"x": torch.zeros(3)}, tensors)
    reasons = {
        empty: "is empty",
        other: "truncated, damaged or not a bundle",
        tensors: "has no manifest",
        tmp_path: "is a directory",
        tmp_path / "nothing.etcl": "does not exist",
    }
    for path, reason in reasons.items():
        with pytest.raises(BundleError, match=reason):
            load_bundle(path)


def test_a_later_format_is_refused_by_number(tmp_path: Path) -> None:
    """The message says which format it is and which one is read."""
    save_file({"x": torch.zeros(3)}, tmp_path / "x", {"etcl": "7 and something nobody knows yet"})
    with pytest.raises(BundleError, match="has format 7, written by a later etcl_deploy; this one reads format 1"):
        load_bundle(tmp_path / "x")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m, s: m.pop("tasks"), "exactly the keys backbone, .*, tasks"),
        (lambda m, s: m["tasks"].pop(), "belongs to nothing"),
        (lambda m, s: m["tasks"][0].update(name=m["tasks"][1]["name"]), "same name"),
        (lambda m, s: m["tasks"][0].update(classes=["a", "a"]), "different classes"),
        (lambda m, s: m["tasks"][0].update(classes=["a", "b"]), r"should be F32|holds 2560 numbers, not 512"),
        (lambda m, s: m["tasks"][0].update(classes=[str(n) for n in range(100_001)]), "1 to 100000 different classes"),
        (lambda m, s: m["backbone"].update(code="x"), "exactly the keys name, plan"),
        (lambda m, s: m["backbone"].update(name=""), "the backbone needs a name"),
        (lambda m, s: m["backbone"].update(name=7), "the backbone needs a name"),
        (lambda m, s: m["backbone"]["plan"].update(steps=[["f", "flatten", ["image"], {}]]), "network has no weights"),
        (lambda m, s: m["backbone"]["plan"].update(code="x"), "a plan has input, steps and head_bias"),
        (lambda m, s: m["preprocessing"].pop("mean"), "exactly the keys"),
        (lambda m, s: m.update(run=[]), "no object"),
        (lambda m, s: m.update(encoding="zip"), "encoding 'zip' is unknown"),
        (lambda m, s: m.update(precision="fp8"), "precision 'fp8' is unknown"),
        (lambda m, s: m.update(precision="fp16"), "should be F16|'backbone/weight': it is cut off|too long"),
        (lambda m, s: m["tasks"][0].update(learned=101.0), "learned 101.0"),
        (lambda m, s: m["preprocessing"].update(height=32), "do not fit"),
        (lambda m, s: m["preprocessing"].update(std=0.0), "std"),
        (lambda m, s: m["preprocessing"].update(std=1e-320), "std"),
        (lambda m, s: m["preprocessing"].update(mean=10**400), "mean"),
        (lambda m, s: m["preprocessing"].update(channels=True), "channels"),
        (lambda m, s: m.update(extra=1), "exactly the keys"),
        (lambda m, s: m["tasks"][0].update(extra=1), "exactly the keys"),
        (lambda m, s: m["tasks"][0].update(density=7.0), "density"),
        (lambda m, s: m["tasks"][0].update(density="0.4"), "density"),
        (lambda m, s: m["tasks"][0].update(accuracy=10**400), "accuracy"),
        (lambda m, s: m["tasks"][0].update(classes="abcdefghij"), "list of class names"),
        (lambda m, s: m["tasks"][0].update(name="\ud800"), "surrogates not allowed"),
        (lambda m, s: (m.update(tasks=[]), [s.pop(k) for k in list(s) if k.startswith("task/")]), "holds 0 tasks"),
        (lambda m, s: put(s, "task/0/norm", torch.full((1200,), torch.nan)), "not finite"),
        (lambda m, s: put(s, "task/0/head/weight", torch.full((10, 256), torch.inf)), "not finite"),
        (lambda m, s: m["preprocessing"].update(code="x"), "exactly the keys"),
        (lambda m, s: m["backbone"]["plan"]["steps"][0].__setitem__(1, "system"), "unknown operation"),
        (lambda m, s: s.pop("task/0/head/weight"), "is missing"),
        (lambda m, s: s.update(extra=torch.zeros(1)), "'extra' belongs to nothing"),
        (lambda m, s: s.update(extra=torch.zeros(1, dtype=torch.float64)), "'extra' is not the one its manifest"),
        (lambda m, s: m.update(tasks="abc"), "holds no list of tasks"),
        (lambda m, s: put(s, "task/0/head/weight", torch.zeros(10, 3)), "should be F32|holds 30 numbers, not 2560"),
        (lambda m, s: put(s, "backbone/weight", torch.zeros(999_999)), "should be F32|holds 999999 numbers, not"),
    ],
)
def test_a_well_formed_file_with_the_wrong_meaning_is_refused(bundle_file: Path, change, reason: str) -> None:
    """Digests prove a file is whole, not that it is a bundle: that is checked too."""
    manifest, sections = parts_of(bundle_file)
    change(manifest, sections)
    bundle_file.write_bytes(format.to_bytes(manifest, sections))
    with pytest.raises(BundleError, match=reason):
        load_bundle(bundle_file)


def test_a_set_padding_bit_is_refused(tmp_path: Path) -> None:
    """Bits beyond the last weight are zero, or the file is not read."""
    path, bundle = tmp_path / "odd.etcl", made_bundle(2, width=3, side=3)
    assert bundle.layout.weight_count % 8
    path.write_bytes(bundle.to_bytes("packed"))
    manifest, sections = parts_of(path)
    sections["task/0/mask"][-1] |= 128
    path.write_bytes(format.to_bytes(manifest, sections))
    with pytest.raises(BundleError, match="padding bit"):
        load_bundle(path)


LISTED = "its sections are not the ones its manifest lists"
DESCRIBED = "is not the one its manifest describes"


@pytest.mark.parametrize(
    ("listed", "reason"),
    [
        *(([], LISTED), ({}, LISTED), ({"y": {}}, LISTED)),
        *(({"x": entry}, DESCRIBED) for entry in (None, [], 3, {}, {"dtype": "F32"})),
        *(({"x": {"dtype": "F32", "shape": shape, "sha256": ""}}, DESCRIBED) for shape in (3, [-3], [True], ["3"])),
        *(({"x": {"dtype": "F32", "shape": shape, "sha256": ""}}, DESCRIBED) for shape in ([2**63, 0], [2**62] * 4)),
        *(({"x": {"dtype": dtype, "shape": [3], "sha256": ""}}, DESCRIBED) for dtype in ("F6_E2M3", [], None)),
        ({"x": {"dtype": "F32", "shape": [3], "sha256": ""}}, DESCRIBED),
        ({"x": {"dtype": "F32", "shape": [2], "sha256": ""}}, "is truncated, damaged or not a bundle"),
        ({"x": {"dtype": "F32", "shape": [3, 1], "sha256": ""}}, "has a header that is not what format 1 says"),
    ],
)
def test_a_manifest_lists_exactly_the_sections_there_are(tmp_path: Path, listed: object, reason: str) -> None:
    """None is left out, and each is described as it is, whatever stands in the place of the list."""
    text = json.dumps({"sections": listed}, sort_keys=True, separators=(",", ":"))
    save_file({"x": torch.zeros(3)}, tmp_path / "x", stated(text))
    with pytest.raises(BundleError, match=reason):
        load_bundle(tmp_path / "x")


def test_files_are_told_apart(bundle_file: Path) -> None:
    """By what they say of themselves; what is neither a bundle nor a delta is nothing."""
    tensors = {"x": torch.zeros(1)}
    files = [bundle_file.read_bytes(), save_tensors(tensors, {"etcl-delta": ""}), save_tensors(tensors), b"hello", b""]
    assert [format.kind_of(data) for data in files] == ["bundle", "delta", None, None, None]


def test_unknown_tasks_are_named_with_the_known_ones(learned: Learned) -> None:
    """A typo is answered with what there is."""
    with pytest.raises(UnknownTaskError, match=r"unknown task 'party'; this bundle holds: upright-a, .*parity"):
        learned.bundle.task("party")


def test_the_sizes_add_up(bundle_file: Path) -> None:
    """Bytes by part are all the bytes; a packed mask is one bit a weight, a coded one less."""
    bundle = load_bundle(bundle_file)
    info = summarize(bundle, bundle_file)
    parts = info["bytes"]
    assert parts["total"] == bundle_file.stat().st_size == sum(v for k, v in parts.items() if k != "total")
    shared = bundle.sizes.get("backbone/owner", 0)
    assert sum(task["bytes"]["mask"] for task in info["tasks"]) + shared == parts["masks"]
    assert sum(task["mask_bits_per_weight"] for task in info["tasks"]) * info["weights"] / 8 == pytest.approx(
        parts["masks"]
    )
    bits = [task["mask_bits_per_weight"] for task in info["tasks"]]
    assert all(1 <= count < 1.01 for count in bits) if bundle.encoding == "packed" else sum(bits) < 0.8 * len(bits)


def test_there_is_a_limit_to_tasks() -> None:
    """As many as a reference can name."""
    with pytest.raises(ValueError, match="it holds 65535 tasks; 1 to 65534 are right"):
        task_entries([{}] * 65_535)


def test_metadata_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """JSON can say half of a surrogate pair, UTF-8 cannot."""
    header = json.dumps({"__metadata__": {"etcl": "1 x\n\ud800"}}).encode()
    (tmp_path / "x.etcl").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(BundleError, match="surrogates not allowed"):
        load_bundle(tmp_path / "x.etcl")


def test_a_header_has_one_form(bundle_file: Path) -> None:
    """Nothing in it can be changed without a word, though no digest covers it: not even what no reader looks at."""
    data = bundle_file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    name = next(name for name in header if name != "__metadata__")
    load_bundle(bundle_file)
    others = [
        json.dumps(header).encode(),
        json.dumps(dict(reversed(header.items())), separators=(",", ":")).encode(),
        json.dumps({**header, name: {**header[name], "more": 1}}, separators=(",", ":")).encode(),
        data[8:end] + bytes(b" " * 8),
    ]
    for other in others:
        bundle_file.write_bytes(len(other).to_bytes(8, "little") + other + data[end:])
        with pytest.raises(BundleError, match=r"not what format 1 says|damaged"):
            load_bundle(bundle_file)


@pytest.mark.parametrize("text", ['{"sections": {}}', '{"z":1,"sections":{}}', "[]", "{", "[" * 100_000])
def test_a_manifest_has_one_form(tmp_path: Path, text: str) -> None:
    """Keys in another order, or spaces, are refused, though the digest is right; so is what is no JSON object."""
    save_file({}, tmp_path / "x", stated(text))
    with pytest.raises(BundleError, match="a manifest that is not what format 1 says"):
        load_bundle(tmp_path / "x")


def test_a_reader_keeps_to_its_limits(learned: Learned, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would take much memory or time is refused before anything is decoded."""
    with monkeypatch.context() as smaller:
        smaller.setattr("etcl_deploy.bundle.bundle.FEW", 100)
        smaller.setattr("etcl_deploy.bundle.bundle.SPARSEST", 0)
        with pytest.raises(BundleError, match="too few for coded masks"):
            load_bundle(learned.path)
    monkeypatch.setattr("etcl_deploy.bundle.bundle.LONGEST", 100)
    with pytest.raises(BundleError, match="too many for coded masks"):
        load_bundle(learned.path)


def test_a_writer_keeps_to_the_limits_of_readers(learned: Learned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Coded masks that no reader would take are not written; packed ones hold as much."""
    bundle = learned.bundle
    monkeypatch.setattr("etcl_deploy.bundle.bundle.LONGEST", 100)
    with pytest.raises(BundleError, match=r"^5 tasks of \d+ weights are too many for coded masks; packed ones hold"):
        bundle.to_bytes("coded")
    assert bundle.to_bytes("packed")


def test_weights_that_are_not_those_owned_are_found(learned: Learned) -> None:
    """Masks say how many weights a coded bundle has; loading looks at neither, using and `decode_all` at both."""
    bundle = learned.bundle
    bundle.decode_all()
    manifest, sections = parts_of(learned.path)
    put(sections, "backbone/weight", bundle.stored[:-1])
    wrong = Bundle.from_bytes(format.to_bytes(manifest, sections))
    with pytest.raises(BundleError, match=f"it has {len(bundle.stored) - 1} weights, but {len(bundle.stored)} owned"):
        wrong.decode_all()


@pytest.mark.parametrize(("section", "place"), [("backbone/owner", 3), ("backbone/owner", -1), ("task/1/mask", 2)])
def test_what_cannot_be_decoded_is_not_verified(learned: Learned, tmp_path: Path, section: str, place: int) -> None:
    """Levels and words that mean nothing, with right digests: `etcl verify` decodes everything."""
    path = tmp_path / "x.etcl"
    manifest, sections = parts_of(learned.path)
    sections[section][place] ^= 0x55
    path.write_bytes(format.to_bytes(manifest, sections))
    with pytest.raises(BundleError, match=f"^the bundle is damaged: section '{section}': "):
        load_bundle(path).decode_all()
    assert f"the bundle is damaged: section '{section}'" in fails("verify", path)


def test_what_cannot_be_read_again_is_not_saved(learned: Learned, tmp_path: Path) -> None:
    """The old file stays."""
    path = tmp_path / "x.etcl"
    path.write_bytes(b"old")
    with pytest.raises(BundleError, match=r"x\.etcl is truncated"):
        save(path, learned.path.read_bytes()[:-1])
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_bundle_loaded_again_is_the_one_that_was_loaded(bundle_file: Path) -> None:
    """Another in its place is refused: a server would mix the two."""
    digest = load_bundle(bundle_file).digest
    assert reload_bundle(bundle_file, digest).digest == digest
    bundle_file.write_bytes(made_bundle(2).to_bytes("packed"))
    with pytest.raises(BundleError, match=r"copy\.etcl was replaced while it was being read"):
        reload_bundle(bundle_file, digest)
