"""The HTTP client for all engine servers. Sends JSON, reads JSON or server-sent events, and retries generations that
have not begun.

Invariant: once the first event of a response was read, the request is not sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import orjson

from outrider.concurrency.events import wait_for_event
from outrider.concurrency.retries import RetryPolicy
from outrider.engines.http.failures import StatusFailure
from outrider.engines.http.sse import SseReader
from outrider.errors import EngineMisbehaved, EngineUnavailable
from outrider.wire.http_connections import Buffer, Connections, Response

CONNECTION_ERRORS = (OSError, TimeoutError)
CONTROL_SECONDS = 30.0
MAX_ERROR_BODY = 64 << 10
MAX_ANSWER = 8 << 20
"""Maximum bytes of a response that is not a stream, and of one event of a stream. An event of SGLang may contain a
whole reply; this number allows 200,000 tokens."""
DONE = b"[DONE]"


DEFAULT_RETRY = RetryPolicy(first=0.2, longest=10.0, attempts=4)
"""The default retry policy for generations that have not begun. If the server sends Retry-After, the client waits for
that time instead, but at most `longest` seconds."""


class WasCut(Exception):
    """A generation was cut off before its first token: by a `Cut`, or because the policy version has changed since the
    request was sent."""


class Cut:
    """Lets another task end a request whose response has not begun, even while the request waits before a retry."""

    def __init__(self) -> None:
        self.begun = False
        """True once the first event has arrived. Set by the client."""
        self._made = asyncio.Event()
        self._response: Response | None = None

    def now(self) -> None:
        """End the request, which then raises WasCut. Has no effect once the response has begun."""
        if not self.begun:
            self._made.set()
            if self._response is not None:
                self._response.cut()

    def check(self) -> None:
        """Raise WasCut if `now` has ended the request."""
        if self._made.is_set():
            raise WasCut

    def opened(self, response: Response) -> None:
        self.check()
        self._response = response

    async def wait(self, seconds: float) -> None:
        """Wait for `seconds` seconds, or until `now` ends the request."""
        await wait_for_event(self._made, seconds)


class HttpClient:
    """The connections to one engine server, from `start` to `close`. Every method that sends a request may raise:

    - EngineUnavailable: the server cannot be reached or stops responding.
    - StatusFailure: the response has a status of 400 or more.
    - EngineMisbehaved: the response is too long or is not JSON.
    """

    def __init__(self, name: str, url: str, *, api_key: str | None = None, retry: RetryPolicy = DEFAULT_RETRY) -> None:
        self._name = name
        self.url = url
        self._retry = retry
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._connections: Connections | None = None

    async def start(self) -> None:
        self._connections = Connections(self.url, self._headers)

    async def close(self) -> None:
        """Close all connections. Each request in flight raises EngineUnavailable."""
        connections, self._connections = self._connections, None
        if connections is not None:
            connections.close()

    async def check(self, path: str) -> None:
        """Send a GET without retries, and accept any body: routers reply "OK" to a health check, and servers reply
        nothing."""
        await self._call("GET", path, (), CONTROL_SECONDS)

    async def get(self, path: str) -> Any:
        """Send a GET without retries. Returns the JSON value of the response, or None if it is empty."""
        return self._parsed(path, await self._call("GET", path, (), CONTROL_SECONDS))

    async def post(self, path: str, body: Any = None, *, seconds: float | None = CONTROL_SECONDS) -> Any:
        """Send a POST without retries. Returns the JSON value of the response, or None if it is empty. The time limit
        is `seconds`; None means no limit."""
        return self._parsed(
            path, await self._call("POST", path, () if body is None else (orjson.dumps(body),), seconds)
        )

    async def events(
        self,
        path: str,
        body: Callable[[int], Sequence[Buffer]],
        headers: Mapping[str, str] | None = None,
        cut: Cut | None = None,
    ) -> AsyncGenerator[list[bytes], None]:
        """POST `body(attempt)`, and yield lists of the payloads of the response's server-sent events, until `[DONE]` or
        the end of the response. Each list has the payloads of one read, and is never empty.

        Until the first payload arrives, the request is sent again after a connection failure or a transient status.
        Closing the generator closes the connection, so that the server aborts its work. Before the first payload,
        `cut.now` also closes the connection, and this method then raises WasCut.
        """
        cut = cut or Cut()
        attempts = self._retry.attempts or 1
        for attempt in range(attempts):
            response = None
            begun = False
            last = attempt + 1 == attempts
            asked: float | None = None
            try:
                response = await self._started().request("POST", path, body(attempt), headers, opened=cut.opened)
                if response.status >= 400:
                    raise await _refusal(response)
                reader = SseReader()
                unfinished = 0
                while chunk := await response.arrived():
                    payloads = reader.feed(chunk)
                    unfinished = 0 if payloads else unfinished + len(chunk)
                    if unfinished > MAX_ANSWER:
                        raise EngineMisbehaved(f"engine {self._name!r} sent an event of more than {MAX_ANSWER} bytes")
                    done = DONE in payloads
                    if done:
                        payloads = payloads[: payloads.index(DONE)]
                    if payloads:
                        begun = cut.begun = True
                        yield payloads
                    if done:
                        await _read_rest(response)
                        return
                return
            except CONNECTION_ERRORS as error:
                cut.check()
                if begun or last or self._connections is None:
                    raise self._unavailable(error) from error
            except StatusFailure as failure:
                if last or not failure.transient:
                    raise
                asked = failure.retry_after
            finally:
                if response is not None:
                    response.close()
            await cut.wait(self._retry.wait(attempt, asked))

    async def _call(self, method: str, path: str, body: Sequence[Buffer], seconds: float | None) -> bytes:
        try:
            async with asyncio.timeout(seconds):
                response = await self._started().request(method, path, body)
                try:
                    if response.status >= 400:
                        raise await _refusal(response)
                    content = await response.whole(MAX_ANSWER + 1)
                finally:
                    response.close()
        except CONNECTION_ERRORS as error:
            raise self._unavailable(error) from error
        if len(content) > MAX_ANSWER:
            raise EngineMisbehaved(f"engine {self._name!r} answered {path} with more than {MAX_ANSWER} bytes")
        return content

    def _parsed(self, path: str, content: bytes) -> Any:
        try:
            return orjson.loads(content) if content.strip() else None
        except orjson.JSONDecodeError as error:
            raise EngineMisbehaved(f"engine {self._name!r} answered {path} with a body that is not JSON") from error

    def _started(self) -> Connections:
        if self._connections is None:
            raise EngineUnavailable(f"engine {self._name!r} is not started, or was closed")
        return self._connections

    def _unavailable(self, error: BaseException) -> EngineUnavailable:
        what = str(error) or type(error).__name__
        return EngineUnavailable(f"engine {self._name!r} at {self.url}: {what}")


async def _read_rest(response: Response) -> None:
    """Read the few bytes after `[DONE]`, because a connection can be reused only after the whole response was read. If
    they do not arrive within a second, the connection is not reused, but no error is raised."""
    if response.complete:
        return
    with suppress(*CONNECTION_ERRORS):
        async with asyncio.timeout(1):
            while await response.arrived():
                pass


async def _refusal(response: Response) -> StatusFailure:
    header = (response.header(b"retry-after") or b"").decode("latin-1")
    return StatusFailure(
        response.status,
        await response.whole(MAX_ERROR_BODY),
        retry_after=float(header) if header.isdecimal() else None,
    )
