from __future__ import annotations

import gzip
import io
import json
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from etcl_deploy.data import cifar, idx, leaf, manifest, npz, svhn
from etcl_deploy.errors import DataError

CHANCE = np.random.default_rng(0)


def write_idx(path: Path, values: np.ndarray) -> None:
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    data = header + values.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_idx_files_are_read_gzipped_or_not(tmp_path: Path, ending: str) -> None:
    """Pixels and labels as they were written; EMNIST's are turned."""
    pixels, labels = CHANCE.integers(0, 256, (5, 4, 3)), np.array([3, 1, 4, 1, 5])
    images, numbers = tmp_path / f"images{ending}", tmp_path / f"labels{ending}"
    write_idx(images, pixels)
    write_idx(numbers, labels)
    part = idx.read_idx_part(images, numbers)
    assert np.array_equal(part.images, pixels) and np.array_equal(part.labels, labels)
    turned = idx.read_idx_part(images, numbers, turned=True)
    assert np.array_equal(turned.images, pixels.transpose(0, 2, 1))


def test_an_idx_file_that_is_wrong_is_refused_by_name(tmp_path: Path) -> None:
    """Cut off, too long, of another kind, or stating more than anybody has."""
    path = tmp_path / "images"
    write_idx(path, np.zeros((5, 4, 3)))
    whole = path.read_bytes()
    for wrong, words in (
        (whole[:-1], "states 60 bytes of values and holds 59"),
        (whole + b"x", "holds more"),
        (whole[:6], "damaged or cut off"),
        (b"", "it begins , not 00 00 08 03"),
        (b"\0\0\x0d\3" + whole[4:], "it begins 00 00 0d 03, not 00 00 08 03"),
        (whole[:4] + struct.pack(">3I", 1 << 31, 1 << 20, 28), "at most"),
    ):
        path.write_bytes(wrong)
        with pytest.raises(DataError, match=words) as caught:
            idx.read_idx(path, 3)
        assert str(path) in str(caught.value)
    packed = tmp_path / "images.gz"
    packed.write_bytes(gzip.compress(whole)[:-12])
    with pytest.raises(DataError, match=r"images.gz is damaged or cut off"):
        idx.read_idx(packed, 3)


def write_cifar(folder: Path, items: int = 20) -> np.ndarray:
    """CIFAR-100's binary version, of 20 classes in 2 superclasses."""
    folder.mkdir(exist_ok=True)
    fine = np.arange(items, dtype=np.uint8) % 20
    records = np.concatenate([(fine % 2)[:, None], fine[:, None], CHANCE.integers(0, 256, (items, 3072))], 1)
    for name in ("train.bin", "test.bin"):
        (folder / name).write_bytes(records.astype(np.uint8).tobytes())
    (folder / "fine_label_names.txt").write_text("\n".join(f"class{n}" for n in range(20)) + "\n\n")
    (folder / "coarse_label_names.txt").write_text("even\nodd\n")
    return records.astype(np.uint8)


def test_cifar_is_read_from_its_binary_version(tmp_path: Path) -> None:
    """Planes of colour become pixels; classes know their superclass."""
    records = write_cifar(tmp_path / "c")
    source = cifar.read_cifar100(tmp_path / "c")
    assert source.classes[3] == "class3" and source.groups is not None and source.groups[:2] == ("even", "odd")
    assert np.asarray(source.train.images).shape == (20, 32, 32, 3)
    assert np.array_equal(np.asarray(source.train.images)[7, :, :, 2].ravel(), records[7, 2 + 2048 :])
    for number in range(1, 6):
        (tmp_path / f"data_batch_{number}.bin").write_bytes(bytes([number]) + bytes(3072))
    (tmp_path / "test_batch.bin").write_bytes(bytes([9]) + bytes(3072))
    (tmp_path / "batches.meta.txt").write_text("\n".join("abcdefghij"))
    assert cifar.read_cifar10(tmp_path).train.labels.tolist() == [1, 2, 3, 4, 5]


def test_cifar_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    """By the file."""
    write_cifar(tmp_path / "c")
    (tmp_path / "c" / "test.bin").write_bytes(b"x" * 3073)
    with pytest.raises(DataError, match=r"test\.bin is damaged or cut off: 3073 bytes"):
        cifar.read_cifar100(tmp_path / "c")


