"""The client, sync and async alike, against a real TorchServe and, for faults that one will not show, a stand-in."""

from __future__ import annotations

import asyncio
import copy
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from conftest import Learned
from loopback import answering, expect

from etcl_deploy.bundle.bundle import Bundle, load_bundle, save
from etcl_deploy.client import client as module
from etcl_deploy.client.client import AsyncClient, Client
from etcl_deploy.core.pixels import png
from etcl_deploy.core.prediction import Prediction
from etcl_deploy.errors import ClientError, EtclError, RequestError, ServerUnavailableError, TokenError
from etcl_deploy.export.to_mar import archive
from etcl_deploy.runtime.predictor import Predictor
from etcl_deploy.serve import token_renewer
from etcl_deploy.serve.process import serving
from etcl_deploy.serve.properties import any_free_port
from etcl_deploy.serve.server import Server

Result = TypeVar("Result")
# Its last byte in UTF-8 is a space in Latin-1, and it would end a path early.
FOREIGN = "Straße/数字 naïve à"
ANSWER = {"task": "t", "label": "cat", "index": 0, "scores": {"cat": 0.75, "dog": 0.25}}
SOUND = (200, json.dumps(ANSWER))
FULL = (503, '{"code": 503, "type": "ServiceUnavailableException", "message": "the queue is full"}')
DIED = (507, '{"code": 507, "type": "InternalServerException", "message": "Worker died."}')
REFUSED = (400, '{"code": 400, "type": "InvalidKeyException", "message": "Token Authorization failed."}')
DROP, HANG = (0, "drop"), (0, "hang")


