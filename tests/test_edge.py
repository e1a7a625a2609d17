"""The runtime of a device: a file, images, answers; no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from conftest import Learned
from loopback import expect
from PIL import Image

from etcl_deploy.core.pixels import png
from etcl_deploy.edge import Model
from etcl_deploy.errors import BadImageError, ModelError, UnknownTaskError
from etcl_deploy.export.parity import session
from etcl_deploy.export.to_multitask import export_multitask
from etcl_deploy.export.to_onnx import OnnxOptions, export_task
from etcl_deploy.runtime.predictor import Predictor


@pytest.fixture(scope="module")
def files(learned: Learned, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("edge")
    export_task(learned.bundle, "parity", folder / "one.onnx")
    export_task(learned.bundle, "parity", folder / "compact.onnx", options=OnnxOptions(compact=True))
    export_multitask(learned.bundle, folder / "all.onnx")
    return {path.stem: path for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["one", "compact", "all"])
def test_files_bytes_and_pixels_get_the_predictors_answer(
    learned: Learned, files: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """Whatever the image comes as; task and classes are in the file."""
    images = list(learned.tasks[4].test_x[:6])
    expected = Predictor(learned.bundle).predict(images, ["parity"] * 6)
    path = tmp_path / "an image.png"
    path.write_bytes(png(images[0]))
    pixels = [images[4].numpy(), images[5].numpy().astype(np.float32)]
    answers = Model(files[name]).predict([path, str(path), png(images[2]), Image.open(path), *pixels], "parity")
    for answer, right in zip(answers, [expected[n] for n in (0, 0, 2, 0, 4, 5)], strict=True):
        expect(answer.as_json(), right)


def test_one_file_switches_between_all_tasks(learned: Learned, files: dict[str, Path]) -> None:
    """For one call, or until further notice."""
    model, predictor = Model(files["all"]), Predictor(learned.bundle)
    assert model.tasks == tuple(learned.bundle.tasks)
    assert model.task == model.tasks[0]
    for task in learned.tasks:
        image = task.test_x[1]
        right = predictor.predict([image], [task.name])[0]
        assert model.predict([image.numpy()], task.name)[0].scores == pytest.approx(right.scores, abs=1e-5)
        model.task = task.name
        assert model.predict([image.numpy()])[0].scores == pytest.approx(right.scores, abs=1e-5)
    with pytest.raises(UnknownTaskError, match="unknown task 'nobody'; this file holds: upright-a"):
        model.task = "nobody"
    with pytest.raises(UnknownTaskError):
        Model(files["one"]).predict([], "turned")


@pytest.mark.parametrize("name", ["one", "all"])
def test_any_number_of_images(learned: Learned, files: dict[str, Path], name: str) -> None:
    """None, one, a thousand: each gets the answer it gets alone."""
    model = Model(files[name], threads=1)
    images = [learned.tasks[4].test_x[n % 50].numpy() for n in range(1000)]
    assert model.predict([], "parity") == []
    assert model.logits(np.empty((0, 16, 16, 1), np.uint8), "parity").shape == (0, 2)
    many = model.predict(images, "parity")
    assert len(many) == 1000
    for n in (0, 63, 64, 999):
        assert many[n].scores == pytest.approx(model.predict([images[n]], "parity")[0].scores, abs=1e-5)


def test_the_file_itself_takes_any_batch_and_nothing_else(files: dict[str, Path]) -> None:
    """Also in somebody else's onnxruntime: another size, colour for grey and float for uint8 are refused."""
    other = session(files["one"])
    for batch in (0, 1000):
        answers = other.run(None, {"image": np.zeros((batch, 16, 16, 1), np.uint8)})
        assert [part.shape for part in answers] == [(batch, 2), (batch, 2)]
    for shape, dtype in (((1, 17, 16, 1), np.uint8), ((1, 16, 16, 3), np.uint8), ((1, 16, 16, 1), np.float32)):
        with pytest.raises(Exception, match=r"(?i)expected: (17|16|1)|INVALID_ARGUMENT|tensor\(uint8\)"):
            other.run(None, {"image": np.zeros(shape, dtype)})