def write_leaf(folder: Path, users: dict[str, tuple[list[object], list[object]]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data = {name: {"x": x, "y": y} for name, (x, y) in users.items()}
    record = {"users": list(users), "num_samples": [len(y) for _, y in users.values()], "user_data": data}
    (folder / "all_data_0.json").write_text(json.dumps(record))


def test_leaf_knows_whose_each_item_is(tmp_path: Path) -> None:
    """Grey values from 0 to 1 for FEMNIST, names of files for CelebA."""
    grey = [[n / 255] * 784 for n in range(3)]
    for part in ("train", "test"):
        write_leaf(tmp_path / part, {"ann": (list(grey[:2]), [0, 1]), "bob": ([grey[2]], [1])})
    source = leaf.read_leaf(tmp_path, "f", ("a", "b"))
    assert source.of_owner("ann").train.labels.tolist() == [0, 1]
    assert np.asarray(source.of_owner("bob").test.images)[0, 5, 5] == 2
    for part in ("train", "test"):
        write_leaf(tmp_path / part, {"ann": (["1.jpg"], [1])})
    faces = leaf.read_leaf(tmp_path, "f", ("a", "b"), tmp_path / "images")
    assert faces.train.images == [tmp_path / "images" / "1.jpg"]


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        ([[0.5] * 783], [0], "not 784 values from 0 to 1"),
        ([[0.5] * 783 + [float("nan")]], [0], "not 784 values from 0 to 1"),
        ([[2.0] * 784], [0], "not 784 values from 0 to 1"),
        ([["a"] * 784], [0], "not 784 values from 0 to 1"),
        ([[10**400] * 784], [0], "not 784 values from 0 to 1"),
        ([[0.5] * 784], [10**30], "no whole number"),
        ([[0.5] * 784], [1e300], "no whole number"),
        ([[0.5] * 784], [0, 1], "as many labels"),
        ([[0.5] * 784], ["x"], "no whole number"),
        ([[0.5] * 784], [7], "has the training label 7, but only 2 classes"),
    ],
)
def test_wrong_leaf_is_refused(tmp_path: Path, x: list[object], y: list[object], words: str) -> None:
    """By file and user."""
    write_leaf(tmp_path / "train", {"ann": (x, y)})
    write_leaf(tmp_path / "test", {})
    with pytest.raises(DataError, match=words):
        leaf.read_leaf(tmp_path, "f", ("a", "b"))


def test_leaf_reads_no_file_outside_its_folder(tmp_path: Path) -> None:
    """The name of an image is a name, not a path; JSON that is none is refused."""
    write_leaf(tmp_path / "train", {"ann": (["../../etc/passwd"], [0])})
    with pytest.raises(DataError, match="the name of a file is right"):
        leaf.read_leaf(tmp_path, "f", ("a", "b"), tmp_path)
    (tmp_path / "train" / "all_data_0.json").write_text('{"users": ["a"], "user_data": {}}')
    with pytest.raises(DataError, match="not LEAF's JSON: KeyError"):
        leaf.read_leaf(tmp_path, "f", ("a", "b"))


def test_npz_files_are_read_channels_first_or_last(tmp_path: Path) -> None:
    """With names of classes where they are given."""
    pixels = CHANCE.integers(0, 256, (4, 3, 8, 8)).astype(np.uint8)
    np.savez(tmp_path / "a.npz", train_x=pixels, train_y=[0, 1, 1, 0], classes=["no", "yes"])
    source = npz.read_npz(tmp_path / "a.npz", "a")
    assert source.classes == ("no", "yes") and len(source.test) == 0
    assert np.array_equal(np.asarray(source.train.images), pixels.transpose(0, 2, 3, 1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"test_x": np.zeros((2, 8, 8), np.uint8)}, "has test_x, but no test_y; both or neither"),
        ({"test_y": np.zeros(2, int)}, "has test_y, but no test_x; both or neither"),
        ({"train_owners": np.array(["a"] * 4)}, "has train_owners, but no test_owners"),
        ({"classes": np.array([b"no", b"yes"])}, "classes must be names in a row"),
        ({"classes": np.array("no")}, "classes must be names in a row"),
        ({"classes": np.array(2)}, "classes must be names in a row"),
        ({"train_y": np.array([0, 1, 1, 10**9])}, "there is a label 1000000000; at most 100000 classes"),
        ({"train_y": np.array([0, 1, 1, -1])}, "has the training label -1"),
        ({"train_x": np.zeros((4, 8, 8))}, r"images are float64 \[4, 8, 8\]; uint8"),
        ({"train_x": np.array([{}], dtype=object)}, r"train_x\.npy holds Python objects, which are never unpickled"),
        ({"train_y": None}, "has no array 'train_y'; it holds: train_x"),
        ({"train_x": np.zeros((4, 8, 8, 4), np.uint8)}, r"images are uint8 \[4, 8, 8, 4\]"),
        ({"train_x": np.zeros((4, 0, 8), np.uint8)}, r"images are uint8 \[4, 0, 8\]"),
    ],
)
def test_a_wrong_npz_is_refused(tmp_path: Path, changes: dict[str, np.ndarray | None], words: str) -> None:
    """By the file and the array."""
    arrays = {"train_x": np.zeros((4, 8, 8), np.uint8), "train_y": np.array([0, 1, 1, 0])}
    arrays = {name: values for name, values in {**arrays, **changes}.items() if values is not None}
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=words) as caught:
        npz.read_npz(tmp_path / "a.npz", "a")
    assert str(tmp_path / "a.npz") in str(caught.value)


