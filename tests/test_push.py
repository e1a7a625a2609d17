"""Another bundle in the place of the one that is served, on a real TorchServe with traffic."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from factories import made_bundle
from test_cli import answer as run_etcl

from etcl_deploy.bundle.bundle import Bundle, load_bundle, save
from etcl_deploy.bundle.delta import write_delta
from etcl_deploy.client.client import Client
from etcl_deploy.core.pixels import png
from etcl_deploy.errors import BundleError, EtclError, ServeError, TokenError
from etcl_deploy.export import to_mar
from etcl_deploy.runtime.predictor import Predictor
from etcl_deploy.serve import push
from etcl_deploy.serve.process import stop
from etcl_deploy.serve.properties import any_free_port
from etcl_deploy.serve.push import find_server, push_bundle
from etcl_deploy.serve.server import Server
from etcl_deploy.serve.start import ServeOptions, serve_bundle

pytestmark = pytest.mark.torchserve

IMAGE = torch.arange(16, dtype=torch.uint8).mul(15).view(4, 4, 1)


def bundle_file(path: Path, tasks: int, seed: int = 0) -> Path:
    save(path, made_bundle(tasks, seed=seed).to_bytes("coded"))
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two workers in a folder with a space, serving two tasks of the first bundle."""
    folder = tmp_path_factory.mktemp("with space")
    path = bundle_file(folder / "first.etcl", 2)
    path.chmod(0o444)
    started = serve_bundle(path, "pushed", folder / "store", ServeOptions(any_free_port(), 2, pushes=True))
    yield started
    stop(started)


def expected(bundle: Bundle, task: str) -> dict[str, float]:
    return dict(Predictor(bundle).predict([IMAGE], [task])[0].scores)


@contextmanager
def traffic(server: Server, task: str, bundles: list[Bundle]) -> Iterator[Counter[str]]:
    """Ask all the while; every answer must be one of the bundles', nothing may fail."""
    known = [expected(bundle, task) for bundle in bundles]
    counts: Counter[str] = Counter()
    over = threading.Event()

    def ask() -> None:
        with server.client(retries=0) as client:
            while not over.is_set():
                try:
                    scores = client.predict(png(IMAGE), task).scores
                except EtclError as error:
                    counts[f"failed: {error}"] += 1
                    continue
                right = [n for n, values in enumerate(known) if scores == pytest.approx(values, abs=1e-5)]
                counts[f"bundle {right[0]}" if right else f"wrong: {scores}"] += 1

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_no_request_fails_while_a_bundle_is_replaced(server: Server, tmp_path: Path) -> None:
    """Each answer is the old bundle's or the new one's; afterwards all are the new one's, and nothing is left over."""
    path = bundle_file(tmp_path / "second.etcl", 3, seed=1)
    old, new = load_bundle(server.bundle), load_bundle(path)
    with traffic(server, "täsk 0", [old, new]) as counts:
        given, version = push_bundle(path, server)
    assert set(counts) <= {"bundle 0", "bundle 1"}, counts
    assert counts["bundle 0"]
    assert given.digest == new.digest == load_bundle(server.bundle).digest
    assert version == push.live_version(server)
    with server.client() as client:
        assert client.predict(png(IMAGE), "täsk 2").scores == pytest.approx(expected(new, "täsk 2"), abs=1e-5)
    assert len(server.manage("GET", f"/models/{server.name}/all")) == 1
    store = server.store
    assert sorted(entry.name for entry in store.iterdir()) == ["pushed.mar", "servers"]


