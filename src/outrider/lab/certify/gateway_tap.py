"""A proxy between sandboxes and the model gateway. It forwards all bytes, and searches the bytes that are sent to
clients for given words.

Invariant: no byte is delayed or changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.sessions.node import LocalNode

CHUNK = 1 << 16
KEPT = 256
"""How many bytes of earlier reads are searched again, because a word may be split between two reads."""

WAIT_SECONDS = 5.0
"""Maximum seconds to wait for a word. If the harness does not stream, the wait times out, because no word is sent
before the reply is complete."""

EVENT_STREAM = b"text/event-stream"


class GatewayTap:
    """Forwards each accepted connection to the Unix socket `behind`. `in_time` has the words for which
    `wait_until_sent` returned True. `streams` becomes True when any reply is an event stream."""

    def __init__(self, behind: Path, words: Iterable[str]) -> None:
        self.streams = False
        self.in_time: set[str] = set()
        self._behind = behind
        self._words = {word: asyncio.Event() for word in words}
        self._open: set[asyncio.StreamWriter] = set()

    async def wait_until_sent(self, word: str) -> bool:
        """Wait until the word has been sent to a client, at most WAIT_SECONDS. Return True if it was sent."""
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await self._words[word].wait()
        except TimeoutError:
            return False
        self.in_time.add(word)
        return True

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until one side closes it."""
        try:
            replies, forth = await asyncio.open_unix_connection(str(self._behind))
        except OSError:
            writer.close()
            return
        self._open |= {writer, forth}
        try:
            async with asyncio.TaskGroup() as group:
                requests = group.create_task(_pass_requests(reader, forth), name="tap: requests")
                before = b""
                while data := await replies.read(CHUNK):
                    writer.write(data)
                    await writer.drain()
                    seen = before + data
                    self.streams = self.streams or EVENT_STREAM in seen
                    for word, event in self._words.items():
                        if word.encode() in seen:
                            event.set()
                    before = seen[-KEPT:]
                requests.cancel()
        except* OSError:
            pass  # one side has closed the connection; the finally block closes the other side
        finally:
            for end in (writer, forth):
                end.transport.abort()
            self._open -= {writer, forth}

    def cut(self) -> None:
        """Close every connection at once."""
        for writer in self._open:
            writer.transport.abort()


@asynccontextmanager
async def tapped(node: LocalNode, words: Iterable[str]) -> AsyncIterator[GatewayTap]:
    """Put a `GatewayTap` between a node's gateway and the sandboxes that start within the block."""
    socket = node.gateway_socket
    # Sandboxes connect to the path `socket`, so the tap listens there, and the gateway's own socket is moved to
    # `behind`.
    behind = socket.with_name(f"behind-{socket.name}")
    await asyncio.to_thread(socket.rename, behind)
    tap = GatewayTap(behind, words)
    servers = (
        await asyncio.start_unix_server(tap.pass_on, str(socket)),
        await asyncio.start_server(tap.pass_on, "127.0.0.1", 0),
    )
    try:
        with node.gateway_at("http://{}:{}".format(*servers[1].sockets[0].getsockname())):
            yield tap
    finally:
        for server in servers:
            server.close()
        tap.cut()
        for server in servers:
            await server.wait_closed()


async def _pass_requests(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
    writer.transport.abort()  # the client has disconnected, so the gateway must stop generating
