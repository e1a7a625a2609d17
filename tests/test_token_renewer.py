"""Tokens that are renewed before they expire."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from conftest import ETCL
from factories import made_bundle

from etcl_deploy.bundle.bundle import save
from etcl_deploy.errors import ServeError
from etcl_deploy.serve import token_renewer
from etcl_deploy.serve.process import start_renewer, stop
from etcl_deploy.serve.properties import any_free_port
from etcl_deploy.serve.server import Server
from etcl_deploy.serve.start import ServeOptions, serve_bundle


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("token_renewer")
    save(folder / "x.etcl", made_bundle(1).to_bytes("coded"))
    started = serve_bundle(folder / "x.etcl", "kept", folder / "store", ServeOptions(any_free_port(), 1))
    yield started
    stop(started)


def renewers(server: Server) -> list[psutil.Process]:
    lines = ((process, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))
    return [p for p, words in lines if "etcl_deploy.serve.token_renewer" in words and server.directory in words]


@pytest.mark.torchserve
@pytest.mark.parametrize("part", [1.0, 0.5])
def test_management_outlives_a_renewal(server: Server, part: float) -> None:
    """A new token is in force shortly before it is in the file, or before all of it is; a wrong one is refused."""
    old = server.token_file.read_bytes()
    token_renewer.renew(server.token_file, server.management_address)
    new = server.token_file.read_bytes()
    server.token_file.write_bytes(old[: int(part * len(old))])
    writer = threading.Timer(0.25, server.token_file.write_bytes, [new])
    writer.start()
    try:
        assert server.describe()["modelName"] == "kept"
        writer.join()
        server.token_file.write_bytes(old[: int(part * len(old))])
        with pytest.raises(ServeError, match=r"was answered 400: Token Authorization|holds no tokens"):
            server.describe()
    finally:
        writer.join()
        server.token_file.write_bytes(new)


@pytest.mark.torchserve
def test_the_status_tells_when_nobody_renews(server: Server) -> None:
    """A renewer that is gone is not missed for an hour; whoever asks before is told."""
    words = [ETCL, "serve", "--status", "--name", server.name, "--model-store", server.store]
    told = [subprocess.run(words, capture_output=True, text=True, check=True).stderr]
    renewer = token_renewer.renewer_of(Path(server.directory))
    assert renewer
    renewer.kill()
    renewer.wait(10)
    told.append(subprocess.run(words, capture_output=True, text=True, check=True).stderr)
    start_renewer(Path(server.directory))
    assert ["no longer renewed" in text for text in told] == [False, True]


@pytest.mark.torchserve
def test_a_renewer_renews_in_time_and_ends_with_its_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that finds too little time left renews at once; the server's own is there, and goes when it goes."""
    assert renewers(server) == [token_renewer.renewer_of(Path(server.directory))]
    assert 3000 < token_renewer.seconds_left(server.token_file) <= 3600
    old = server.token()
    tokens: list[str] = []

    def over(seconds: float) -> None:
        tokens.append(server.token())
        stop(server)

    with monkeypatch.context() as patch:
        patch.setattr(token_renewer, "time", SimpleNamespace(sleep=over))  # its own alone: stopping takes naps as well
        token_renewer.run(Path(server.directory), early=7200)
    assert tokens and tokens[0] != old
    assert renewers(server) == []


def test_times_are_read_as_java_writes_them(tmp_path: Path) -> None:
    """With nine digits behind the point, fewer, or none; the first to expire counts."""
    soon = datetime.now(timezone.utc) + timedelta(seconds=100)
    texts = (f"{soon:%Y-%m-%dT%H:%M:%S}.123456789Z", f"{soon:%Y-%m-%dT%H:%M:%S}Z", f"{soon:%Y-%m-%dT%H:%M:%S}.5Z")
    for text in texts:
        keys = {"management": {"expiration time": "2999-01-01T00:00:00Z"}, "inference": {"expiration time": text}}
        (tmp_path / "keys.json").write_text(json.dumps(keys))
        assert 95 < token_renewer.seconds_left(tmp_path / "keys.json") < 101
