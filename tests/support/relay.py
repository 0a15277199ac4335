"""A relay engine that workers can reach, and a proxy that cuts their connections."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from starlette.websockets import WebSocket

from outrider.concurrency.retries import RetryPolicy
from outrider.engines.relay.engine import RelayEngine
from outrider.engines.relay.messages import MAX_TO_SERVICE
from outrider.lab.fakes.engine_servers.app import serving
from outrider.wire.asgi_socket import AsgiSocket
from outrider.wire.http_server import Receive, Scope, Send

AT_ONCE = RetryPolicy(first=0.0, longest=0.0)
ROUNDS = 5
"""Number of rounds of the event loop before a server is closed. asyncio needs fewer rounds between accepting a
connection and reporting it."""


@asynccontextmanager
async def relay_served(engine: RelayEngine) -> AsyncIterator[str]:
    """Serve the engine, and yield the URL for its workers. At the end, their connections are cut, as they are when a
    service is killed."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        websocket = WebSocket(scope, receive, send)
        await websocket.accept()
        await engine.serve(AsgiSocket(websocket))

    async with serving(app, websockets=MAX_TO_SERVICE) as url:
        yield url


class CuttingProxy:
    """A proxy that forwards TCP connections to `target`. Each of the first `cuts` connections is cut, in both
    directions at once, after a random number of bytes below `most`, possibly within a message. While `closed` is set,
    new connections are closed at once."""

    def __init__(self, target: str, *, cuts: int = 0, most: int = 1, seed: int = 0) -> None:
        self.target = target
        self.closed = False
        self.made = 0
        """Number of connections that were cut."""
        self._left = cuts
        self._most = most
        self._random = random.Random(seed)
        self._open: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        async with asyncio.TaskGroup() as group:

            def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = group.create_task(self._forward(reader, writer))
                self._open.add(task)
                task.add_done_callback(self._open.discard)
                # A callback, because a task that is cancelled before its first step runs none of its own code.
                task.add_done_callback(lambda _: writer.transport.abort())

            server = await asyncio.start_server(accept, "127.0.0.1", 0)
            try:
                yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            finally:
                for _ in range(ROUNDS):  # asyncio loses a connection that is accepted while its server closes
                    await asyncio.sleep(0)
                server.close()
                await self.cut()
                await asyncio.sleep(0)  # aborted connections close in the next round

    async def cut(self) -> None:
        """Cut all open connections."""
        while self._open:
            for task in self._open:
                task.cancel()
            await asyncio.wait(self._open)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        budget = self._random.randrange(self._most) if self._left > 0 else None
        self._left -= 1
        there: asyncio.StreamWriter | None = None
        try:
            if self.closed:
                return
            parts = urlsplit(self.target)
            there_reader, there = await asyncio.open_connection(parts.hostname, parts.port)
            spent = 0

            async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                nonlocal spent
                while data := await source.read(4096):
                    room = len(data) if budget is None else min(len(data), budget - spent)
                    spent += room
                    sink.write(data[:room])
                    await sink.drain()
                    if room < len(data) or spent == budget:
                        self.made += 1
                        return

            async with asyncio.TaskGroup() as group:
                ways = [group.create_task(copy(reader, there)), group.create_task(copy(there_reader, writer))]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in ways:
                    way.cancel()
        except* OSError:
            pass
        finally:
            if there is not None:
                there.transport.abort()
