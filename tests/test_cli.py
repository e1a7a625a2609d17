"""The installed command, as people and programs call it."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ETCL, Learned
from PIL import Image

from etcl_deploy.core.pixels import png
from etcl_deploy.serve.properties import any_free_port
from etcl_deploy.serve.server import find


def etcl(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([ETCL, *map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=300)


def answer(*words: object, cwd: Path | None = None) -> Any:
    """The document a command prints with --json."""
    done = etcl(*words, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def fails(*words: object, code: int = 1) -> str:
    """The error of a command that must fail: one line on stderr, without a traceback."""
    done = etcl(*words)
    assert done.returncode == code, (done.stdout, done.stderr)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    if code == 1:
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two tasks of noisy grey images: light or dark, and upper or lower half bright."""
    generator = torch.Generator().manual_seed(0)
    for number in range(24):
        noise = torch.randint(0, 60, (20, 30), generator=generator).to(torch.uint8)
        light, upper = noise + 160, noise.clone()
        upper[:10] += 160
        drawn = {"tone/dark": noise, "tone/light": light, "half/up": upper, "half/low": upper.flip(0)}
        for name, pixels in drawn.items():
            path = tmp_path / "photos" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.numpy()).save(path)
    return tmp_path / "photos"


def test_from_a_folder_of_images_to_an_exported_task(photos: Path, tmp_path: Path) -> None:
    """train, eval, bundle, inspect, verify, predict, archive, onnx: each understands what the one before wrote."""
    quick = ["--epochs", 6, "--backbone", "resnet18", "--set", "width=8", "--set", "size=16", "--set", "channels=1"]
    trained = answer("train", "--data", photos, "--run", tmp_path / "run", *quick, "--density", 0.3, "--seed", 3)
    assert trained["tasks"] == ["half", "tone"]
    assert (trained["recipe"], trained["seed"], trained["fwt"], trained["similar"]) == (None, 3, None, {})
    assert [len(row) for row in trained["matrix"]] == [1, 2]
    assert trained["acc"] > 80
    assert trained["bwt"] == 0
    assert 0.3 <= trained["claimed"] <= 0.6
    assert answer("eval", tmp_path / "run") == trained

    path = tmp_path / "photos.etcl"
    info = answer("bundle", tmp_path / "run", "-o", path)
    assert info == answer("inspect", path)
    assert (info["format"], info["encoding"], info["backbone"]) == (1, "coded", "resnet18")
    assert [task["name"] for task in info["tasks"]] == ["half", "tone"]
    assert info["tasks"][1]["classes"] == ["dark", "light"]
    assert info["tasks"][1]["accuracy"] == trained["matrix"][-1][1]
    assert answer("verify", path)["digest"] == info["digest"]

    files = sorted((photos / "tone" / "dark").iterdir())[:2] + sorted((photos / "tone" / "light").iterdir())[:2]
    rows = answer("predict", path, "--task", "tone", *files)
    assert [row["label"] for row in rows] == ["dark", "dark", "light", "light"]
    assert rows[0]["input"] == str(files[0])
    assert rows[0]["scores"][rows[0]["label"]] == max(rows[0]["scores"].values())

    archived = answer("archive", path, "--name", "photos", "--model-store", tmp_path / "store")
    assert Path(archived["file"]).stat().st_size == archived["bytes"]
    exported = answer("onnx", path, "--task", "half", "-o", tmp_path / "half.onnx")
    assert exported["parity"]["same_class"] == exported["parity"]["items"] == 16
    assert exported["parity"]["max_rel_diff"] < 1e-4
    assert exported["bytes"] == (tmp_path / "half.onnx").stat().st_size


