"""A client for what `etcl serve` started: images in, predictions out.

with Client("http://127.0.0.1:8080/predictions/photos", token_file="key_file.json") as photos:
    print(photos.predict("rex.jpg", "dogs").label)

`BaseClient` decides what to send, what an answer means and what to do next, and sends nothing itself. Client and
AsyncClient carry out its steps. A prediction changes nothing on the server, so it may be asked for again.
"""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from os import PathLike
from pathlib import Path
from typing import Any, Generic, TypeVar

import httpx

from etcl_deploy.client.protocol import KEY_FILE, Answer, Image, checked_token, checked_url, encode, read, read_token
from etcl_deploy.core.prediction import Prediction
from etcl_deploy.errors import RequestError, ServerUnavailableError, TokenError

CONNECT_SECONDS = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 8.0  # seconds between attempts, doubled each time
# TorchServe takes a new token into use shortly before it writes it to the file.
RENEWAL_SECONDS, RENEWAL_TRIES = 0.1, 10
# A request TorchServe loses when its worker dies is never answered: waiting in vain is worth another attempt too.
LOST = (httpx.NetworkError, httpx.TimeoutException, httpx.RemoteProtocolError)
UNAVAILABLE = (502, 503, 504)  # the queue is full, there is no worker, or a proxy in front finds no server
# TorchServe's word for a worker that died. Our handler's own 500 is `internal_error`: asking again would not help.
WORKER_DIED = ((500, "internal_server"), (507, "internal_server"))
REFUSED_TOKEN = (400, "invalid_key")


Step = httpx.Request | float | Prediction  # send this, wait so many seconds, or be done
Reply = httpx.Response | httpx.RequestError | None  # of a request: what became of it; of a pause: nothing
Http = TypeVar("Http")  # httpx.Client or httpx.AsyncClient


