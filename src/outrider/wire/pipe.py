"""Sends whole messages over a Unix socket between two processes of one machine. Each frame is preceded by its length
(four bytes, little-endian)."""

from __future__ import annotations

import asyncio
import socket
from typing import Self

from outrider.wire.link import Disconnected

LENGTH_BYTES = 4
MAX_FRAME = 1 << 30
"""Maximum bytes of a frame between two processes of one machine."""
BUFFER = 1 << 20


class Pipe:
    """A `wire.link.Socket` over a stream."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, end: socket.socket) -> Self:
        """Make a pipe over one end of a socket pair. The pipe owns this end, and closes it."""
        return cls(*await asyncio.open_unix_connection(sock=end, limit=BUFFER))

    async def send(self, frame: bytes) -> None:
        try:
            self._writer.write(len(frame).to_bytes(LENGTH_BYTES, "little"))
            self._writer.write(frame)
            await self._writer.drain()
        except (OSError, RuntimeError) as error:  # uvloop raises RuntimeError for a closed transport
            raise Disconnected(1006, str(error)) from error

    async def receive(self) -> bytes:
        try:
            size = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
            if size > MAX_FRAME:
                raise Disconnected(1009, f"a message of {size} bytes")
            return await self._reader.readexactly(size)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise Disconnected(1006) from error

    async def close(self, code: int, reason: str) -> None:
        self._writer.close()

    def abort(self) -> None:
        """Close the socket at once. Data that was not sent yet is dropped."""
        self._writer.transport.abort()