@pytest.mark.torchserve
def test_serve_status_stop(learned: Learned, tmp_path: Path) -> None:
    """Start, find, ask with the printed line, stop; a second stop says there is nothing."""
    port = any_free_port()
    started = answer("serve", learned.path, "--name", "m", "--port", port, "--workers", 2, cwd=tmp_path)
    try:
        assert started["running"]
        assert started["inference_url"] == f"http://127.0.0.1:{port}/predictions/m"
        token = json.loads(Path(started["token_file"]).read_text())["inference"]["key"]
        assert Path(started["log"]).exists()
        image = tmp_path / "image.png"
        image.write_bytes(png(learned.tasks[4].test_x[0]))
        headers = {"Authorization": f"Bearer {token}", "X-ETCL-Task": "parity"}
        # What `curl -T` does: PUT, without a content type.
        request = urllib.request.Request(started["inference_url"], image.read_bytes(), headers, method="PUT")
        request.add_unredirected_header("Content-Type", "")
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert json.load(reply)["label"] in ("even", "odd")
        assert answer("serve", "--status", cwd=tmp_path) == started
        server = find("m", tmp_path / "model_store")
        process = server and server.process()
        assert process
        workers = [p for p in process.children(recursive=True) if "model_service_worker" in " ".join(p.cmdline())]
        assert len(workers) == 2
    finally:
        stopped = answer("serve", "--stop", "--name", "m", cwd=tmp_path)
    assert stopped["running"] is False
    assert answer("serve", "--status", "--name", "m", cwd=tmp_path) == stopped
    assert "no server named 'm'" in fails("serve", "--stop", "--name", "m", "--model-store", tmp_path)


def test_results_on_stdout_progress_on_stderr(tmp_path: Path) -> None:
    """Only the table of results goes to stdout."""
    words = ["train", "digits", "--tasks", 1, "--epochs", 1, "--backbone", "fcn3"]
    done = etcl(*words, "--run", tmp_path / "run")
    assert done.returncode == 0
    assert "upright-a" in done.stdout
    assert "ACC" in done.stdout
    assert "claimed" in done.stderr


def test_a_preset_is_said_wherever_its_run_is_shown(photos: Path, tmp_path: Path) -> None:
    """In the document, in the table, on the page; `add` keeps it, and with a folder only the options differ."""
    run, small = tmp_path / "run", ["--backbone", "fcn3", "--set", "width=8", "--epochs", 1]
    trained = answer("train", "--data", photos, "--preset", "paper", "--run", run, *small)
    assert (trained["preset"], trained["recipe"], trained["method"]) == ("paper", None, "etcl")
    record = json.loads((run / "run.json").read_text())["config"]
    assert (record["preset"], record["learning"]["epochs"], record["network"]["width"]) == ("paper", 1, 8)
    assert (record["learning"]["optimizer"], record["learning"]["learning_rate"]) == ("sgd", 0.1)
    (tmp_path / "more").mkdir()
    (photos / "tone").rename(tmp_path / "more" / "tone-again")
    assert answer("add", run, "--data", tmp_path / "more")["preset"] == "paper"
    assert "preset paper" in " ".join(etcl("eval", run).stdout.split())
    answer("report", run, "-o", tmp_path / "page.html")
    assert "preset paper" in (tmp_path / "page.html").read_text("utf-8")


def test_eval_lists_comparisons_and_changed_heads(learned: Learned) -> None:
    """The document holds every comparison with its reason, every change of a head, and the digest of the run."""
    summary = answer("eval", learned.directory)
    assert summary["method"] == "etcl"
    assert summary["similar"]["upright-b"] == ["upright-a"]
    assert "turned" not in summary["similar"] and "negative" not in summary["similar"]
    (compared,) = summary["comparisons"]["upright-b"]
    assert compared["similar"] and compared["distance"] < compared["original"]
    assert compared["gap"] == pytest.approx(1 - compared["distance"] / compared["original"])
    assert compared["reason"].startswith("gap 0.")
    assert [change["task"] for change in summary["heads"]["upright-b"]] == ["upright-a"]
    assert summary["heads"]["parity"] == [], "other classes: no head may change"
    assert len(summary["digest"]) == 64


def test_names_are_shown_as_they_are(learned: Learned, tmp_path: Path) -> None:
    """Brackets in a name are not markup, and a name cannot control the terminal."""
    image = tmp_path / "photo[copy]\x1b[31m.png"
    image.write_bytes(png(learned.tasks[0].test_x[0]))
    done = etcl("predict", learned.path, "--task", "parity", image.name, cwd=tmp_path)
    assert "photo[copy]" in done.stdout
    assert "\x1b[31m" not in done.stdout
    message = fails("predict", learned.path, "--task", "[red]nobody[/red]", image)
    assert "unknown task '[red]nobody[/red]'" in message