class BaseClient(ABC, Generic[Http]):
    """Everything a client knows and decides, whichever way its requests are sent.

    `token_file` is the server's key_file.json: it is read again when a token is refused. `timeout` is for each attempt,
    in seconds; `retries` are the attempts after the first; `concurrency` is how many requests of `predict_many` are
    under way at once.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        token_file: str | PathLike[str] | None = None,
        timeout: float = 30.0,
        retries: int = 4,
        concurrency: int = 16,
    ) -> None:
        if token is not None and token_file is not None:
            raise ValueError("give token or token_file, not both")
        self._url = checked_url(url)
        self._token_file = None if token_file is None else Path(token_file)
        self._token = None if token is None else checked_token(token, "the token")
        if self._token_file:
            self._token = read_token(self._token_file)
        self._retries = retries
        self._concurrency = concurrency
        self._http: Http = self._open(
            trust_env=False,  # no proxy the environment names should see the token
            timeout=httpx.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS), pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=concurrency),
        )

    @abstractmethod
    def _open(self, **settings: Any) -> Http:
        """The httpx client that sends requests and keeps connections."""

    def _steps(self, image: Image, task: str) -> Generator[Step, Reply, None]:
        """The steps that lead to a prediction; the caller sends back the outcome of each, which decides the next."""
        body, headers = encode(image, task)
        attempts, renewed = 0, False
        while True:
            used = self._token  # other threads may change it meanwhile
            bearer = {b"Authorization": f"Bearer {used}".encode()} if used else {}
            outcome = yield httpx.Request("POST", self._url, headers={**headers, **bearer}, content=body)
            answer = read(outcome) if isinstance(outcome, httpx.Response) else outcome
            if isinstance(answer, Prediction):
                yield answer
            elif isinstance(answer, RequestError) and (answer.status, answer.code) == REFUSED_TOKEN:
                if renewed or not self._token_file:
                    raise TokenError(self._refusal())
                for left in reversed(range(RENEWAL_TRIES)):  # the file may not be written yet, or only in part
                    yield RENEWAL_SECONDS
                    try:
                        token = read_token(self._token_file)
                    except TokenError:
                        if not left:
                            raise
                        continue
                    if token != used:
                        break
                self._token, renewed = token, True
            elif isinstance(answer, RequestError) and not may_pass(answer):
                raise answer
            else:
                attempts += 1
                if attempts > self._retries or not may_pass(answer):
                    last = str(answer) if isinstance(answer, RequestError) else f"{type(answer).__name__}: {answer}"
                    raise ServerUnavailableError(self._url, attempts, last) from answer
                pause = min(FIRST_PAUSE * 2.0 ** (attempts - 1), LONGEST_PAUSE)
                yield pause * random.uniform(0.5, 1.0)  # those who failed together do not come back together

    def _refusal(self) -> str:
        if self._token_file:
            return f"{self._url} refuses the token in {self._token_file}, also when read again: has it expired?"
        if self._token:
            return f"{self._url} refuses the token: it is wrong or has expired; a token_file would be read again"
        return f"{self._url} wants a token: give token_file, the server's {KEY_FILE}"


class Client(BaseClient[httpx.Client]):
    """Predictions from a server; threads may share one client and its connections. Options: see BaseClient."""

    def predict(self, image: Image, task: str) -> Prediction:
        """The answer for an image file, as bytes or by its path, or for pixels from 0 to 255."""
        steps, outcome = self._steps(image, task), None
        while not isinstance(step := steps.send(outcome), Prediction):
            outcome = self._carry_out(step)
        return step

    def predict_many(self, images: Iterable[Image], tasks: str | Iterable[str]) -> list[Answer]:
        """For each image, in order, the prediction or what is wrong with it; `tasks` has one for each, or is for all.

        Raises TokenError and ServerUnavailableError: they concern every image.
        """

        def answer(pair: tuple[Image, str]) -> Answer:
            try:
                return self.predict(*pair)
            except RequestError as error:
                return error

        with ThreadPoolExecutor(self._concurrency) as pool:
            return list(pool.map(answer, paired(images, tasks)))

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, **settings: Any) -> httpx.Client:
        return httpx.Client(**settings)

    def _carry_out(self, step: httpx.Request | float) -> Reply:
        if not isinstance(step, httpx.Request):
            time.sleep(step)
            return None
        try:
            return self._http.send(step)
        except httpx.RequestError as error:
            return error


class AsyncClient(BaseClient[httpx.AsyncClient]):
    """The same as Client, with coroutines, for asyncio."""

    async def predict(self, image: Image, task: str) -> Prediction:
        """The answer for an image file, as bytes or by its path, or for pixels from 0 to 255."""
        steps, outcome = self._steps(image, task), None
        while not isinstance(step := steps.send(outcome), Prediction):
            outcome = await self._carry_out(step)
        return step

    async def predict_many(self, images: Iterable[Image], tasks: str | Iterable[str]) -> list[Answer]:
        """For each image, in order, the prediction or what is wrong with it; `tasks` has one for each, or is for all.

        Raises TokenError and ServerUnavailableError: they concern every image.
        """
        gate = asyncio.Semaphore(self._concurrency)

        async def answer(image: Image, task: str) -> Answer:
            async with gate:
                try:
                    return await self.predict(image, task)
                except RequestError as error:
                    return error

        asking = [asyncio.create_task(answer(*pair)) for pair in paired(images, tasks)]
        try:
            return await asyncio.gather(*asking)
        finally:
            for each in asking:
                each.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _open(self, **settings: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(**settings)

    async def _carry_out(self, step: httpx.Request | float) -> Reply:
        if not isinstance(step, httpx.Request):
            await asyncio.sleep(step)
            return None
        try:
            return await self._http.send(step)
        except httpx.RequestError as error:
            return error


def may_pass(trouble: RequestError | httpx.RequestError | None) -> bool:
    """Whether the same request may succeed a little later."""
    if isinstance(trouble, RequestError):
        return trouble.status in UNAVAILABLE or (trouble.status, trouble.code) in WORKER_DIED
    return isinstance(trouble, LOST)


def paired(images: Iterable[Image], tasks: str | Iterable[str]) -> list[tuple[Image, str]]:
    """Each image with its task."""
    images = list(images)
    names = [tasks] * len(images) if isinstance(tasks, str) else list(tasks)
    if len(images) != len(names):
        raise ValueError(f"{len(images)} images and {len(names)} tasks: each needs one")
    return list(zip(images, names, strict=True))
