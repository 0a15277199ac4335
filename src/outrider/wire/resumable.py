"""A socket that survives broken connections. Data that has not arrived is sent again over the next connection.

`dialling.py` and `joined.py` pass each new connection to `carry`. Invariants: every frame (one message) arrives whole,
once and in order, however often the connection breaks. Memory is bounded even if the peer acknowledges nothing or never
stops sending.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial

from outrider.wire.link import Disconnected, Socket
from outrider.wire.link_protocol import Close

PIECE = 256 << 10
"""Frames are sent in pieces of this number of bytes. Pieces are needed because a connection limits the length of its
messages, and because on a slow connection each piece shows that the peer is alive."""
HEADER = 9
"""Number of bytes before each piece. The first byte is 1 if the frame continues in the next piece. The other eight
bytes hold the number of pieces that the sender has received so far (little-endian). There are no other
acknowledgements, so both ends must send from time to time."""

MAX_UNACKNOWLEDGED = 64 << 20
"""`send` waits while more than this number of bytes are unacknowledged."""
MAX_UNREAD = 64 << 20
"""While frames with more than this number of bytes wait for `receive`, nothing is read from the connection."""
FRAME_COST = 256
"""Bytes counted for a waiting frame in addition to its length."""

# Reasons for the end of a connection. Each use creates a new exception, because a raised exception keeps its traceback
# alive, and the traceback keeps alive the sockets that the functions in it have used.
REPLACED = partial(Disconnected, 1006, "another connection has replaced this connection")
NO_PIECE = partial(Disconnected, Close.NONSENSE, "no piece of this protocol")
NOT_SENT = partial(Disconnected, Close.NONSENSE, "it acknowledges what was never sent")


class ResumableSocket(Socket):
    """A socket that uses one connection after another.

    `received`: the number of pieces received so far, over all connections. The peer needs this number when the next
        connection begins.
    `most`: the maximum number of bytes of a frame from the peer.
    `most_unread`: while frames with more than this number of bytes wait for `receive`, no more pieces are read.
    `piece`: the length of a piece in bytes, which must be the same at both ends."""

    def __init__(self, most: int, *, most_unread: int = MAX_UNREAD, piece: int = PIECE) -> None:
        self.received = 0
        self.last_arrival = 0.0
        """When the last piece arrived, by the event loop's clock."""
        self.taken = 0.0
        """When the peer last acknowledged a piece, by the event loop's clock."""
        self._most = most
        self._most_unread = most_unread
        self._piece = piece
        self._unacknowledged: deque[tuple[bool, bytes]] = deque()
        """Pieces that the peer has not acknowledged: for each, whether more of its frame follows, and its bytes. The
        first has the number `_acknowledged`."""
        self._unacknowledged_bytes = 0
        self._acknowledged = 0
        self._written = 0
        """The number of the next piece to write to the present connection. Earlier pieces were already written to it,
        or the peer has received them over an earlier connection."""
        self._ever_written = 0
        """The number of pieces that were written at least once, over all connections. The peer cannot have received
        more pieces."""
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._frames: asyncio.Queue[bytes | Disconnected] = asyncio.Queue()
        self._unread_bytes = 0
        self._changed = asyncio.Event()
        """Set when the peer has acknowledged a piece, when `receive` returns a frame, and when the socket is ended."""
        self._ended = False
        self._to_write = asyncio.Event()
        self._replaced = asyncio.Event()
        """Set when another connection takes the place of the present connection."""
        self._close: tuple[int, str] | None = None

    async def send(self, frame: bytes) -> None:
        """Queue a frame. Waits while too many bytes are unacknowledged. If the connection breaks, the next connection
        sends again all pieces that the peer has not received."""
        while self._unacknowledged_bytes > MAX_UNACKNOWLEDGED and not self._ended:
            self._changed.clear()
            await self._changed.wait()
        for start in range(0, len(frame), self._piece):
            end = start + self._piece
            self._unacknowledged.append((end < len(frame), frame[start:end]))
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
        """Close the socket for good. Frames that are still queued are dropped."""
        self._close = code, reason
        self._to_write.set()

    def end(self, how: Disconnected) -> None:
        """Mark the socket as ended. No other connection follows, and `receive` raises `how`."""
        self._ended = True
        self._changed.set()
        self._frames.put_nowait(how)

    def take_over(self) -> asyncio.Event:
        """Detach the current connection. From now on, the detached connection neither sends nor receives, so `received`
        does not change until `carry` is called. The caller must send `received` to the peer, and then call `carry` with
        the returned event."""
        self._replaced.set()
        self._replaced = asyncio.Event()
        return self._replaced

    async def carry(self, socket: Socket, arrived: int, replaced: asyncio.Event) -> Disconnected:
        """Send and receive over a connection until it ends, or until another connection replaces it (`replaced`).
        Returns the reason for the end. `arrived` is the number of pieces that the peer has received."""
        if replaced.is_set():
            return REPLACED()
        if not self._acknowledge(arrived):
            return NOT_SENT()
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
        return next((task.result() for task in both if not task.cancelled()), None) or REPLACED()

    async def _write(self, socket: Socket, replaced: asyncio.Event) -> Disconnected:
        try:
            while True:
                await self._to_write.wait()
                if replaced.is_set():  # the new connection writes the remaining pieces
                    return REPLACED()
                self._to_write.clear()
                while self._close is None and self._written - self._acknowledged < len(self._unacknowledged):
                    more, piece = self._unacknowledged[self._written - self._acknowledged]
                    self._written += 1
                    self._ever_written = max(self._ever_written, self._written)
                    await socket.send(bytes([more]) + self.received.to_bytes(8, "little") + piece)
                    if replaced.is_set():
                        return REPLACED()
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
                return REPLACED()
            # Every piece except the last of its frame must have the full length, because tiny pieces need far more
            # memory than their bytes.
            more, whole = len(piece) >= HEADER and piece[0] != 0, HEADER + self._piece
            if len(piece) < HEADER or (more and len(piece) != whole) or len(piece) > whole:
                return NO_PIECE()
            if self._parts_bytes + len(piece) - HEADER > self._most:
                return Disconnected(Close.NONSENSE, f"a message of more than {self._most} bytes")
            self.last_arrival = asyncio.get_running_loop().time()
            self.received += 1
            if not self._acknowledge(int.from_bytes(piece[1:HEADER], "little")):
                return NOT_SENT()
            self._parts.append(piece[HEADER:])
            self._parts_bytes += len(piece) - HEADER
            if not more:
                frame = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
                self._parts, self._parts_bytes = [], 0
                self._unread_bytes += len(frame) + FRAME_COST
                self._frames.put_nowait(frame)
            while self._unread_bytes > self._most_unread and not self._ended:
                self._changed.clear()
                await self._changed.wait()
                self.last_arrival = asyncio.get_running_loop().time()

    def _acknowledge(self, arrived: int) -> bool:
        """Record that the peer has received `arrived` pieces. Returns False if this side has never written that many
        pieces."""
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