def test_a_damaged_bundle_is_refused_by_every_command(learned: Learned, tmp_path: Path) -> None:
    """The error names the file and the reason, and nothing is written."""
    bundle_file = tmp_path / "copy.etcl"
    data = learned.path.read_bytes()
    bundle_file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    for command, *options in (
        ("verify",),
        ("onnx", "--task", "parity", "-o", tmp_path / "out.onnx"),
        ("archive", "--name", "m", "--model-store", tmp_path / "store"),
    ):
        message = fails(command, bundle_file, *options)
        assert "is not the one its manifest describes" in message
        assert str(bundle_file) in message
    assert list(tmp_path.iterdir()) == [bundle_file]


def test_bad_data_leaves_nothing_behind(photos: Path, tmp_path: Path) -> None:
    """A corrupt image is named, and no run directory appears."""
    bad = photos / "tone" / "light" / "7.png"
    bad.write_bytes(bad.read_bytes()[:-30])
    message = fails("train", "--data", photos, "--run", tmp_path / "run")
    assert str(bad) in message
    assert not (tmp_path / "run").exists()


def test_wrong_input_is_one_line_and_exit_code_1(learned: Learned, tmp_path: Path) -> None:
    """The error says what was found, where, and what would be right."""
    run = tmp_path / "run"
    assert "unknown recipe 'mnist'; known: celeba1" in fails("train", "mnist", "--run", run)
    assert "known: alexnet, fcn3, lenet5, resnet18" in fails("train", "digits", "--run", run, "--backbone", "vgg")
    assert "must be above 0" in fails("train", "digits", "--run", run, "--density", 0)
    assert "unknown setting 'epoch'" in fails("train", "digits", "--run", run, "--set", "epoch=3")
    assert "unknown preset 'own'; known: authors, paper" in fails("train", "digits", "--run", run, "--preset", "own")
    with_wsn = fails("train", "digits", "--run", run, "--preset", "paper", "--method", "wsn")
    assert "the preset 'paper' is for the method etcl, not wsn" in with_wsn
    assert "already holds a run" in fails("train", "digits", "--run", learned.directory)
    assert "holds no run" in fails("eval", tmp_path)
    assert "this bundle holds" in fails("predict", learned.path, "--task", "nobody", "x.png")
    assert "cannot read x.png" in fails("predict", learned.path, "--task", "parity", "x.png")
    assert "cannot name a model" in fails("archive", learned.path, "--name", "a/b", "--model-store", tmp_path)
    assert "no server" in fails("serve", "--status", "--model-store", tmp_path)


def test_wrong_usage_is_exit_code_2(learned: Learned, tmp_path: Path) -> None:
    """Options are missing or contradict each other."""
    assert "--data" in fails("train", "--run", tmp_path / "run", code=2)
    fails("train", "digits", code=2)
    fails("nothing", code=2)
    fails("serve", code=2)
    fails("serve", "--stop", "--status", code=2)
    fails("serve", learned.path, "--port", "99999", code=2)


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    """--debug may stand anywhere on the line."""
    for words in (["--debug", "verify", "none"], ["verify", "none", "--debug"]):
        done = etcl(*words)
        assert done.returncode == 1
        assert "Traceback" in done.stderr


def test_python_dash_m_is_the_same_command() -> None:
    """`python -m etcl_deploy` answers like `etcl`."""
    done = subprocess.run([sys.executable, "-m", "etcl_deploy", "--version"], capture_output=True, text=True)
    assert done.stdout == etcl("--version").stdout
    assert done.stdout.startswith("etcl-deploy 0.")


def test_doctor_works_where_torch_is_missing() -> None:
    """`etcl doctor` needs none of the packages it looks for."""
    code = (
        "import sys; sys.modules['torch'] = None; from etcl_deploy.cli.doctor import examine; "
        "assert [c.found for c in examine() if c.name == 'CUDA'] == ['unknown: torch is not installed']"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_doctor_finds_this_machine_fit() -> None:
    """Everything needed is there; onnxruntime counts under either of its names."""
    checks = answer("doctor")
    assert all(check["ok"] for check in checks if check["needed"])
    names = [check["name"] for check in checks]
    assert {"Python", "torch", "scikit-learn", "Java", "CUDA", "ports"} <= set(names)
    assert len([name for name in names if name.startswith("onnxruntime")]) == 1
    assert "pytest" not in names, "packages of the extras are not needed"
