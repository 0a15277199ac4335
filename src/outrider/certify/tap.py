"""A tap between sandboxes and the model gateway: passes bytes on, and looks for words in what the clients are sent.

It knows no HTTP. Invariant: it neither holds back nor changes a byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol

CHUNK = 1 << 16
KEPT = 256
"""Bytes kept of what went before, for a word that comes in two pieces."""

HEARD_SECONDS = 5.0
EVENT_STREAM = b"text/event-stream"


class Tap:
    """`heard` waits for one of the `words` to be sent to a client; `in_time` are those that it has seen sent while
    somebody waited, `streams` whether any reply was an event stream."""

    def __init__(self, behind: Path, words: Iterable[str]) -> None:
        self.streams = False
        self.in_time: set[str] = set()
        self._behind = behind
        self._words = {word: asyncio.Event() for word in words}
        self._open: set[asyncio.StreamWriter] = set()

    async def heard(self, word: str) -> bool:
        """Whether a client was sent the word, now or within HEARD_SECONDS."""
        try:
            async with asyncio.timeout(HEARD_SECONDS):
                await self._words[word].wait()
        except TimeoutError:
            return False
        self.in_time.add(word)
        return True

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        try:
            back, forth = await asyncio.open_unix_connection(str(self._behind))
        except OSError:
            writer.close()
            return
        self._open |= {writer, forth}
        try:
            async with asyncio.TaskGroup() as group:
                asking = group.create_task(_pump(reader, forth), name="tap: requests")
                await self._listen(back, writer)
                asking.cancel()
        except* OSError:
            pass  # one of the two has gone: so goes the other
        finally:
            for end in (writer, forth):
                end.transport.abort()
            self._open -= {writer, forth}

    def cut(self) -> None:
        """End every connection."""
        for writer in self._open:
            writer.transport.abort()

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        before = b""
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
            seen = before + data
            self.streams = self.streams or EVENT_STREAM in seen
            for word, event in self._words.items():
                if word.encode() in seen:
                    event.set()
            before = seen[-KEPT:]


class Tapped(Protocol):
    """A node, as far as sandboxes reach it: by a Unix socket, or by an address."""

    @property
    def gateway_socket(self) -> Path: ...
    def gateway_at(self, url: str) -> AbstractContextManager[None]: ...


@asynccontextmanager
async def tapped(node: Tapped, words: Iterable[str]) -> AsyncIterator[Tap]:
    """Put a tap that looks for `words` before a served node's gateway, for every sandbox started from then on."""
    socket = node.gateway_socket
    behind = socket.with_name(f"behind-{socket.name}")
    await asyncio.to_thread(socket.rename, behind)
    tap = Tap(behind, words)
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


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
    writer.transport.abort()  # who asked is gone: what is under way for it is to end