def test_a_worker_that_dies_as_the_old_version_is_removed_costs_nothing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for the old version to be done asks again; then it is gone."""
    drain = push._drain

    def drain_after_death(server: Server, version: str) -> None:
        for worker in server.describe(version=version)["workers"]:
            os.kill(int(worker["pid"]), signal.SIGKILL)
        drain(server, version)

    monkeypatch.setattr(push, "_drain", drain_after_death)
    path = bundle_file(tmp_path / "second.etcl", 3, seed=4)
    push_bundle(path, server)
    assert len(server.manage("GET", f"/models/{server.name}/all")) == 1
    with server.client() as client:
        answer = client.predict(png(IMAGE), "täsk 2")
    assert answer.scores == pytest.approx(expected(load_bundle(path), "täsk 2"), abs=1e-5)


def test_a_delta_is_enough(server: Server, tmp_path: Path) -> None:
    """It is applied to the bundle that is served; one for another bundle is refused, and that one goes on."""
    old = bundle_file(tmp_path / "old.etcl", 2)
    push_bundle(old, server)
    write_delta(old, bundle_file(tmp_path / "new.etcl", 4), tmp_path / "d.delta")
    told = run_etcl(
        *("push", tmp_path / "d.delta", "--to", server.inference_url),
        *("--model-store", server.store),
    )
    assert told["tasks"] == [f"täsk {number}" for number in range(4)]
    assert told["version"] == push.live_version(server)
    with server.client() as client:
        assert client.predict(png(IMAGE), "täsk 3").task == "täsk 3"
    with pytest.raises(BundleError, match="belongs to the bundle with digest"):
        push_bundle(tmp_path / "d.delta", server)
    with server.client() as client:
        assert client.predict(png(IMAGE), "täsk 3").task == "täsk 3"


def test_on_any_failure_the_old_bundle_goes_on(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged bundle, a new version that answers otherwise or cannot be reached: the old one answers, alone."""
    path = bundle_file(tmp_path / "next.etcl", 2, seed=2)
    damaged = tmp_path / "damaged.etcl"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    damaged.write_bytes(data)
    live, old = push.live_version(server), load_bundle(server.bundle)
    with traffic(server, "täsk 0", [old]) as counts:
        with pytest.raises(BundleError, match="damaged"):
            push_bundle(damaged, server)

        def wrong(*_: object) -> None:
            raise ServeError("task 'täsk 0' gives class 1 where the bundle gives 0")

        with monkeypatch.context() as patch:
            patch.setattr(push, "_check_answers", wrong)
            with pytest.raises(ServeError, match=f"the new bundle is not served, version {live} still is: task"):
                push_bundle(path, server)
        with monkeypatch.context() as patch:
            patch.setattr(push, "START_SECONDS", 0)
            with pytest.raises(ServeError, match="workers were not ready"):
                push_bundle(path, server)
    assert set(counts) == {"bundle 0"}
    assert push.live_version(server) == live
    assert len(server.manage("GET", f"/models/{server.name}/all")) == 1
    assert load_bundle(server.bundle).digest == old.digest
    assert not list(Path(server.directory).glob("pushed*"))


@pytest.mark.parametrize("last", [1, 2])
def test_a_disk_that_fills_up_leaves_the_old_bundle(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    """Whichever of the archives finds no room: whatever needs some is written before the switch."""
    path = bundle_file(tmp_path / "next.etcl", 2, seed=3)
    live, old = push.live_version(server), load_bundle(server.bundle)
    write, calls = to_mar._run_archiver, []

    def without_room(contents: dict[str, bytes], name: str, version: str, target: Path) -> None:
        calls.append(version)
        if len(calls) == last:
            target.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        write(contents, name, version, target)

    monkeypatch.setattr(to_mar, "_run_archiver", without_room)
    with traffic(server, "täsk 0", [old]) as counts, pytest.raises(OSError, match="No space"):
        push_bundle(path, server)
    assert set(counts) <= {"bundle 0"}, counts
    assert push.live_version(server) == live and load_bundle(server.bundle).digest == old.digest
    store = server.store
    assert sorted(entry.name for entry in store.iterdir()) == ["pushed.mar", "servers"]


def test_a_server_is_found_by_its_url(server: Server) -> None:
    """That of its predictions or of its management; any other is refused with those there are."""
    store = server.store
    for url in (server.inference_url, server.management_url, f"http://localhost:{server.port}"):
        assert find_server(url, store) == server
    with pytest.raises(ServeError, match=f"known: {server.management_url}"):
        find_server("http://127.0.0.1:1/models/x", store)


def test_two_servers_of_one_store_stand_side_by_side(server: Server, tmp_path: Path) -> None:
    """Each answers for its own bundle and takes its own token, wherever the file with it lies; one stops alone.

    The second lets nobody push: the model API is off unless asked for, for those who have the token too.
    """
    path = bundle_file(tmp_path / "x.etcl", 1, seed=7)
    started = serve_bundle(path, "fixed", server.store, ServeOptions(any_free_port(), 1))
    try:
        elsewhere = tmp_path / "some where" / "keys.json"
        elsewhere.parent.mkdir()
        elsewhere.write_bytes(started.token_file.read_bytes())
        with Client(started.inference_url, token_file=elsewhere) as client:
            assert client.predict(png(IMAGE), "täsk 0").scores == pytest.approx(expected(load_bundle(path), "täsk 0"))
        with Client(started.inference_url, token_file=server.token_file) as client, pytest.raises(TokenError):
            client.predict(png(IMAGE), "täsk 0")
        with pytest.raises(ServeError, match="started without --allow-push"):
            push_bundle(path, started)
        with pytest.raises(ServeError, match=r"was answered 40[45]"):
            started.manage("POST", "/models", url="fixed.mar")
        with Client(started.inference_url) as client, pytest.raises(TokenError, match="wants a token"):
            client.predict(png(IMAGE), "täsk 0")
    finally:
        stop(started)
    with server.client() as client:
        answer = client.predict(png(IMAGE), "täsk 0")
    assert answer.scores == pytest.approx(expected(load_bundle(server.bundle), "täsk 0"), abs=1e-5)
