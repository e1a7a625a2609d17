"""The data sets recipes are made of: who makes them, which files they are, how those are read."""

from __future__ import annotations

import string
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from etcl_deploy.data import cifar, folders, idx, leaf, npz, svhn
from etcl_deploy.data.dataset import DataSet, File
from etcl_deploy.data.source import Part, Source, hold_back
from etcl_deploy.errors import DataError

NUMERALS = tuple(string.digits)
CHARACTERS = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)


def _read_idx(folder: Path, prefix: str, classes: tuple[str, ...], *, turned: bool = False) -> Source:
    """MNIST and its kin; EMNIST's files have a prefix, and images that are turned."""

    def file(name: str) -> Path:
        plain = folder / f"{prefix}{name}-ubyte"
        return plain if plain.exists() else plain.with_name(plain.name + ".gz")

    train, test = (
        idx.read_idx_part(file(f"{part}-images-idx3"), file(f"{part}-labels-idx1"), turned=turned)
        for part in ("train", "test" if prefix else "t10k")
    )
    return Source(folder.name, classes, train, test)


def _read_images(folder: Path, share: float) -> Source:
    """A folder of images for each class; a share of each is the test part."""
    return hold_back(folders.read_folder(folder, []), share, torch.Generator().manual_seed(0))


def _read_packed_samples(path: Path) -> Source:
    """F-EMNIST-1 as arrays `task00_train_x` ... of one sample each."""
    names = [f"task{number:02d}" for number in range(10)]
    arrays = npz.read_arrays(
        path, [f"{n}_{part}" for n in names for part in ("train_x", "train_y", "test_x", "test_y")]
    )

    def joined(part: str) -> Part:
        pixels, labels = ([arrays[f"{name}_{part}_{kind}"] for name in names] for kind in ("x", "y"))
        owners = [np.full(len(y), f"sample-{number + 1:02d}") for number, y in enumerate(labels)]
        return Part(np.concatenate(pixels), np.concatenate(labels), np.concatenate(owners))

    try:
        return Source("femnist1", CHARACTERS, joined("train"), joined("test"))
    except (DataError, ValueError) as error:
        raise DataError(f"{path}: {error}") from None


def _read_packed_cifar100(path: Path) -> Source:
    """CIFAR-100 with `class_names` and `coarse_of_fine` beside its images."""
    extra = npz.read_arrays(path, ("class_names", "coarse_of_fine"))
    source = npz.read_npz(path, "cifar100", tuple(map(str, extra["class_names"].tolist())))
    numbers = extra["coarse_of_fine"].tolist()
    if len(numbers) != len(source.classes) or not set(numbers) <= set(range(len(SUPERCLASSES))):
        raise DataError(f"{path}: coarse_of_fine must give each of {len(source.classes)} classes its superclass")
    return replace(source, groups=tuple(SUPERCLASSES[number] for number in numbers))


def _files(base: str, files: dict[str, tuple[int, str]]) -> tuple[File, ...]:
    return tuple(File(name, size, digest, f"{base}/{name}") for name, (size, digest) in files.items())


