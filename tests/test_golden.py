"""Files written once, with the first version of the format: every later one must read them."""

from __future__ import annotations

import json
from math import prod

import pytest
import torch
from conftest import ROOT
from factories import made_bundle

from etcl_deploy.bundle.bundle import Bundle
from etcl_deploy.bundle.delta import apply_delta, make_delta
from etcl_deploy.runtime.predictor import Predictor

GOLDEN = ROOT / "tests" / "golden"
NAMES = [f"{encoding}-{precision}" for encoding in ("coded", "packed") for precision in ("fp32", "fp16", "int8")]
FILES = {**{name: f"{name}-7.etcl" for name in NAMES}, "residual": "residual.etcl"}


def golden(file: str) -> bytes:
    return (GOLDEN / file).read_bytes()


def answers_of(bundle: Bundle) -> dict[str, list[list[float]]]:
    """The logits of every task for three images."""
    shape = (3, *bundle.preprocessing.shape)
    pixels = (torch.arange(prod(shape)) * 37 % 256).to(torch.uint8).view(shape)
    predictor = Predictor(bundle)
    return {task: predictor.logits(task, pixels).tolist() for task in bundle.tasks}


def write() -> None:
    """How these files were made, once and never again: python -c 'import test_golden; test_golden.write()'."""
    GOLDEN.mkdir()
    answers = {}
    for name in NAMES:
        encoding, precision = name.split("-")
        for count in (3, 7):
            bundle = made_bundle(count, width=16, side=6, precision=precision)
            (GOLDEN / f"{name}-{count}.etcl").write_bytes(bundle.to_bytes(encoding))
        answers[name] = answers_of(bundle)
        (GOLDEN / f"{name}.delta").write_bytes(make_delta(golden(f"{name}-3.etcl"), golden(f"{name}-7.etcl")))
    residual = made_bundle(10, "resnet18", 2, 8, precision="int8")  # convolutions, norms, tasks of long ago
    (GOLDEN / "residual.etcl").write_bytes(residual.to_bytes("coded"))
    answers["residual"] = answers_of(residual)
    (GOLDEN / "answers.json").write_text(json.dumps(answers, indent=1, ensure_ascii=False) + "\n")


@pytest.mark.parametrize("name", FILES)
def test_old_bundles_answer_as_they_did(name: str) -> None:
    """Every encoding and precision of format 1."""
    bundle = Bundle.from_bytes(golden(FILES[name]))
    answers = json.loads((GOLDEN / "answers.json").read_text("utf-8"))[name]
    assert name in ("residual", f"{bundle.encoding}-{bundle.precision}")
    found = answers_of(bundle)
    assert list(found) == list(answers)
    for task, expected in answers.items():
        torch.testing.assert_close(torch.tensor(found[task]), torch.tensor(expected))


@pytest.mark.parametrize("name", NAMES)
def test_old_deltas_apply(name: str) -> None:
    """To the bytes they gave then; and they are still written as they were."""
    old, new, delta = golden(f"{name}-3.etcl"), golden(f"{name}-7.etcl"), golden(f"{name}.delta")
    assert apply_delta(old, delta) == new
    assert make_delta(old, new) == delta


@pytest.mark.parametrize("name", NAMES)
def test_the_same_content_still_gives_the_same_bytes(name: str) -> None:
    """Read and written again, in either encoding."""
    data = golden(f"{name}-7.etcl")
    bundle = Bundle.from_bytes(data)
    assert bundle.to_bytes(bundle.encoding) == data
    other = "packed" if bundle.encoding == "coded" else "coded"
    assert bundle.to_bytes(other) == golden(f"{other}-{bundle.precision}-7.etcl")
