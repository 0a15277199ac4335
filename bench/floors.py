"""The floors of our figures: the same work done as simply as possible, measured in the same run.

Machines differ in speed by a factor, and the speed of a shared machine changes from hour to hour. A ratio of two
figures of one run does not depend on the machine or the hour. There are three floors:

- the relay copies bytes between two TCP connections, with asyncio protocols: the cost of any hop;
- the proxy is a bare ASGI application on uvicorn that forwards each request with aiohttp: the cost of a hop over HTTP;
- the round trip is the smallest HTTP call, aiohttp to uvicorn, for benchmarks without model calls.

The relay, the proxy and the server of the round trip run in separate processes (`processes.py`).
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp
from yarl import URL

CALL = {"a": 1}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class RoundTrip:
    """Times minimal HTTP calls, in blocks."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url
        self._spent: list[float] = []

    async def take(self, calls: int) -> None:
        for _ in range(calls):
            begun = time.perf_counter()
            async with self._http.post(self._url, json=CALL) as response:
                await response.read()
            self._spent.append(1000 * (time.perf_counter() - begun))

    def median_ms(self) -> float:
        return statistics.median(self._spent)


@asynccontextmanager
async def round_trips(url: str) -> AsyncIterator[RoundTrip]:
    """Yield a `RoundTrip` to the server at `url`. Its connections are warm, and it has no measurements yet."""
    async with aiohttp.ClientSession() as http:
        await RoundTrip(http, url).take(50)
        yield RoundTrip(http, url)


class Proxy:
    """An ASGI application that posts each request to the engine and forwards its reply as it arrives."""

    def __init__(self, engine_url: str) -> None:
        self._engine_url = engine_url
        self._http: aiohttp.ClientSession | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._http is None:
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        headers = {"Content-Type": "application/json"}
        async with self._http.post(self._engine_url + scope["path"], data=body, headers=headers) as reply:
            passed = [(b"content-type", reply.headers["Content-Type"].encode())]
            await send({"type": "http.response.start", "status": reply.status, "headers": passed})
            async for part in reply.content.iter_any():
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()


class _Copy(asyncio.Protocol):
    """Writes the bytes that arrive on one connection to another one."""

    def __init__(self, to: asyncio.Transport | None = None) -> None:
        self.to = to
        self._early: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport has these methods, but another base class.
        self._transport = cast(asyncio.Transport, transport)

    def pass_on_to(self, to: asyncio.Transport) -> None:
        self.to = to
        to.writelines(self._early)
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        if self.to is None:
            self._early.append(data)  # the connection to the engine is not open yet
        else:
            self.to.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self.to is not None:
            self.to.close()


class _Accepted(_Copy):
    """A client's connection, which opens its own connection to the engine."""

    def __init__(self, engine: URL, owner: asyncio.TaskGroup) -> None:
        super().__init__()
        self._engine = engine
        self._owner = owner

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._owner.create_task(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        own, host, port = self._transport, self._engine.host or "", self._engine.port or 0
        to, _ = await loop.create_connection(lambda: _Copy(own), host, port)
        self.pass_on_to(to)


@asynccontextmanager
async def relay(engine_url: str) -> AsyncIterator[str]:
    """Run a relay to the engine during the block. Yields the relay's URL."""
    async with asyncio.TaskGroup() as owner:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Accepted(URL(engine_url), owner), "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
