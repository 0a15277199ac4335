"""One HTTP client for every engine server: JSON in, JSON or server-sent events out, with patience.

It knows no engine's protocol. Invariant: nothing is sent twice once a first event of its answer was seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

import aiohttp
import msgspec
import orjson
from yarl import URL

from outrider.engines.backoff import Backoff
from outrider.engines.failures import StatusFailure
from outrider.engines.sse import SseReader
from outrider.errors import EngineError, EngineUnavailable

CONNECTION_ERRORS = (aiohttp.ClientError, OSError, TimeoutError)
CONNECT_SECONDS = 10.0
CONTROL_SECONDS = 30.0
MAX_CONNECTIONS = 4096
MAX_ERROR_BODY = 64 << 10
READ_BUFFER = 256 << 10
# uvicorn, under vLLM and SGLang, closes idle connections after 5 s: giving them up first avoids the race.
KEEP_ALIVE_SECONDS = 4.0
DONE = b"[DONE]"


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How often a request is tried in all, and the waits between. A server's Retry-After is honoured up to the
    longest wait."""

    attempts: int = 4
    backoff: Backoff = Backoff(first=0.2, longest=10.0)

    def wait(self, attempt: int, asked: float | None) -> float:
        """Seconds to wait after failed attempt number `attempt` (from 0)."""
        return self.backoff.wait(attempt) if asked is None else min(asked, self.backoff.longest)


DEFAULT_RETRY = RetryPolicy()


def encode(body: Any) -> bytes:
    """JSON, with numpy arrays of token ids written directly."""
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


class HttpClient:
    """The connections to one engine server. `start` and `close` bracket its use.

    Every method raises EngineUnavailable when the server cannot be reached or stops answering, and
    StatusFailure when it answers with a status of 400 or more.
    """

    def __init__(self, name: str, url: str, *, api_key: str | None = None, retry: RetryPolicy = DEFAULT_RETRY) -> None:
        self._name = name
        self._url = url
        self._retry = retry
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._targets: dict[str, URL] = {}
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS, keepalive_timeout=KEEP_ALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
            read_bufsize=READ_BUFFER,
        )

    async def close(self) -> None:
        """Ends every exchange in flight; each of them raises EngineUnavailable."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def get(self, path: str) -> Any:
        """The JSON answer to a GET (None for an empty one), tried once."""
        return await self._call("GET", path, None, CONTROL_SECONDS)

    async def post(self, path: str, body: Any = None, *, seconds: float | None = CONTROL_SECONDS) -> Any:
        """The JSON answer to a POST (None for an empty one), tried once; `seconds` None waits for ever."""
        return await self._call("POST", path, None if body is None else encode(body), seconds)

    async def events(
        self, path: str, body: Callable[[int], bytes], headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[bytes, None]:
        """POST `body(attempt)` and yield the answer's SSE payloads up to `[DONE]` or its end.

        Connection failures and transient statuses are retried until the first payload came. Closing the
        generator closes the connection, which aborts the work upstream.
        """
        for attempt in range(self._retry.attempts):
            begun = False
            last = attempt + 1 == self._retry.attempts
            asked: float | None = None
            try:
                async with aclosing(self._exchange(path, body(attempt), headers)) as payloads:
                    async for payload in payloads:
                        begun = True
                        yield payload
                    return
            except CONNECTION_ERRORS as error:
                if begun or last or self._session is None:
                    raise self._unavailable(error) from error
            except RuntimeError as error:  # how aiohttp ends a read when its session is closed
                if self._session is not None:
                    raise
                raise self._unavailable(error) from error
            except _Refused as refused:
                if last or not refused.failure.transient:
                    raise refused.failure from None
                asked = refused.retry_after
            await asyncio.sleep(self._retry.wait(attempt, asked))

    async def _exchange(self, path: str, body: bytes, headers: Mapping[str, str] | None) -> AsyncGenerator[bytes, None]:
        response = await self._open_session().post(self._target(path), data=body, headers=headers)
        try:
            if response.status >= 400:
                raise await _refusal(response)
            reader = SseReader()
            async for chunk in response.content.iter_any():
                for payload in reader.feed(chunk):
                    if payload == DONE:
                        await _finish(response)
                        return
                    yield payload
        finally:
            response.close()

    async def _call(self, method: str, path: str, body: bytes | None, seconds: float | None) -> Any:
        try:
            async with (
                asyncio.timeout(seconds),
                self._open_session().request(method, self._target(path), data=body) as response,
            ):
                if response.status >= 400:
                    raise (await _refusal(response)).failure
                content = await response.read()
        except CONNECTION_ERRORS as error:
            raise self._unavailable(error) from error
        try:
            return orjson.loads(content) if content.strip() else None
        except orjson.JSONDecodeError as error:
            raise EngineError(f"engine {self._name!r} answered {path} with something not JSON") from error

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise EngineUnavailable(f"engine {self._name!r} is not started, or was closed")
        return self._session

    def _target(self, path: str) -> URL:
        if path not in self._targets:
            self._targets[path] = URL(self._url + path)
        return self._targets[path]

    def _unavailable(self, error: BaseException) -> EngineUnavailable:
        what = str(error) or type(error).__name__
        return EngineUnavailable(f"engine {self._name!r} at {self._url}: {what}")


class _Refused(Exception):
    """A refusal on its way to the retry loop."""

    def __init__(self, failure: StatusFailure, retry_after: float | None) -> None:
        super().__init__(failure.status)
        self.failure = failure
        self.retry_after = retry_after


async def _finish(response: aiohttp.ClientResponse) -> None:
    """Read the few bytes behind `[DONE]`: a response read to its end gives its connection back for reuse, and
    one that does not end in time is only a connection less."""
    with suppress(*CONNECTION_ERRORS):
        async with asyncio.timeout(1):
            await response.read()


async def _refusal(response: aiohttp.ClientResponse) -> _Refused:
    body = await response.content.read(MAX_ERROR_BODY)
    header = response.headers.get("Retry-After", "")
    return _Refused(StatusFailure(response.status, body), float(header) if header.isdecimal() else None)
