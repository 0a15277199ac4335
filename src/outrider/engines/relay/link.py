"""One connection of a relay, as both ends use it: messages out in order, messages in one by one, and heartbeats.

It knows neither what a message means nor what carries it. Invariants: `run` returns when the connection has ended,
whichever end or silence ended it, and leaves no task; nothing is sent behind a close.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

import msgspec

from outrider.engines.relay.decoding import SMALL, check_cost
from outrider.engines.relay.messages import Beat, Close, Nonsense, close_reason, encode
from outrider.errors import UNREADABLE

In = TypeVar("In")

CROWDED = 16 << 20
"""Bytes. While more waits to be sent, `room` does not return."""
MAX_WAITING = 256 << 20
"""Bytes that may wait to be sent, besides the last message. A peer that takes less than it is sent is given up."""


class Disconnected(Exception):
    """The connection has ended. `code` is that of WebSocket; 1006 where there was no close frame."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(f"{reason or 'connection lost'} ({code})")
        self.code = code
        self.reason = reason


class Socket(Protocol):
    """Whole messages over something that can break. `send` and `receive` raise Disconnected."""

    async def send(self, frame: bytes) -> None: ...
    async def receive(self) -> bytes: ...
    async def close(self, code: int, reason: str) -> None: ...


class Link(Generic[In]):
    """`heartbeat` and `silence` are in seconds: what may pass without a message out, and without one in. `silence` may
    be changed while it runs. `heard` tells, by the event loop's clock, when the socket has heard of the peer, where it
    knows of more than whole messages; `taken`, when the peer last took something of what is being sent. `stranger`: the
    peer runs on another machine, so that what its messages cost to decode is counted first (`decoding.py`).
    """

    def __init__(
        self,
        socket: Socket,
        decoder: msgspec.msgpack.Decoder[In],
        *,
        heartbeat: float,
        silence: float,
        heard: Callable[[], float] = lambda: 0.0,
        taken: Callable[[], float] = lambda: 0.0,
        stranger: bool = False,
    ) -> None:
        self._socket = socket
        self._decoder = decoder
        self._heartbeat = heartbeat
        self._socket_heard = heard
        self._socket_taken = taken
        self._stranger = stranger
        self.silence = silence
        self.size = 0
        """Bytes of the message that is handled."""
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._wake = asyncio.Event()
        self._spacious = asyncio.Event()
        self._spacious.set()
        self._held = False
        """Whether the next message is not read because of what the last ones have asked for."""
        self._close: Disconnected | None = None
        self._clock = asyncio.get_running_loop().time
        self._heard = self._sent = self._clock()
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
        """Return when little waits to be sent, or the connection is to end."""
        await self._spacious.wait()

    def close(self, code: Close, reason: str) -> None:
        """End the connection; what was not sent yet is dropped."""
        if self._close is None:
            self._close = Disconnected(code, close_reason(reason))
            self._waiting.clear()
            self._waiting_bytes = 0
            self._wake.set()
            self._spacious.set()

    async def run(
        self, handle: Callable[[In], None], *, ready: Callable[[], Awaitable[object]] | None = None
    ) -> Disconnected:
        """Send and receive until the connection ends; how it ended. `handle` gets each message but the heartbeats;
        Nonsense that it raises closes the connection. `ready` is awaited before each message is read: until it returns
        the peer must wait, and its silence does not count."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._write(), name="relay writer"),
                group.create_task(self._read(handle, ready), name="relay reader"),
                group.create_task(self._watch(), name="relay watch"),
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
                self._held, self._heard = False, self._clock()
            try:
                frame = await self._socket.receive()
            except Disconnected as end:
                return end
            self._heard = self._clock()
            try:
                if self._stranger and len(frame) > SMALL:
                    await asyncio.to_thread(check_cost, frame)
                message = self._decoded(frame)
                self.size = len(frame)
                if self._close is None and not isinstance(message, Beat):
                    handle(message)
            except Nonsense as error:
                self.close(Close.NONSENSE, str(error))
            if self._close is not None:
                return await self._written()

    async def _watch(self) -> Disconnected:
        """Send heartbeats, and end a connection on which nothing comes, or on which nothing can be sent. One task looks
        now and then: a timeout for each message would be a sixth of its cost."""
        while True:
            pause = min(self._heartbeat / 2, self.silence / 4)
            due = self._clock() + pause
            await asyncio.sleep(pause)
            now = self._clock()
            if now - due > pause:  # this process was blocked: what came meanwhile is still to be read
                self._heard = now
            if self._sending_since is not None and now - max(self._sending_since, self._socket_taken()) >= self.silence:
                return Disconnected(Close.SILENT, "the peer reads nothing")
            if not self._held and now - max(self._heard, self._socket_heard()) >= self.silence:
                self.close(Close.SILENT, f"nothing came for {self.silence:g} s")
            elif now - self._sent >= self._heartbeat / 2:
                self.send(Beat())

    async def _written(self) -> Disconnected:
        """Leave the end to the writer, which sends the close frame."""
        await asyncio.Event().wait()
        raise AssertionError

    def _decoded(self, frame: bytes) -> In:
        try:
            return self._decoder.decode(frame)
        except UNREADABLE as error:
            raise Nonsense(f"no message of this protocol: {error}") from error
