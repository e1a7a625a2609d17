"""docs/extending.md: its code adds a network, data, a method and an export target; what it names is there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from sklearn.datasets import load_digits
from test_architecture import SOURCES

from etcl_deploy.bundle.bundle import load_bundle
from etcl_deploy.config import Learning
from etcl_deploy.data.catalog import DATA_SETS
from etcl_deploy.data.inventory import place_of
from etcl_deploy.data.sequences import KINDS
from etcl_deploy.errors import ParityError
from etcl_deploy.learn.methods import METHODS
from etcl_deploy.network.backbones import BACKBONES
from etcl_deploy.runs.store import load_run
from etcl_deploy.runs.task_loading import tasks_of
from etcl_deploy.runtime.predictor import Predictor

TEXT = (ROOT / "docs" / "extending.md").read_text("utf-8")
BOTH = TEXT + (ROOT / "docs" / "architecture.md").read_text("utf-8")
PROSE = re.sub(r"^```.*?^```", "", BOTH, flags=re.DOTALL | re.MULTILINE)
QUOTED = sorted(set(re.findall(r"`([^`\n]+)`", PROSE)))
REGISTRIES: tuple[dict[str, Any], ...] = (BACKBONES, DATA_SETS, KINDS, METHODS)


def blocks(title: str) -> list[str]:
    """The code under a heading, up to the next one."""
    (section,) = re.findall(rf"^##+ {title}\n(.*?)(?=^##|\Z)", TEXT, re.DOTALL | re.MULTILINE)
    return re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def run(title: str) -> dict[str, Any]:
    """Run the code under a heading and give its names; code that begins with the name of a file is written to it."""
    names: dict[str, Any] = {"__name__": "extending"}
    for code in (*blocks("Before each of them"), *blocks(title)):
        file = re.match(r"# (\w+\.py)\n", code)
        if file:
            Path(file[1]).write_text(code)
        else:
            exec(compile(code, f"docs/extending.md, {title}", "exec", dont_inherit=True), names)
    return names


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of its own; entries in the registries are taken out again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = [dict(registry) for registry in REGISTRIES]
    yield tmp_path
    for registry, entries in zip(REGISTRIES, before, strict=True):
        registry.clear()
        registry.update(entries)
    for name in ("my_networks", "read_npz"):
        sys.modules.pop(name, None)


@pytest.fixture
def optdigits(folder: Path) -> None:
    """The file that the reader of the page reads: scikit-learn has the same lines."""
    data = load_digits()
    (folder / "data" / "optdigits").mkdir(parents=True)
    rows = np.column_stack([data.data, data.target])
    np.savetxt(folder / "data" / "optdigits" / "optdigits.csv", rows, fmt="%d", delimiter=",")


def accuracies(name: str) -> dict[str, float]:
    """A Predictor's accuracy on each task of a run, in percent: exactly what the run says of itself."""
    stored, bundle = load_run(Path("runs") / name), load_bundle(f"{name}.etcl")
    predictor = Predictor(bundle)
    measured = {}
    for task in tasks_of(stored, pytest.fail, Path("data")):
        answers = predictor.predict(list(task.test_x), [task.name] * len(task.test_x))
        measured[task.name] = 100 * float(np.mean([answer.index for answer in answers] == task.test_y.numpy()))
        assert measured[task.name] == pytest.approx(bundle.task(task.name).accuracy)
    return measured


def test_a_network_is_added() -> None:
    """A module of the user's by its name, and a plan as an entry: both learn, are bundled, and predict."""
    names = run("A network")
    assert load_bundle("small-net.etcl").plan.steps[0].settings["out"] == 12
    assert names["bundle"].backbone == "patches"
    for name in ("small-net", "patches"):
        assert min(accuracies(name).values()) > 85


@pytest.mark.usefixtures("optdigits")
def test_data_is_added() -> None:
    """A reader whose data set all kinds of sequences can use, and a kind of sequence."""
    names = run("Data")
    assert place_of("optdigits", Path("data")) == Path("data") / "optdigits"
    assert min(accuracies("two-of-ten").values()) > 95
    turned = accuracies("turned")
    assert list(turned) == ["turned-0", "turned-90", "turned-180"]
    assert min(turned.values()) > 80
    first, second, _ = tasks_of(load_run(Path("runs") / "turned"), pytest.fail, Path("data"))
    whole = names["read_optdigits"](Path("data") / "optdigits").train.images
    kept = {image.tobytes() for image in whole}
    assert all(image.tobytes() in kept for image in first.train_x.numpy())
    assert all(np.rot90(image, -1).tobytes() in kept for image in second.train_x.numpy())


def test_a_method_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its name in the config it learns two tasks like any other; this one changes nothing of the first."""
    monkeypatch.setitem(Learning.__annotations__, "method", "str")  # as the page says: one name more in config.py
    names = run("A method")
    assert min(accuracies("heads").values()) > 80
    alone = names["learn"]("alone", method="heads_only", tasks=1)
    images = torch.randint(0, 256, (20, 8, 8, 1), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    before, after = (Predictor(bundle).logits("upright-a", images) for bundle in (alone, names["bundle"]))
    assert torch.equal(before, after)


def test_an_export_target_is_added() -> None:
    """A program with numpy alone answers like the Predictor; a file that would answer otherwise is not kept."""
    names = run("An export target")
    bundle, program = names["bundle"], Path("read_npz.py").read_text()
    imported = {name for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Import) for name in node.names}
    assert {name.name for name in imported} == {"json", "sys", "numpy"} and "\nfrom " not in program
    for task in tasks_of(load_run(Path("runs") / "for-numpy"), pytest.fail, None):
        np.save("images.npy", task.test_x.numpy())
        command = [sys.executable, "read_npz.py", f"{task.name}.npz", "images.npy"]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert ast.literal_eval(said) == Predictor(bundle).logits(task.name, task.test_x).argmax(1).tolist()
    right = names["logits"]
    names["logits"] = lambda path, images: -right(path, images)
    with pytest.raises(ParityError, match=r"wrong\.npz differs"):
        names["export_npz"](bundle, "upright-a", Path("wrong.npz"))
    assert not Path("wrong.npz").exists()


@pytest.mark.parametrize("name", [name for name in QUOTED if re.fullmatch(r"[\w./-]+(/|\.(py|md))", name)])
def test_every_file_the_page_names_is_there(name: str) -> None:
    """From the root, or from the package."""
    assert (ROOT / name).exists() or (ROOT / "etcl_deploy" / name).exists()


def test_every_word_of_code_on_the_page_is_in_the_code() -> None:
    """A class or setting that was renamed is renamed here, too."""
    code = "".join(path.read_text("utf-8") for path in SOURCES.values())
    words = {name for name in QUOTED if re.fullmatch(r"\w+", name)}
    assert len(words) > 20
    assert not {word for word in words if not re.search(rf"\b{word}\b", code)}