class Driven:
    """An AsyncClient carried to the end of each call, so that one test reads for both."""

    def __init__(self, url: str, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        try:
            self.client = AsyncClient(url, **options)
        except BaseException:
            self.loop.close()
            raise

    def wait(self, result: Awaitable[Result]) -> Result:
        return self.loop.run_until_complete(result)

    def predict(self, image: Any, task: str) -> Prediction:
        return self.wait(self.client.predict(image, task))

    def predict_many(self, images: Any, tasks: Any) -> list[Prediction | RequestError]:
        return self.wait(self.client.predict_many(images, tasks))

    def __enter__(self) -> Driven:
        assert self.wait(self.client.__aenter__()) is self.client
        return self

    def __exit__(self, *_: object) -> None:
        self.wait(self.client.__aexit__())
        assert not asyncio.all_tasks(self.loop)
        self.loop.close()


Connect = Callable[..., Client | Driven]


@pytest.fixture(params=[Client, Driven], ids=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Any:
    """Client, or AsyncClient made to look like it."""
    return request.param


class StandIn:
    """A server on loopback that answers as it is told, the last answer over and over, and counts."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, str]] = [SOUND]
        self.seconds = 0.0  # for each answer
        self.tokens: list[str | None] = []
        self.connections: set[Any] = set()
        self.now = self.most = 0
        self.lock, self.over = threading.Lock(), threading.Event()
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 20

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                status, body = stand_in.begin(self.headers["Authorization"], self.client_address)
                time.sleep(stand_in.seconds)
                if (status, body) == HANG:
                    stand_in.over.wait(20)
                stand_in.end()
                if not status:
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("Content-Length", str(len(body.encode())))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.handler, self.url = Handler, ""

    @property
    def count(self) -> int:
        return len(self.tokens)

    def begin(self, token: str | None, connection: Any) -> tuple[int, str]:
        with self.lock:
            self.tokens.append(token)
            self.connections.add(connection)
            self.now += 1
            self.most = max(self.most, self.now)
            return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def end(self) -> None:
        with self.lock:
            self.now -= 1


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.01)
    server = StandIn()
    with answering(server.handler) as address:
        server.url = f"{address}/predictions/t"
        yield server
        server.over.set()


@pytest.mark.parametrize(
    "fault", [FULL, DIED, (500, DIED[1]), DROP, HANG, (502, "<html>"), (504, "")], ids=lambda fault: str(fault)[:12]
)
def test_what_may_pass_is_asked_again(connect: Connect, stand_in: StandIn, fault: tuple[int, str]) -> None:
    """A full queue, a dead worker, a lost connection or request, a proxy without a server: twice, then the answer."""
    stand_in.answers = [fault, fault, SOUND]
    with connect(stand_in.url, timeout=0.3 if fault == HANG else 30) as client:
        assert client.predict(b"image", "t") == Prediction(**ANSWER)  # type: ignore[arg-type]
    assert stand_in.count == 3


def test_attempts_are_bounded_and_told(connect: Connect, stand_in: StandIn) -> None:
    """The error says how often the server was asked and what happened last."""
    stand_in.answers = [DROP, FULL]
    with connect(stand_in.url, retries=2) as client, pytest.raises(ServerUnavailableError) as error:
        client.predict(b"image", "t")
    assert (stand_in.count, error.value.attempts) == (3, 3)
    assert "asked 3 times; last: the queue is full (503 service_unavailable)" in str(error.value)


def test_no_server_at_all(connect: Connect, stand_in: StandIn) -> None:
    """A refused connection is an error of ours, with its cause."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/predictions/t"
        for retries, words in ((0, "asked once"), (1, "asked 2 times")):
            with connect(url, retries=retries) as client, pytest.raises(ServerUnavailableError, match=words) as error:
                client.predict(b"image", "t")
            assert isinstance(error.value.__cause__, httpx.ConnectError)


def test_pauses_grow_and_differ() -> None:
    """Each pause is between half and all of twice the one before, up to the longest."""
    with Client("http://127.0.0.1:9/predictions/t", retries=9) as client:
        steps = client._steps(b"image", "t")
        next(steps)
        pauses = []
        for _ in range(9):
            pauses.append(steps.send(httpx.ConnectError("refused")))
            assert isinstance(next(steps), httpx.Request)
    wanted = [0.25, 0.5, 1, 2, 4, 8, 8, 8, 8]
    for pause, most in zip(pauses, wanted, strict=True):
        assert isinstance(pause, float)
        assert most / 2 <= pause <= most


@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (400, '{"error": {"code": "bad_image", "message": "why"}}', "bad_image"),
        (404, '{"code": 404, "type": "ModelNotFoundException", "message": "why"}', "model_not_found"),
        (413, "", "too_large"),
        (429, '{"message": "why"}', "unexpected_answer"),
        (500, '{"error": {"code": "internal_error", "message": "why"}}', "internal_error"),
        (302, "", "unexpected_answer"),
        (200, "", "unexpected_answer"),
        (200, "<html>", "unexpected_answer"),
        (200, "\udcff".encode("utf-8", "surrogatepass").decode("latin-1"), "unexpected_answer"),
        (200, "[" * 100_000, "unexpected_answer"),
        (200, "[]", "unexpected_answer"),
        (200, "{}", "unexpected_answer"),
        (200, json.dumps([ANSWER, ANSWER]), "unexpected_answer"),
        (200, json.dumps({**ANSWER, "index": "0"}), "unexpected_answer"),
        (200, json.dumps({**ANSWER, "scores": {"cat": None}}), "unexpected_answer"),
        (500, json.dumps(ANSWER), "unexpected_answer"),
    ],
)
def test_what_will_not_pass_is_not_asked_again(
    connect: Connect, stand_in: StandIn, status: int, body: str, code: str
) -> None:
    """A refusal or an answer of another shape is told at once, with status, code and message."""
    stand_in.answers = [(status, body)]
    with connect(stand_in.url) as client, pytest.raises(RequestError) as error:
        client.predict(b"image", "t")
    assert (error.value.status, error.value.code) == (status, code)
    assert error.value.message
    assert len(str(error.value)) < 300
    assert stand_in.count == 1


def test_connections_are_kept(connect: Connect, stand_in: StandIn) -> None:
    """One after the other, all requests use one connection."""
    with connect(stand_in.url) as client:
        for _ in range(5):
            client.predict(b"image", "t")
    assert (stand_in.count, len(stand_in.connections)) == (5, 1)


def test_requests_under_way_are_bounded(connect: Connect, stand_in: StandIn) -> None:
    """Several at once, but never more than `concurrency`."""
    stand_in.seconds = 0.03
    with connect(stand_in.url, concurrency=3) as client:
        assert len(client.predict_many([b"image"] * 12, "t")) == 12
    assert (stand_in.count, stand_in.most) == (12, 3)


def test_what_concerns_all_ends_all(connect: Connect, stand_in: StandIn) -> None:
    """A refused token, or a server that is gone, is not found out once for every image."""
    for answer, error in ((REFUSED, TokenError), (FULL, ServerUnavailableError)):
        stand_in.answers, before = [answer], stand_in.count
        with connect(stand_in.url, token="key", retries=0, concurrency=2) as client, pytest.raises(error):
            client.predict_many([b"image"] * 500, "t")
        assert stand_in.count - before < 100


