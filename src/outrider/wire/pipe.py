"""Sends whole messages over a Unix socket between two processes of one machine. The four bytes before a message hold
the message's length (little-endian)."""

from __future__ import annotations

import asyncio
import socket
from typing import Self

from outrider.wire.link import Disconnected, Socket

LENGTH_BYTES = 4
BUFFER = 1 << 20


class Pipe(Socket):
    """A `Socket` over a stream. If the peer sends a message of more than `max_frame` bytes, the connection ends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, max_frame: int) -> None:
        self._reader = reader
        self._writer = writer
        self._max_frame = max_frame

    @classmethod
    async def over(cls, end: socket.socket, max_frame: int) -> Self:
        """Make a pipe from one end of a socket pair. The pipe owns this end and closes it."""
        return cls(*await asyncio.open_unix_connection(sock=end, limit=BUFFER), max_frame)

    async def send(self, frame: bytes) -> None:
        try:
            self._writer.write(len(frame).to_bytes(LENGTH_BYTES, "little"))
            self._writer.write(frame)
            await self._writer.drain()
        except (OSError, RuntimeError) as error:  # uvloop raises RuntimeError if the transport is closed
            raise Disconnected(1006, str(error)) from error

    async def receive(self) -> bytes:
        try:
            size = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
            if size > self._max_frame:
                raise Disconnected(1009, f"a message of {size} bytes")
            return await self._reader.readexactly(size)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise Disconnected(1006) from error

    async def close(self, code: int, reason: str) -> None:
        self._writer.close()

    def abort(self) -> None:
        """Close the socket at once, and drop unsent data."""
        self._writer.transport.abort()
