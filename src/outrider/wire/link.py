"""One end of a connection between a service and a worker or node. Sends messages in order, receives one message at a
time, and sends heartbeats.

The module does not interpret messages and works with any `Socket`. Its callers set the heartbeat interval and the
maximum silence of the peer. Invariants: when either end closes the connection, or the peer is silent for too long,
`run` returns and leaves no task running. Nothing is sent after a close.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

import msgspec

from outrider.errors import UNREADABLE
from outrider.wire.decoding import SMALL, check_cost
from outrider.wire.link_protocol import Beat, Close, Nonsense, close_reason, encode

In = TypeVar("In")

CROWDED = 16 << 20
"""`room` waits while more than this number of bytes are queued for sending."""
MAX_WAITING = 256 << 20
"""If more than this number of bytes are queued when another message is sent, the connection is closed, because the peer
reads too slowly."""
MESSAGE_COST = 256
"""Bytes counted for a received message in addition to its length, when the link decides whether other work of the event
loop must get a turn."""
CLOSE_SECONDS = 10.0
"""After `Link.close`, the peer has this number of seconds to read the message that is being sent, and the reason of the
close."""


class Disconnected(Exception):
    """The connection has ended. `code` is one of these:
    - the WebSocket close code that the peer sent
    - a code of `Close`, if this side has ended the connection
    - the HTTP status, if the peer refused the connection
    - 1006 or another WebSocket close code otherwise"""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(f"{reason or 'connection lost'} ({code})")
        self.code = code
        self.reason = reason


class Socket(Protocol):
    """Sends and receives whole messages over a connection that can break. `send` and `receive` raise Disconnected.

    Some sockets send a message in pieces. Such a socket sets `last_arrival` when a piece arrives, and `taken` when the
    peer acknowledges a piece. Both are times of the event loop's clock. For other sockets, both stay 0.
    """

    last_arrival: float = 0.0
    taken: float = 0.0

    async def send(self, frame: bytes) -> None: ...
    async def receive(self) -> bytes: ...
    async def close(self, code: int, reason: str) -> None: ...


class Link(Generic[In]):
    """One end of a connection: its send queue, its heartbeats, and the check that the peer is not silent.

    `heartbeat`: the maximum number of seconds between two messages to the peer.
    `silence`: the maximum number of seconds between two messages from the peer. `silence` may be changed while the link
        runs.
    `stranger`: True if the peer runs on another machine. Its messages are checked before they are decoded
        (`decoding.py`).
    """

    def __init__(
        self,
        socket: Socket,
        decoder: msgspec.msgpack.Decoder[In],
        *,
        heartbeat: float,
        silence: float,
        stranger: bool = False,
    ) -> None:
        self._socket = socket
        self._decoder = decoder
        self._heartbeat = heartbeat
        self._stranger = stranger
        self.silence = silence
        self.size = 0
        """The number of bytes of the message that is being handled."""
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._wake = asyncio.Event()
        self._spacious = asyncio.Event()
        self._spacious.set()
        self._next_for_room = asyncio.Lock()
        """Held by the one task that waits for `_spacious`. The other tasks that wait for room wait for this lock."""
        self._held = False
        """True while `run` awaits `ready` before it reads the next message."""
        self._close: Disconnected | None = None
        self._closed_at = 0.0
        self._clock = asyncio.get_running_loop().time
        self._last_arrival = self._sent = self._clock()
        self._sending_since: float | None = None

    def send(self, message: msgspec.Struct) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, frame: bytes) -> None:
        if self._close is not None:
            return
        if self._waiting_bytes > MAX_WAITING:
            self.close(Close.SILENT, f"the peer leaves {self._waiting_bytes} bytes unread")
            return
        self._waiting.append(frame)
        self._waiting_bytes += len(frame)
        if self.crowded:
            self._spacious.clear()
        self._wake.set()

    @property
    def crowded(self) -> bool:
        """True while more than CROWDED bytes are queued for sending."""
        return self._waiting_bytes > CROWDED

    async def room(self) -> None:
        """Wait until at most CROWDED bytes are queued for sending, or until the link is closed or has ended. Tasks that
        wait get room one after another, because each may fill the queue again."""
        if self.crowded or self._next_for_room.locked():
            async with self._next_for_room:
                while self.crowded:
                    await self._spacious.wait()

    def close(self, code: Close, reason: str) -> None:
        """End the connection, and drop queued messages."""
        self._end(Disconnected(code, close_reason(reason)))

    def _end(self, how: Disconnected) -> None:
        if self._close is None:
            self._close, self._closed_at = how, self._clock()
            self._waiting.clear()
            self._waiting_bytes = 0
            self._wake.set()
            self._spacious.set()

    async def run(
        self, handle: Callable[[In], None], *, ready: Callable[[], Awaitable[object]] | None = None
    ) -> Disconnected:
        """Send and receive until the connection ends. Returns why it has ended. `handle` is called with each message
        except heartbeats. If `handle` raises Nonsense, the connection is closed. `ready` is awaited before each message
        is read. Until `ready` returns, the peer may be silent for any time."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._write(), name="link writer"),
                    group.create_task(self._read(handle, ready), name="link reader"),
                    group.create_task(self._watch(), name="link watch"),
                ]
                ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    task.cancel()
            return self._close or next(task for task in tasks if task in ended).result()
        finally:
            self._end(Disconnected(1006))  # nothing is sent any more, so no task may wait for room

    async def _write(self) -> Disconnected:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                while self._waiting:
                    self._sending_since = self._sent = self._clock()
                    frame = self._waiting.popleft()
                    self._waiting_bytes -= len(frame)
                    await self._socket.send(frame)
                    if not self.crowded:
                        self._spacious.set()
                if self._close is not None:
                    await self._socket.close(self._close.code, self._close.reason)
                    return self._close
            except Disconnected as end:
                return end
            self._sending_since = None

    async def _read(self, handle: Callable[[In], None], ready: Callable[[], Awaitable[object]] | None) -> Disconnected:
        handled = 0
        while True:
            if handled > SMALL:
                # If messages have piled up in the socket, `receive` does not wait. So let the event loop do other work.
                handled = 0
                await asyncio.sleep(0)
            if ready is not None:
                self._held = True
                await ready()
                self._held, self._last_arrival = False, self._clock()
            try:
                frame = await self._socket.receive()
            except Disconnected as end:
                return end
            self._last_arrival = self._clock()
            handled += len(frame) + MESSAGE_COST
            try:
                if self._stranger and len(frame) > SMALL:
                    await asyncio.to_thread(check_cost, frame)
                try:
                    message = self._decoder.decode(frame)
                except UNREADABLE as error:
                    raise Nonsense(f"no message of this protocol: {error}") from error
                self.size = len(frame)
                if self._close is None and not isinstance(message, Beat):
                    handle(message)
            except Nonsense as error:
                self.close(Close.NONSENSE, str(error))
            if self._close is not None:
                # Wait here: the writer sends the close frame, and then `run` cancels this task.
                await asyncio.Event().wait()

    async def _watch(self) -> Disconnected:
        """Send heartbeats, and end the connection if the peer sends nothing or reads nothing, also after `close`. This
        task checks the peer at intervals, because a timeout for each message would add a sixth to the message's own
        cost."""
        while True:
            pause = min(self._heartbeat / 2, self.silence / 4)
            due = self._clock() + pause
            await asyncio.sleep(pause)
            now = self._clock()
            if now - due > pause:  # this process was blocked: messages may wait to be read here, or to be sent
                self._last_arrival = now
                self._sending_since = None if self._sending_since is None else now
            if self._close is not None and now - self._closed_at >= CLOSE_SECONDS:
                return self._close
            if self._sending_since is not None and now - max(self._sending_since, self._socket.taken) >= self.silence:
                return Disconnected(Close.SILENT, "the peer reads nothing")
            if not self._held and now - max(self._last_arrival, self._socket.last_arrival) >= self.silence:
                self.close(Close.SILENT, f"nothing came for {self.silence:g} s")
            elif now - self._sent >= self._heartbeat / 2:
                self.send(Beat())
