"""Tokens that are renewed before they expire."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from conftest import ETCL
from factories import made_bundle
from test_push import IMAGE

from etcl_deploy.bundle.bundle import save
from etcl_deploy.client.client import RENEWAL_TRIES, Client
from etcl_deploy.core.pixels import png
from etcl_deploy.errors import ServeError, TokenError
from etcl_deploy.serve import server as serve_server
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
def test_renewed_tokens_take_the_place_of_the_old_ones(server: Server) -> None:
    """The old one is refused; a client that has the file notices and goes on, one with the old token is told."""
    old = server.token()
    with Client(server.inference_url, token_file=server.token_file) as client:
        before = client.predict(png(IMAGE), "täsk 0")
        token_renewer.renew(server.token_file, server.management_address)
        assert server.token() != old
        assert client.predict(png(IMAGE), "täsk 0") == before
    with Client(server.inference_url, token=old) as client, pytest.raises(TokenError):
        client.predict(png(IMAGE), "täsk 0")
    assert server.describe()["modelName"] == "kept", "the management token was renewed, too"


@pytest.mark.torchserve
@pytest.mark.parametrize("part", [1.0, 0.5])
def test_management_outlives_a_renewal(server: Server, monkeypatch: pytest.MonkeyPatch, part: float) -> None:
    """A new token is in force shortly before it is in the file, or before all of it is; a wrong one is refused."""
    old = server.token_file.read_bytes()
    token_renewer.renew(server.token_file, server.management_address)
    new = server.token_file.read_bytes()
    server.token_file.write_bytes(old[: int(part * len(old))])
    pauses: list[float] = []

    def write_the_new_ones(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            server.token_file.write_bytes(new)

    monkeypatch.setattr(serve_server.time, "sleep", write_the_new_ones)
    assert server.describe()["modelName"] == "kept" and len(pauses) == 3
    try:
        server.token_file.write_bytes(old[: int(part * len(old))])
        with pytest.raises(ServeError, match=r"was answered 400: Token Authorization|holds no tokens"):
            server.describe()
    finally:
        server.token_file.write_bytes(new)
    assert len(pauses) == 3 + RENEWAL_TRIES


@pytest.mark.torchserve
def test_the_status_tells_when_nobody_renews(server: Server) -> None:
    """A renewer that is gone is not missed for an hour; whoever asks before is told."""
    words = [ETCL, "serve", "--status", "--name", server.name, "--model-store", server.store]
    told = [subprocess.run(words, capture_output=True, text=True, check=True).stderr]
    found = token_renewer.renewer_of(Path(server.directory))
    assert found
    found.kill()
    found.wait(10)
    told.append(subprocess.run(words, capture_output=True, text=True, check=True).stderr)
    start_renewer(Path(server.directory))
    assert ["nobody renews its tokens" in text for text in told] == [False, True]


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
