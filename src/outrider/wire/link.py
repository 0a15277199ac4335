"""One end of a connection between a service and a worker or node. Sends messages in order, receives one message at a
time, and sends heartbeats.

The module does not interpret messages and does not depend on the transport. Its callers set the intervals of heartbeats
and silence. Invariants: when either end has closed the connection, or the peer was silent for too long, `run` returns
and leaves no task running. Nothing is sent after a close.
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
"""`room` does not return while more than this number of bytes wait to be sent."""
MAX_WAITING = 256 << 20
"""If more than this number of bytes wait when another message is sent, the peer reads too slowly, and the connection is
closed."""


class Disconnected(Exception):
    """The connection has ended. `code` is one of the following:
    - the peer's WebSocket close code
    - a code of `Close`, if this side has ended the connection
    - the HTTP status of a refused handshake
    - 1006, if there is no other code"""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(f"{reason or 'connection lost'} ({code})")
        self.code = code
        self.reason = reason


class Socket(Protocol):
    """Sends and receives whole messages over a transport that can break. `send` and `receive` raise Disconnected.

    A socket that sends messages in pieces sets two times, by the event loop's clock: `last_arrival` when a piece
    arrives from the peer, and `taken` when the peer acknowledges a piece. For other sockets both stay 0.
    """

    last_arrival: float = 0.0
    taken: float = 0.0

    async def send(self, frame: bytes) -> None: ...
    async def receive(self) -> bytes: ...
    async def close(self, code: int, reason: str) -> None: ...


class Link(Generic[In]):
    """One end of a connection, with its send queue, its heartbeats, and the detection of silence.

    `heartbeat` is the maximum number of seconds without a message to the peer, `silence` the maximum without a message
    from the peer. `silence` may be changed while the link runs. `stranger` is True if the peer runs on another machine.
    The cost of decoding a message from such a peer is counted before the message is decoded (`decoding.py`).
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
        self._held = False
        """True while `run` awaits `ready` before it reads the next message."""
        self._close: Disconnected | None = None
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
        if self._waiting_bytes > CROWDED:
            self._spacious.clear()
        self._wake.set()

    async def room(self) -> None:
        """Return once at most `CROWDED` bytes wait to be sent, or once `close` was called."""
        await self._spacious.wait()

    def close(self, code: Close, reason: str) -> None:
        """End the connection. Messages not sent yet are dropped."""
        if self._close is None:
            self._close = Disconnected(code, close_reason(reason))
            self._waiting.clear()
            self._waiting_bytes = 0
            self._wake.set()
            self._spacious.set()

    async def run(
        self, handle: Callable[[In], None], *, ready: Callable[[], Awaitable[object]] | None = None
    ) -> Disconnected:
        """Send and receive until the connection ends. Returns the code and the reason of the end. `handle` is called
        with each message except heartbeats; if it raises Nonsense, the connection is closed. `ready` is awaited before
        each message is read: until `ready` returns, the peer must wait, and its silence does not count."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._write(), name="link writer"),
                group.create_task(self._read(handle, ready), name="link reader"),
                group.create_task(self._watch(), name="link watch"),
            ]
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
        if self._close is not None:
            return self._close
        return next(task for task in tasks if task in ended).result()

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
                    if self._waiting_bytes <= CROWDED:
                        self._spacious.set()
                if self._close is not None:
                    await self._socket.close(self._close.code, self._close.reason)
                    return self._close
            except Disconnected as end:
                return end
            self._sending_since = None

    async def _read(self, handle: Callable[[In], None], ready: Callable[[], Awaitable[object]] | None) -> Disconnected:
        while True:
            if ready is not None:
                self._held = True
                await ready()
                self._held, self._last_arrival = False, self._clock()
            try:
                frame = await self._socket.receive()
            except Disconnected as end:
                return end
            self._last_arrival = self._clock()
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
                # The writer ends the connection after it has sent the close frame; `run` then cancels this wait.
                await asyncio.Event().wait()

    async def _watch(self) -> Disconnected:
        """Send heartbeats, and end a connection on which nothing arrives or nothing can be sent. One task checks both
        at intervals, because a timeout for each message would cost a sixth of the time to process the message."""
        while True:
            pause = min(self._heartbeat / 2, self.silence / 4)
            due = self._clock() + pause
            await asyncio.sleep(pause)
            now = self._clock()
            if now - due > pause:  # this process was blocked, so messages of the peer may be unread
                self._last_arrival = now
            if self._sending_since is not None and now - max(self._sending_since, self._socket.taken) >= self.silence:
                return Disconnected(Close.SILENT, "the peer reads nothing")
            if not self._held and now - max(self._last_arrival, self._socket.last_arrival) >= self.silence:
                self.close(Close.SILENT, f"nothing came for {self.silence:g} s")
            elif now - self._sent >= self._heartbeat / 2:
                self.send(Beat())
