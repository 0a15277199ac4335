"""A socket that outlives its connections: what was sent and has not arrived is sent again over the next one.

It knows no message and dials nowhere: whoever has a connection lends it to `carry`. Invariants: every frame arrives
whole, once and in order, however often the connection breaks in between; a peer that acknowledges nothing, or sends
without end, is kept in bounded memory.
"""

from __future__ import annotations

import asyncio
from collections import deque

from outrider.engines.relay.link import Disconnected, Socket
from outrider.engines.relay.messages import Close

PIECE = 256 << 10
"""Bytes. A frame is sent in pieces: it may be longer than a message of the connection, and a slow connection is heard
of while it comes."""
HEADER = 9
"""Each piece begins with a byte, 1 where more of the frame follows, and the number of pieces received (uint64, little-
endian). All frames together acknowledge each other: both ends must send something now and then."""

MAX_UNACKNOWLEDGED = 64 << 20
"""Bytes. While the peer has not acknowledged more, `send` waits."""
MAX_UNREAD = 64 << 20
"""Bytes of whole frames that nobody has received yet. While there are more, nothing is read from the connection."""
FRAME_COST = 256
"""Bytes that an unread frame counts for besides its own."""

REPLACED = Disconnected(1006, "another connection has taken its place")
NO_PIECE = Disconnected(Close.NONSENSE, "no piece of this protocol")
NOT_SENT = Disconnected(Close.NONSENSE, "it acknowledges what was never sent")


class ResumableSocket:
    """`engines.relay.link.Socket`. `received` is the number of pieces that have come over all connections: the peer
    must be told it when the next one begins. A frame from the peer has `most` bytes at most."""

    def __init__(self, most: int) -> None:
        self.received = 0
        self.heard = 0.0
        """When a piece came last, by the event loop's clock."""
        self.taken = 0.0
        """When the peer last acknowledged something."""
        self._most = most
        self._unacknowledged: deque[tuple[bool, bytes]] = deque()
        """Pieces that the peer may not have, from that after `_acknowledged` on: whether more of the frame follows, and
        its bytes."""
        self._unacknowledged_bytes = 0
        self._acknowledged = 0
        self._written = 0
        """Pieces that were written to the present connection, or arrived over an earlier one."""
        self._ever_written = 0
        """Pieces that were written to any connection: the peer cannot have more."""
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._frames: asyncio.Queue[bytes | Disconnected] = asyncio.Queue()
        self._unread_bytes = 0
        self._changed = asyncio.Event()
        """Set when something was acknowledged or received, and at the end."""
        self._ended = False
        self._to_write = asyncio.Event()
        self._replaced = asyncio.Event()
        """Of the present connection: set when another one takes its place."""
        self._close: tuple[int, str] | None = None

    async def send(self, frame: bytes) -> None:
        """Returns when the frame is among those that are sent again until they are acknowledged. Waits for that while
        there are many."""
        while self._unacknowledged_bytes > MAX_UNACKNOWLEDGED and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        for start in range(0, len(frame), PIECE):
            self._unacknowledged.append((start + PIECE < len(frame), frame[start : start + PIECE]))
        self._unacknowledged_bytes += len(frame)
        self._to_write.set()

    async def receive(self) -> bytes:
        frame = await self._frames.get()
        if isinstance(frame, Disconnected):
            raise frame
        self._unread_bytes -= len(frame) + FRAME_COST
        self._changed.set()
        return frame

    async def close(self, code: int, reason: str) -> None:
        """Close for good. What has not been written is dropped."""
        self._close = code, reason
        self._to_write.set()

    def end(self, how: Disconnected) -> None:
        """There will be no other connection: `receive` raises that."""
        self._ended = True
        self._changed.set()
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
        if not self._acknowledge(arrived):
            return NOT_SENT
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
                    self._ever_written = max(self._ever_written, self._written)
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
            # Only the last piece of a frame is shorter or longer: many tiny ones would take far more memory than bytes.
            more = len(piece) >= HEADER and piece[0] != 0
            if len(piece) < HEADER or (more and len(piece) != HEADER + PIECE) or len(piece) > HEADER + PIECE:
                return NO_PIECE
            if self._parts_bytes + len(piece) - HEADER > self._most:
                return Disconnected(Close.NONSENSE, f"a message of more than {self._most} bytes")
            self.heard = asyncio.get_running_loop().time()
            self.received += 1
            if not self._acknowledge(int.from_bytes(piece[1:HEADER], "little")):
                return NOT_SENT
            self._parts.append(piece[HEADER:])
            self._parts_bytes += len(piece) - HEADER
            if not more:
                frame = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
                self._parts, self._parts_bytes = [], 0
                self._unread_bytes += len(frame) + FRAME_COST
                self._frames.put_nowait(frame)
            while self._unread_bytes > MAX_UNREAD and not self._ended:
                self._changed.clear()
                await self._changed.wait()
                self.heard = asyncio.get_running_loop().time()

    def _acknowledge(self, arrived: int) -> bool:
        """The peer has so many pieces. False if so many were never written."""
        if arrived > self._ever_written:
            return False
        before = self._acknowledged
        while self._acknowledged < min(arrived, self._written):
            _, piece = self._unacknowledged.popleft()
            self._unacknowledged_bytes -= len(piece)
            self._acknowledged += 1
        if self._acknowledged > before:
            self.taken = asyncio.get_running_loop().time()
            self._changed.set()
        return True