def test_each_image_needs_a_task(connect: Connect, stand_in: StandIn) -> None:
    """Lists of different length are refused before anything is sent; no images give no answers."""
    with connect(stand_in.url) as client:
        with pytest.raises(ValueError, match="2 images and 1 tasks"):
            client.predict_many([b"image"] * 2, ["t"])
        assert client.predict_many([], "t") == []
    assert stand_in.count == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read the token file"),
        ("", "holds no tokens"),
        ('{"management": {"key": "k"}}', "holds no inference token"),
        ("[1]", "holds no tokens"),
        ('{"inference": "k"}', "holds no inference token"),
        ('{"inference": {"key": 7}}', "the inference token in"),
        ('{"inference": {"key": "a\\nb"}}', "the inference token in"),
    ],
)
def test_a_token_file_that_is_none_is_named(connect: Connect, tmp_path: Path, text: str | None, words: str) -> None:
    """Missing or broken: the error says which file, before anything is sent."""
    path = tmp_path / "key_file.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(TokenError, match=words) as error:
        connect("http://127.0.0.1:9/predictions/t", token_file=path)
    assert str(path) in str(error.value)


def test_a_token_file_is_read_again_once_per_request(connect: Connect, stand_in: StandIn, tmp_path: Path) -> None:
    """Refused twice is refused; a token by itself is refused at once."""
    path = tmp_path / "key_file.json"
    path.write_text('{"inference": {"key": "old"}}')
    stand_in.answers = [REFUSED]
    with connect(stand_in.url, token_file=path) as client:
        path.write_text('{"inference": {"key": "new"}}')
        with pytest.raises(TokenError, match=r"refuses the token in .*key_file.json"):
            client.predict(b"image", "t")
        assert stand_in.tokens == ["Bearer old", "Bearer new"]
        path.unlink()
        with pytest.raises(TokenError, match="cannot read the token file"):
            client.predict(b"image", "t")
        path.write_text('{"inference": {"key": "right"}}')
        stand_in.answers = [REFUSED, SOUND]
        assert client.predict(b"image", "t").label == "cat", "a client outlives a wrong file"
    stand_in.answers = [REFUSED]
    with connect(stand_in.url, token="mine") as client, pytest.raises(TokenError, match="wrong or has expired"):
        client.predict(b"image", "t")
    with connect(stand_in.url) as client, pytest.raises(TokenError, match="give token_file"):
        client.predict(b"image", "t")
    assert stand_in.tokens[2:] == ["Bearer new", "Bearer new", "Bearer right", "Bearer mine", None]


def test_wrong_arguments_are_refused_at_once(connect: Connect) -> None:
    """Two tokens, a URL nobody can ask, a token no header can carry; and the token is not repeated."""
    with pytest.raises(ValueError, match="not both"):
        connect("http://127.0.0.1:9/predictions/t", token="a", token_file="b")
    for url in ("127.0.0.1:8080/predictions/t", "ftp://127.0.0.1/", "http://", "http://127.0.0.1:port/", ""):
        with pytest.raises(ClientError, match="is no URL to ask"):
            connect(url)
    for token in ("", "secret\n", "secret secret", "sécret"):
        with pytest.raises(TokenError) as error:
            connect("http://127.0.0.1:9/predictions/t", token=token)
        assert "cret" not in str(error.value)