IDX_NAMES = tuple(f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
LETTERS = tuple("ABCDEFGHIJ")
FASHION = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
BALANCED = tuple(string.digits + string.ascii_uppercase + "abdefghnqrt")  # EMNIST joins letters that look alike
OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SUPERCLASSES = (
    *("aquatic_mammals", "fish", "flowers", "food_containers", "fruit_and_vegetables"),
    *("household_electrical_devices", "household_furniture", "insects", "large_carnivores"),
    *("large_man-made_outdoor_things", "large_natural_outdoor_scenes", "large_omnivores_and_herbivores"),
    *("medium_mammals", "non-insect_invertebrates", "people", "reptiles", "small_mammals", "trees"),
    *("vehicles_1", "vehicles_2"),
)
LEAF = "https://github.com/TalwalkarLab/leaf"
CELEBA = "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html"


def _leaf_by_hand(data: str, options: str, name: str) -> str:
    return (
        f"In LEAF's data/{data} run ./preprocess.sh {options}, then copy its data/train and data/test to {name}/train "
        f"and {name}/test below the data root. LEAF draws at random, anew every time: results differ from the paper's"
    )


DATA_SETS: dict[str, DataSet] = {
    "mnist": DataSet(
        "MNIST",
        "http://yann.lecun.com/exdb/mnist/",
        "free for research; derived from NIST's databases",
        (60_000, 10_000),
        partial(_read_idx, prefix="", classes=NUMERALS),
        IDX_NAMES,
        NUMERALS,
        _files(
            "https://ossci-datasets.s3.amazonaws.com/mnist",
            {
                IDX_NAMES[0]: (9912422, "sha256:440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
                IDX_NAMES[1]: (28881, "sha256:3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
                IDX_NAMES[2]: (1648877, "sha256:8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
                IDX_NAMES[3]: (4542, "sha256:f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
            },
        ),
    ),
    "fashion_mnist": DataSet(
        "Fashion-MNIST",
        "https://github.com/zalandoresearch/fashion-mnist",
        "MIT",
        (60_000, 10_000),
        partial(_read_idx, prefix="", classes=FASHION),
        IDX_NAMES,
        FASHION,
        _files(
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
            {
                IDX_NAMES[0]: (26421880, "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
                IDX_NAMES[1]: (29515, "md5:25c81989df183df01b3e8a0aad5dffbe"),
                IDX_NAMES[2]: (4422102, "md5:bef4ecab320f06d8554ea6380940ec79"),
                IDX_NAMES[3]: (5148, "md5:bb300cfdad3c16e7a12a480ee83cd310"),
            },
        ),
    ),
    "emnist": DataSet(
        "EMNIST (balanced)",
        "https://www.nist.gov/itl/products-and-services/emnist-dataset",
        "free for research; derived from NIST's Special Database 19",
        (112_800, 18_800),
        lambda folder: _read_idx(folder / "gzip", "emnist-balanced-", BALANCED, turned=True),
        tuple(f"gzip/emnist-balanced-{name.replace('t10k', 'test')}" for name in IDX_NAMES),
        BALANCED,
        _files(
            "https://biometrics.nist.gov/cs_links/EMNIST",
            {"gzip.zip": (561753746, "md5:58c8d27c78d21e728a6bc7b3cc06412e")},
        ),
    ),
    "notmnist": DataSet(
        "notMNIST (small)",
        "http://yaroslavvb.blogspot.com/2011/09/notmnist-dataset.html",
        "not stated",
        (16_854, 1_870),
        lambda folder: _read_images(folder / "notMNIST_small", 0.1),
        tuple(f"notMNIST_small/{letter}" for letter in LETTERS),
        LETTERS,
        by_hand=(
            "Get notMNIST_small.tar.gz (8,458,043 bytes) from its maker's page, unpack it to notmnist/notMNIST_small "
            "and remove the two of its 18,726 files that are damaged: `etcl train` names them"
        ),
    ),
    "cifar10": DataSet(
        "CIFAR-10",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        "not stated; cite the technical report",
        (50_000, 10_000),
        lambda folder: cifar.read_cifar10(folder / "cifar-10-batches-bin"),
        ("cifar-10-batches-bin/*_batch*.bin", "cifar-10-batches-bin/batches.meta.txt"),
        OBJECTS,
        _files(
            "https://www.cs.toronto.edu/~kriz",
            {"cifar-10-binary.tar.gz": (170052171, "md5:c32a1d4ab5d03f1284b67883e8d87530")},
        ),
        pickled="cifar-10-batches-py",
    ),
    "cifar100": DataSet(
        "CIFAR-100",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        "not stated; cite the technical report",
        (50_000, 10_000),
        lambda folder: cifar.read_cifar100(folder / "cifar-100-binary"),
        tuple(f"cifar-100-binary/{name}" for name in ("train.bin", "test.bin", "*_label_names.txt")),
        None,
        _files(
            "https://www.cs.toronto.edu/~kriz",
            {"cifar-100-binary.tar.gz": (168513733, "md5:03b5dce01913d631647c71ecec9e9cb8")},
        ),
        pickled="cifar-100-python",
        read_npz=_read_packed_cifar100,
    ),
    "svhn": DataSet(
        "SVHN (cropped)",
        "http://ufldl.stanford.edu/housenumbers/",
        "for non-commercial use only",
        (73_257, 26_032),
        svhn.read_svhn,
        ("train_32x32.mat", "test_32x32.mat"),
        svhn.CLASSES,
        _files(
            "http://ufldl.stanford.edu/housenumbers",
            {
                "train_32x32.mat": (
                    182040794,
                    "sha256:435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
                ),
                "test_32x32.mat": (64275384, "sha256:cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b"),
            },
        ),
    ),
    "mini_imagenet": DataSet(
        "MiniImageNet",
        "https://github.com/yaoyao-liu/mini-imagenet-tools",
        "ImageNet's terms of access: non-commercial research and education",
        (50_000, 10_000),
        lambda folder: _read_images(folder / "images", 1 / 6),  # 100 of 600
        ("images/*/*",),
        by_hand="Put its 100 classes of 600 images as folders below mini_imagenet/images",
    ),
    "femnist1": DataSet(
        "F-EMNIST-1 (LEAF)",
        LEAF,
        "derived from NIST's Special Database 19",
        None,
        partial(leaf.read_leaf, name="femnist1", classes=CHARACTERS),
        ("train/*.json", "test/*.json"),
        by_hand=_leaf_by_hand("femnist", "-s iid --sf 0.05 -k 0 -t sample", "femnist1"),
        read_npz=_read_packed_samples,
    ),
    "femnist2": DataSet(
        "F-EMNIST-2 (LEAF)",
        LEAF,
        "derived from NIST's Special Database 19",
        None,
        partial(leaf.read_leaf, name="femnist2", classes=CHARACTERS),
        ("train/*.json", "test/*.json"),
        by_hand=_leaf_by_hand("femnist", "-s niid --sf 0.05 -k 100 -t sample", "femnist2"),
    ),
    "celeba": DataSet(
        "F-CelebA (LEAF)",
        CELEBA,
        "for non-commercial research only",
        None,
        lambda folder: leaf.read_leaf(folder, "celeba", ("not smiling", "smiling"), folder / "img_align_celeba"),
        ("train/*.json", "test/*.json", "img_align_celeba/*"),
        by_hand=_leaf_by_hand("celeba", "-s niid --sf 0.05 -k 20 -t sample", "celeba")
        + ", and the folder img_align_celeba of CelebA itself to celeba/img_align_celeba",
    ),
}
