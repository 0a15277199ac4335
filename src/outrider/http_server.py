"""The HTTP server under all that we serve: uvicorn, which here also tells an application when its client hangs up.

ASGI's own way, waiting for `http.disconnect`, takes a second task for every request. It knows no route. Invariants: an
application that asked is told once, whether the client left before or after it asked; what a client sends around
bodies, or leaves unfinished, costs a bounded amount of memory and of time; and there are no more connections at once
than the server was made for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any, NamedTuple

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

HANG_UP = "outrider.hang_up"
BACKLOG = 2048
MAX_HEAD = 64 << 10
"""Bytes of a request before its body, between two pieces of it, or behind it. Clients send a few thousand."""
MAX_PIPELINED = 16
"""Requests that wait for the replies to those before them. Clients that we know send none ahead."""
TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
BUSY = b"this server has all the connections that it may: try again\n"
TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\nretry-after: 1\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(BUSY), BUSY)
)
ONCE = frozenset((b"host", b"authorization", b"content-length", b"transfer-encoding", b"origin"))
"""Headers that decide who is let in and where a request ends: of two, two programs may believe different ones."""


class Patience(NamedTuple):
    """Seconds. A connection is ended when a request's head takes longer than `head`, when nothing of a body comes for
    that long, when no request follows a reply for `idle`, and when a client reads nothing of its reply for `unread`.
    It is seen half of `head` later at most."""

    head: float = 60
    idle: float = 75
    unread: float = 600


PATIENCE = Patience()


class HangUp:
    """One request's client: gone or not, and who wants to know."""

    __slots__ = ("_told", "gone")

    def __init__(self) -> None:
        self.gone = False
        self._told: Callable[[], object] | None = None

    def tell(self, callback: Callable[[], object] | None) -> None:
        """Have `callback` called when the client leaves, at once if it has left; None takes that back."""
        self._told = callback
        if self.gone and callback is not None:
            callback()

    def leave(self) -> None:
        self.gone = True
        if self._told is not None:
            self._told()


class Door:
    """A server's connections: at most `most` at once. One that comes when there are as many takes the place of the one
    that has been without a request for longest, or is told to come again where each has one."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.open = 0
        self.idle: dict[_Protocol, None] = {}
        """By how long they have been so."""

    def enter(self, connection: _Protocol) -> bool:
        """Whether there is a place for it."""
        self.open += 1
        if self.open > self.most:
            if not self.idle:
                return False
            longest = next(iter(self.idle))
            del self.idle[longest]
            longest.transport.abort()
        self.idle[connection] = None
        return True

    def leave(self, connection: _Protocol) -> None:
        self.open -= 1
        self.idle.pop(connection, None)


class _Corked:
    """A transport whose writes of one turn of the event loop leave together: a reply's head, its first event and its
    first words are one system call instead of three."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._call_soon = asyncio.get_running_loop().call_soon
        self._waiting: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._waiting:
            self._call_soon(self._flush)
        self._waiting.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            if not self._transport.is_closing():
                self._transport.write(b"".join(waiting))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Protocol(HttpToolsProtocol):
    """uvicorn's, for clients that nobody trusts. One timer of a connection looks after it now and then, since requests
    are many and short."""

    def __init__(self, *args: Any, patience: Patience, door: Door, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._patience = patience
        self._door = door
        self._head = 0
        self._pieces = 0
        self._due = self._moved = self.loop.time()
        self._seen = (0, 0)
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(_Corked(transport))  # type: ignore[arg-type]  # it passes on what it has not
        self._due = self.loop.time() + self._patience.head
        self._look_later()
        if not self._door.enter(self):
            # Closing while something is unread would be a reset, and the client not be told why.
            with contextlib.suppress(OSError):
                os.read(transport.get_extra_info("socket").fileno(), MAX_HEAD)
            self.transport.write(TOO_MANY)
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        self._pieces += 1
        self._head += len(data)
        super().data_received(data)
        if self._head > MAX_HEAD and not self.transport.is_closing():
            if not self._busy:
                self.transport.write(TOO_LONG)
                self.transport.close()
            else:
                self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {HANG_UP: HangUp()}  # type: ignore[dict-item]  # typed for dicts alone
        self._due = self.loop.time() + self._patience.head

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.abort()
            raise ConnectionAbortedError("too many requests were sent ahead")  # ends the parsing of what has come
        named = [name for name, _ in self.headers if name in ONCE]
        if len(named) != len(set(named)):
            if self._busy:
                self.transport.abort()
            raise ValueError("a header is there twice")  # which is answered with a 400
        self._door.idle.pop(self, None)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._due = self.loop.time() + self._patience.idle
        if self.pipeline:
            super().on_response_complete()
            return
        self._door.idle[self] = None
        # As uvicorn has it, but for its timer of each reply, which costs more than all that is watched here.
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            self.flow.resume_reading()
        self.cycle.body = bytearray()  # of a request that was refused unread

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._door.leave(self)
        cycle = self.cycle
        super().connection_lost(exc)
        if cycle is not None and cycle.disconnected:
            hang_up_of(cycle.scope).leave()  # type: ignore[arg-type]  # a TypedDict there

    @property
    def _busy(self) -> bool:
        """Whether there is a request to be answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _look_later(self) -> None:
        self._timer = self.loop.call_later(self._patience.head / 2, self._look)

    def _look(self) -> None:
        now = self.loop.time()
        seen = (self._pieces, self.transport.get_write_buffer_size())
        if seen != self._seen:
            self._seen, self._moved = seen, now
        if self._overdue(now):
            self.transport.abort()
        else:
            self._look_later()

    def _overdue(self, now: float) -> bool:
        still = now - self._moved
        if self.transport.get_write_buffer_size():
            return still >= self._patience.unread
        if not self._busy:
            return now >= self._due
        waits = self.cycle.more_body and not self.pipeline and not self.flow.read_paused
        return waits and still >= self._patience.head


def hang_up_of(scope: Scope) -> HangUp:
    found: HangUp = scope["extensions"][HANG_UP]
    return found


async def while_connected(scope: Scope, work: Awaitable[None]) -> None:
    """Do the work, unless the client hangs up first: the work is then cancelled, and that is no error."""
    worker = asyncio.current_task()
    assert worker is not None
    hang_up = hang_up_of(scope)
    hang_up.tell(worker.cancel)
    try:
        await work
    except asyncio.CancelledError:
        if not hang_up.gone:
            raise
        worker.uncancel()
    finally:
        hang_up.tell(None)


def server_settings(
    application: Application, patience: Patience = PATIENCE, *, connections: int = sys.maxsize
) -> uvicorn.Config:
    """For servers that run in somebody else's event loop and are told by him when to end. `connections` is how many
    there may be at once."""
    return uvicorn.Config(
        application,
        http=partial(_Protocol, patience=patience, door=Door(connections)),  # type: ignore[arg-type]  # typed for classes alone
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        backlog=min(BACKLOG, connections),  # so many are taken at a time, before any is sent away
        server_header=False,
        date_header=False,
    )
