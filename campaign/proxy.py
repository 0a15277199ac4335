"""A TCP proxy with faults, between a joined machine and the service or between the service and its engine.

The proxy cuts connections, delays or drops their bytes, or replies itself. Invariant: all bytes that the proxy has
accepted arrive in order, however late, unless their connection was cut or lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from enum import StrEnum

PIECE = 64 << 10
PAGE_SECONDS = 0.1
PAGE = b"<html><body><h1>Welcome to nginx!</h1></body></html>"
HTML = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (
    len(PAGE),
    PAGE,
)


class Direction(StrEnum):
    TO_SERVICE = "to the service"
    FROM_SERVICE = "from the service"


class FaultyProxy:
    """A proxy to the server at `port` of this machine. `url` is the proxy's own address while the block of `open`
    runs."""

    def __init__(self, port: int) -> None:
        self.url = ""
        self._port = port
        self._connections: set[asyncio.Task[None]] = set()
        self._held_until = dict.fromkeys(Direction, 0.0)
        self._answers_itself = False
        self._lost: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:

            def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = tasks.create_task(self._carry(reader, writer))
                self._connections.add(task)
                task.add_done_callback(self._connections.discard)
                # A callback and no `finally`, because a task that is cancelled before it starts runs none of its code.
                task.add_done_callback(lambda _: writer.transport.abort())

            server = await asyncio.start_server(accept, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            try:
                yield
            finally:
                server.close()
                self.cut()

    def cut(self) -> int:
        """Abort all open connections, with loss of the bytes in transit. Returns their number."""
        for connection in self._connections:
            connection.cancel()
        return len(self._connections)

    def lose(self) -> int:
        """Forward nothing more on the open connections, without closing them. Returns their number."""
        self._lost |= self._connections
        return len(self._connections)

    async def answer(self, seconds: float) -> None:
        """Cut all connections, and reply to new ones with a page of HTML for `seconds`."""
        self.cut()
        self._answers_itself = True
        try:
            await asyncio.sleep(seconds)
        finally:
            self._answers_itself = False

    async def hold(self, seconds: float, directions: Collection[Direction]) -> None:
        """Hold back bytes, new connections and closes of connections for `seconds`, and then forward all of them."""
        end = asyncio.get_running_loop().time() + seconds
        for direction in directions:
            self._held_until[direction] = max(self._held_until[direction], end)
        for direction in directions:
            await self._let_through(direction)

    async def _let_through(self, direction: Direction) -> None:
        clock = asyncio.get_running_loop().time
        while (left := self._held_until[direction] - clock()) > 0:  # noqa: ASYNC110  # another fault may extend the time meanwhile
            await asyncio.sleep(left)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._let_through(Direction.TO_SERVICE)
        if self._answers_itself:
            with suppress(OSError):
                await reader.read(PIECE)
                writer.write(HTML)
                await writer.drain()
                await asyncio.sleep(PAGE_SECONDS)  # an immediate abort may discard the page before it is sent
            return
        carrying = asyncio.current_task()
        assert carrying is not None
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            return
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._copy(carrying, reader, there_writer, Direction.TO_SERVICE))
                both.create_task(self._copy(carrying, there_reader, writer, Direction.FROM_SERVICE))
        finally:
            self._lost.discard(carrying)
            there_writer.transport.abort()

    async def _copy(
        self,
        connection: asyncio.Task[None],
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        direction: Direction,
    ) -> None:
        """Copy until `source` closes, then close `sink`. An error on a connection ends both directions."""
        try:
            while data := await source.read(PIECE):
                await self._let_through(direction)
                if connection in self._lost:
                    continue
                sink.write(data)
                await sink.drain()
            await self._let_through(direction)
            if connection in self._lost:
                return
            with suppress(RuntimeError):  # the sink may have been closed meanwhile
                sink.write_eof()
        except OSError:
            await self._let_through(direction)
            if connection in self._lost:
                return
            sink.transport.abort()