def test_no_proxy_comes_between(connect: Connect, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy named by the environment sees no token."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with connect(stand_in.url, token="key", retries=0) as client:
        assert client.predict(b"image", "t").label == "cat"


def test_errors_are_ours_and_can_be_copied() -> None:
    """So they pass between processes too."""
    for error in (RequestError(404, "unknown_task", "why"), ServerUnavailableError("u", 2, "l"), TokenError("t")):
        again = copy.copy(error)
        assert isinstance(again, ClientError | EtclError)
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_importing_the_client_is_light() -> None:
    """It loads neither torch nor numpy."""
    code = "import sys, etcl_deploy.client.client; sys.exit(bool({'torch', 'numpy', 'PIL'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@dataclass(frozen=True)
class Served:
    """A real server and the bundle it serves, whose first task has a name of all sorts of characters."""

    server: Server
    bundle: Bundle

    def expect(self, answer: Any, image: Any, task: str) -> None:
        """The answer is the Predictor's."""
        assert isinstance(answer, Prediction), answer
        expect(answer.as_json(), Predictor(self.bundle).predict([image], [task])[0])


@pytest.fixture(scope="module")
def served(learned: Learned, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    store = tmp_path_factory.mktemp("store")
    first, *others = learned.bundle.tasks.values()
    tasks = {task.name: task for task in (replace(first, name=FOREIGN), *others)}
    save(store / "digits.etcl", replace(learned.bundle, tasks=tasks).to_bytes("packed"))
    archive(store / "digits.etcl", "digits", store, {"batchSize": 8, "maxBatchDelay": 20})
    with serving("digits", store, any_free_port()) as server:
        yield Served(server, load_bundle(store / "digits.etcl"))


@pytest.mark.torchserve
def test_every_kind_of_image_gives_the_predictors_answer(
    connect: Connect, served: Served, learned: Learned, tmp_path: Path
) -> None:
    """Bytes, paths, lists, tensors and arrays, for a plain and for a foreign name."""
    pixels = learned.tasks[0].test_x[0]
    path = tmp_path / "digit.png"
    path.write_bytes(png(pixels))
    images: list[Any] = [png(pixels), bytearray(png(pixels)), memoryview(png(pixels)), path, str(path)]
    images += [pixels.tolist(), pixels, pixels.numpy(), tuple(pixels.tolist())]
    with connect(served.server.inference_url, token_file=served.server.token_file) as client:
        for task in (FOREIGN, "parity"):
            for image in images:
                served.expect(client.predict(image, task), pixels, task)


@pytest.mark.torchserve
def test_one_bad_among_many_harms_nobody(connect: Connect, served: Served, learned: Learned, tmp_path: Path) -> None:
    """Every place holds its own prediction or its own error, in order."""
    good = [(task.test_x[1], name) for task, name in zip(learned.tasks, served.bundle.tasks, strict=True)]
    image = png(good[0][0])
    bad: list[tuple[Any, str, int | None, str]] = [
        (image, "nobody", 404, "unknown_task"),
        (image, " parity\n", 404, "unknown_task"),
        (image, "", 400, "missing_task"),
        (b"not an image", "parity", 400, "bad_image"),
        (b"", "parity", 400, "bad_request"),
        ([[1, 2], [3]], "parity", 400, "bad_image"),
        (bytes(7_000_000), "parity", 413, "too_large"),
        (tmp_path / "nowhere.png", "parity", None, "bad_image"),
        ([[float("nan")]], "parity", None, "bad_image"),
        (object(), "parity", None, "bad_image"),
    ]
    images = [item for number, row in enumerate(bad) for item in (row[0], png(good[number % 5][0]))]
    tasks = [item for number, row in enumerate(bad) for item in (row[1], good[number % 5][1])]
    with connect(served.server.inference_url, token_file=served.server.token_file) as client:
        answers = client.predict_many(images, tasks)
        with pytest.raises(RequestError, match="unknown task 'nobody'; this bundle holds: Straße"):
            client.predict(image, "nobody")
    errors = [answer for answer in answers[::2] if isinstance(answer, RequestError)]
    assert [(error.status, error.code) for error in errors] == [(status, code) for _, _, status, code in bad]
    assert "nowhere.png" in errors[7].message
    for number, answer in enumerate(answers[1::2]):
        served.expect(answer, *good[number % 5])


@pytest.mark.torchserve
def test_an_unknown_model_is_a_request_error(connect: Connect, served: Served) -> None:
    """What TorchServe itself refuses has the same type."""
    with (
        connect(f"{served.server.inference_url}-not", token_file=served.server.token_file) as client,
        pytest.raises(RequestError, match="Model not found") as error,
    ):
        client.predict(b"image", "parity")
    assert (error.value.status, error.value.code) == (404, "model_not_found")


@pytest.mark.torchserve
def test_a_token_the_server_replaced_is_read_again(connect: Connect, served: Served, learned: Learned) -> None:
    """The client goes on with the new one, in the middle of many requests too."""
    server, pixels = served.server, learned.tasks[4].test_x[0]
    with connect(server.inference_url, token_file=server.token_file) as client:
        served.expect(client.predict(pixels, "parity"), pixels, "parity")
        old = server.token()
        token_renewer.renew(server.token_file, server.management_address)
        assert server.token() != old
        assert server.describe()["modelName"] == "digits", "the management token was renewed, too"
        for answer in client.predict_many([pixels] * 8, "parity"):
            served.expect(answer, pixels, "parity")
    with connect(server.inference_url, token=old) as client, pytest.raises(TokenError, match="has expired"):
        client.predict(pixels, "parity")


@pytest.mark.torchserve
def test_a_worker_that_dies_is_outlived(connect: Connect, served: Served, learned: Learned) -> None:
    """Every request is answered, though the only worker was killed while they were under way."""
    pixels = learned.tasks[4].test_x[0]
    process = served.server.process()
    assert process is not None
    workers = process.children(recursive=True)
    assert workers
    with connect(served.server.inference_url, token_file=served.server.token_file, timeout=8) as client:
        killer = threading.Timer(0.05, lambda: [worker.kill() for worker in workers])
        killer.start()
        answers = client.predict_many([pixels] * 40, "parity")
        killer.join()
        for answer in (*answers, client.predict(pixels, "parity")):
            served.expect(answer, pixels, "parity")