def test_an_npz_that_promises_more_than_it_has_takes_no_memory(tmp_path: Path) -> None:
    """Its header is read before anything else; whatever else is wrong with it is a clear refusal."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (1 << 40, 28, 28)})
    for content in (header.getvalue(), header.getvalue().replace(b"1099511627776", b"3            "), b"", b"text"):
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
            archive.writestr("train_x.npy", content)
        with pytest.raises(DataError, match=r"a\.npz"):
            npz.read_npz(tmp_path / "a.npz", "a")


def test_svhn_is_read_from_its_matlab_files(tmp_path: Path) -> None:
    """A zero is stored as ten; a damaged file is refused by name."""
    from scipy.io import savemat

    pixels = CHANCE.integers(0, 256, (32, 32, 3, 4)).astype(np.uint8)
    for part in ("train", "test"):
        savemat(tmp_path / f"{part}_32x32.mat", {"X": pixels, "y": np.array([[10], [1], [2], [9]], dtype=np.uint8)})
    source = svhn.read_svhn(tmp_path)
    assert source.train.labels.tolist() == [0, 1, 2, 9]
    assert np.array_equal(np.asarray(source.train.images)[2], pixels[:, :, :, 2])
    for wrong in (57, -3, np.nan, 1.5):
        savemat(tmp_path / "test_32x32.mat", {"X": pixels, "y": np.array([[10.0], [1], [2], [wrong]])})
        with pytest.raises(DataError, match=r"test_32x32\.mat has labels other than"):
            svhn.read_svhn(tmp_path)
    savemat(tmp_path / "test_32x32.mat", {"X": pixels[:5], "y": np.array([[10], [1], [2], [9]])})
    with pytest.raises(DataError, match=r"test_32x32\.mat holds .* are right"):
        svhn.read_svhn(tmp_path)
    savemat(tmp_path / "test_32x32.mat", {"X": pixels, "y": np.array([[10], [1], [2], [9]], dtype=np.uint8)})
    whole = (tmp_path / "test_32x32.mat").read_bytes()
    (tmp_path / "test_32x32.mat").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"test_32x32\.mat (is damaged|holds)"):
        svhn.read_svhn(tmp_path)


def test_a_manifest_names_image_label_and_task(tmp_path: Path) -> None:
    """Tasks in the order they first appear, paths from the file's own folder."""
    for name in "abcdef":
        (tmp_path / f"{name}.png").touch()
    path = tmp_path / "all.csv"
    path.write_text(
        "path,label,task,split\na.png,x,late,train\nb.png,y,late,train\nc.png,y,late,test\n"
        "d.png,1,early,train\ne.png,0,early,train\n"
    )
    late, early = manifest.read_manifest(path)
    assert (late.name, late.classes, early.classes) == ("late", ("x", "y"), ("0", "1"))
    assert late.test.images == [tmp_path / "c.png"] and late.test.labels.tolist() == [1]
    assert early.train.labels.tolist() == [1, 0] and len(early.test) == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("path,label\na.png,x\n", "has no column 'task'"),
        ("path,label,task\na.png,x\n", "line 2: 3 values are right"),
        ("path,label,task\na.png,x,t,u\n", "line 2: 3 values are right"),
        ("path,label,task\na.png,,t\n", "line 2: 3 values are right"),
        ("path,label,task\nb.png,x,t\n", "line 2: there is no file"),
        ("path,label,task,split\na.png,x,t,dev\n", "split must be train or test, not 'dev'"),
        ("path,label,task\na.png,x,t\n", "has one class"),
        ("path,label,task,split\na.png,x,t,train\nc.png,y,t,train\nd.png,z,t,test\n", "test images of 'z'"),
        ("path,label,task,split\na.png,x,t,train\na.png,x,t,test\n", "line 3: a.png is in task 't' already, by line 2"),
        ("path,label,task\na.png,x,t\n./a.png,y,t\n", "line 3: ./a.png is in task 't' already, by line 2"),
        ("path,label,task,label\na.png,x,t,y\n", "two columns of the same name"),
        (f"path,label,task\n{'a' * 300}.png,x,t\n", "cannot read|there is no file"),
        ("path,label,task\n", "names no image"),
        ('path,label,task\n"a.png,x,t\n', "damaged or not a CSV"),
    ],
)
def test_a_wrong_manifest_is_refused_by_line(tmp_path: Path, text: str, words: str) -> None:
    """So that it can be mended."""
    for name in "acd":
        (tmp_path / f"{name}.png").touch()
    (tmp_path / "all.csv").write_text(text)
    with pytest.raises(DataError, match=words):
        manifest.read_manifest(tmp_path / "all.csv")