def test_images_of_other_sizes_are_brought_to_the_networks(learned: Learned, files: dict[str, Path]) -> None:
    """Colour to grey, large to small: as the server does it."""
    model, predictor = Model(files["one"]), Predictor(learned.bundle)
    chance = np.random.default_rng(0)
    for shape in ((40, 30), (5, 7, 3), (16, 16, 3), (1, 1, 1)):
        image = chance.integers(0, 256, shape, np.uint8)
        assert np.array_equal(model.prepare(image), predictor.prepare(image.tolist()).numpy())
        assert np.array_equal(model.prepare(image.tolist()), model.prepare(image))


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (np.full((16, 16), 256.0), "between 0 and 255"),
        (np.full((16, 16), np.nan), "between 0 and 255"),
        (np.full((16, 16), 0.5), "multiply them by 255"),
        (np.zeros((2, 2, 2, 2)), "have the shape"),
        (np.zeros((0, 3)), "have the shape"),
        ([[1], [2, 3]], "rectangular"),
        ("nowhere.png", "cannot read"),
        (b"no image", "not an image"),
    ],
)
def test_bad_images_are_refused(files: dict[str, Path], image: object, reason: str) -> None:
    """With the reason, as everywhere."""
    with pytest.raises(BadImageError, match=reason):
        Model(files["one"]).predict([image])


@pytest.mark.parametrize("single", ["x.png", b"x", Path("x.png"), Image.new("L", (4, 4))])
def test_one_image_is_a_list_of_one(files: dict[str, Path], single: object) -> None:
    """And not a list of letters."""
    with pytest.raises(BadImageError, match="a list of one"):
        Model(files["one"]).predict(single)


def test_prepared_images_must_be_prepared(files: dict[str, Path]) -> None:
    """What goes in as it is has the type and shape the network takes."""
    with pytest.raises(
        BadImageError, match=r"prepared images are uint8 \['images', 16, 16, 1\], not float32 \[1, 16, 16, 1\]"
    ):
        Model(files["one"]).logits(np.zeros((1, 16, 16, 1), np.float32))


def test_files_that_are_none_of_ours_are_refused(files: dict[str, Path], tmp_path: Path) -> None:
    """Missing, damaged, or ONNX of another origin."""
    with pytest.raises(ModelError, match="No such file"):
        Model(tmp_path / "nowhere.onnx")
    (tmp_path / "bad.onnx").write_bytes(files["one"].read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"bad.onnx cannot be opened"):
        Model(tmp_path / "bad.onnx")
    model = onnx.load(files["one"])
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "other.onnx")
    with pytest.raises(ModelError, match="was not written by `etcl onnx`"):
        Model(tmp_path / "other.onnx")
    outside = onnx.load(files["one"])
    onnx.save(outside, tmp_path / "outside.onnx", save_as_external_data=True, size_threshold=0)
    with pytest.raises(ModelError, match="keeps weights in other files"):
        Model(tmp_path / "outside.onnx")
    with pytest.raises(ModelError, match="device 'tpu' is unknown; known: cpu, cuda"):
        Model(files["one"], device="tpu")


def test_cuda_is_used_or_refused(files: dict[str, Path]) -> None:
    """Never silently the CPU instead."""
    import torch

    if torch.cuda.is_available():
        assert Model(files["one"], device="cuda").predict([np.zeros((16, 16))])
    else:
        with pytest.raises(ModelError, match="cannot use CUDA here"):
            Model(files["one"], device="cuda")


CODE = """
import sys
for name in ("torch", "onnx", "scipy", "matplotlib", "typer", "httpx", "safetensors", "constriction", "PIL"):
    sys.modules[name] = None  # importing it fails
from etcl_deploy.edge import Model
import numpy as np
model = Model(sys.argv[1])
print(model.predict([np.zeros((16, 16, 1), np.uint8)])[0].label)
print(sorted(name for name in sys.modules if name.startswith("etcl_deploy.")))
"""


def test_it_runs_where_torch_is_not_installed(files: dict[str, Path], tmp_path: Path) -> None:
    """numpy and onnxruntime are all it needs; Pillow only for image files."""
    done = subprocess.run([sys.executable, "-c", CODE, files["one"]], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    label, modules = done.stdout.splitlines()
    assert label in ("even", "odd")
    needed = ("core", "core.prediction", "core.preprocessing", "edge", "errors")
    assert modules == str([f"etcl_deploy.{name}" for name in needed])
