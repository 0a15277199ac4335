"""A socket that outlives its connections: what was sent and has not arrived is sent again over the next one.

It knows no message and dials nowhere: whoever has a connection lends it to `carry`. Invariant: every frame arrives
whole, once and in order, however often the connection breaks in between.
"""

from __future__ import annotations

import asyncio
from collections import deque

from outrider.engines.relay.link import Disconnected, Socket

PIECE = 256 << 10
"""Bytes. A frame is sent in pieces: it may be longer than a message of the connection, and a slow connection is heard
of while it comes."""
HEADER = 9
"""Each piece begins with a byte, 1 where more of the frame follows, and the number of pieces received (uint64, little-
endian). All frames together acknowledge each other: both ends must send something now and then."""

REPLACED = Disconnected(1006, "another connection has taken its place")


class ResumableSocket:
    """`engines.relay.link.Socket`. `received` is the number of pieces that have come over all connections: the peer
    must be told it when the next one begins."""

    def __init__(self) -> None:
        self.received = 0
        self.heard = 0.0
        """When a piece came last, by the event loop's clock."""
        self._unacknowledged: deque[tuple[bool, bytes]] = deque()
        """Pieces that the peer may not have, from that after `_acknowledged` on: whether more of the frame follows, and
        its bytes."""
        self._acknowledged = 0
        self._written = 0
        """Pieces that were written to the present connection, or arrived over an earlier one."""
        self._parts: list[bytes] = []
        self._frames: asyncio.Queue[bytes | Disconnected] = asyncio.Queue()
        self._to_write = asyncio.Event()
        self._replaced = asyncio.Event()
        """Of the present connection: set when another one takes its place."""
        self._close: tuple[int, str] | None = None

    async def send(self, frame: bytes) -> None:
        """Returns at once: what waits for a connection is bounded by what the sender has to say."""
        for start in range(0, len(frame), PIECE):
            self._unacknowledged.append((start + PIECE < len(frame), frame[start : start + PIECE]))
        self._to_write.set()

    async def receive(self) -> bytes:
        frame = await self._frames.get()
        if isinstance(frame, Disconnected):
            raise frame
        return frame

    async def close(self, code: int, reason: str) -> None:
        """Close for good. What has not been written is dropped."""
        self._close = code, reason
        self._to_write.set()

    def end(self, how: Disconnected) -> None:
        """There will be no other connection: `receive` raises that."""
        self._frames.put_nowait(how)

    def take_over(self) -> asyncio.Event:
        """From now on, earlier connections neither bring nor take anything. Returns what `carry` is to be given; the
        peer is told `received` in between."""
        self._replaced.set()
        self._replaced = asyncio.Event()
        return self._replaced

    async def carry(self, socket: Socket, arrived: int, replaced: asyncio.Event) -> Disconnected:
        """Send and receive over a connection until it ends, or is `replaced`; how it ended. `arrived` is what the peer
        has received."""
        if replaced.is_set():
            return REPLACED
        self._acknowledge(arrived)
        self._written = self._acknowledged
        self._to_write.set()
        async with asyncio.TaskGroup() as tasks:
            both = [
                tasks.create_task(self._write(socket, replaced)),
                tasks.create_task(self._read(socket, replaced)),
            ]
            waiting = tasks.create_task(replaced.wait())
            await asyncio.wait([*both, waiting], return_when=asyncio.FIRST_COMPLETED)
            for task in (*both, waiting):
                task.cancel()
        return next((task.result() for task in both if not task.cancelled()), REPLACED)

    async def _write(self, socket: Socket, replaced: asyncio.Event) -> Disconnected:
        try:
            while True:
                await self._to_write.wait()
                if replaced.is_set():  # what there is to write is for the connection that has taken its place
                    return REPLACED
                self._to_write.clear()
                while self._close is None and self._written - self._acknowledged < len(self._unacknowledged):
                    more, piece = self._unacknowledged[self._written - self._acknowledged]
                    self._written += 1
                    await socket.send(bytes([more]) + self.received.to_bytes(8, "little") + piece)
                    if replaced.is_set():
                        return REPLACED
                if self._close is not None:
                    await socket.close(*self._close)
                    return Disconnected(*self._close)
        except Disconnected as end:
            return end

    async def _read(self, socket: Socket, replaced: asyncio.Event) -> Disconnected:
        while True:
            try:
                piece = await socket.receive()
            except Disconnected as end:
                return end
            if replaced.is_set():
                return REPLACED
            if len(piece) < HEADER:
                return Disconnected(1007, "no piece of this protocol")
            self.heard = asyncio.get_running_loop().time()
            self.received += 1
            self._acknowledge(int.from_bytes(piece[1:HEADER], "little"))
            self._parts.append(piece[HEADER:])
            if piece[0] == 0:
                frame = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
                self._parts = []
                self._frames.put_nowait(frame)

    def _acknowledge(self, arrived: int) -> None:
        """The peer has so many pieces, of those that were written."""
        while self._acknowledged < min(arrived, self._written):
            self._unacknowledged.popleft()
            self._acknowledged += 1
