"""The HTTP server: uvicorn with limits against untrusted clients, and with a callback for the moment when a client
disconnects.

Plain ASGI has no such callback: for every request, a second task must wait for `http.disconnect`. This module has no
routes. Invariants:
- The callback is called once after the client has disconnected, even if the application sets the callback only after
  the disconnection.
- Memory and time are limited for unfinished requests and for all data outside of bodies.
- The number of open connections never exceeds the server's limit.
- One client cannot take all connections.

The module subclasses two classes of uvicorn and uses attributes that uvicorn does not document.
tests/test_http_server.py lists these attributes and checks them in the installed version. pyproject.toml allows only
versions that were tested.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from functools import partial
from typing import Any, NamedTuple

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from outrider.concurrency.chores import Failures

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

DISCONNECT = "outrider.disconnect"
CONNECTION = "outrider.connection"
BACKLOG = 2048
"""Maximum number of connections that wait in the kernel until the server accepts them."""
ACCEPTED_AT_ONCE = 64
"""Maximum number of connections accepted before the event loop does other work. The number is small, because the server
must read the data of a client before newer clients can take this client's place (`ConnectionLimit`)."""
ACCEPTING = "accept connections"
"""The name under which failures to accept connections are noted in `Failures`, the service's list of failing work."""
ACCEPT_FAILED = "socket.accept() out of system resource"
"""asyncio calls the event loop's exception handler with this message when it cannot accept a connection."""
ACCEPT_SECONDS = 5.0
MAX_HEAD = 64 << 10
"""Maximum bytes of a request before its body, between two chunks of the body, or after the body. Most clients send a
few thousand."""
MAX_PIPELINED = 16
"""Maximum number of pipelined requests: requests sent on a connection before the reply to an earlier request. Common
clients send none."""
TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
BUSY = b"this server has reached its maximum number of connections: try again\n"
TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\nretry-after: 1\r\n"
    b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(BUSY), BUSY)
)
WEBSOCKET_PIECE = 8 << 10
"""Maximum bytes of a WebSocket that are parsed before other connections get their turn. These bytes may contain up to
1,400 frames, and parsing so many frames takes 15 ms."""
MAX_FRAGMENTS = 16_384
"""Maximum number of frames of a WebSocket message. Clients send a message as one frame, but a proxy may split the frame
into frames of a few KiB."""
ONCE = frozenset((b"host", b"authorization", b"content-length", b"transfer-encoding", b"origin"))
"""Headers that decide about access or about the end of the body. A request that has such a header twice is refused,
because a proxy in front of this server might use the first value, and this server the second."""


class Timeouts(NamedTuple):
    """Times in seconds after which a connection is closed. The times are checked every `head` / 2 seconds.

    `head`: until a request's headers are complete, and between two pieces of its body.
    `idle`: between a reply and the client's next request.
    `unread`: while the client reads nothing of its reply.
    """

    head: float = 60
    idle: float = 75
    unread: float = 600


TIMEOUTS = Timeouts()


class Disconnect:
    """Calls a callback when the client of a request disconnects. From the disconnection on, `gone` is True."""

    __slots__ = ("_callback", "gone")

    def __init__(self) -> None:
        self.gone = False
        self._callback: Callable[[], object] | None = None

    def notify(self, callback: Callable[[], object] | None) -> None:
        """Call `callback` when the client disconnects, or at once if the client has already disconnected. None removes
        the callback."""
        self._callback = callback
        if self.gone and callback is not None:
            callback()

    def set(self) -> None:
        self.gone = True
        if self._callback is not None:
            self._callback()


class ConnectionLimit:
    """Allows at most `most` open connections to a server.

    Every connection has an owner. At first, the owner is the client's address. The application can set another owner
    with `claim`. When a new connection exceeds the maximum, a connection of the owner with the most connections is
    closed: the one whose client has been silent for longest. The new client is refused only if no old connection may be
    closed.

    Claimed and unclaimed connections may each take half of the maximum. The owner is chosen from the group that has
    more than its half. So a client with many claimed connections loses one of its own connections, even if other
    clients have the same address. The unclaimed connections of one address may be at most a quarter of `most`.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.open = 0
        self._claimed = _Closable()
        self._others = _Closable()

    def enter(self, connection: _Protocol, address: str) -> bool:
        """Count a new connection, and close an old connection if there are too many. Returns False if there are too
        many and no old connection may be closed."""
        self.open += 1
        if self._others.count(address) >= max(1, self.most // 4):
            self._others.longest_silent(address).abort()
        elif self.open > self.most:
            if (longest := self._to_close()) is None:
                return False
            longest.abort()
        connection.owner = address
        self._others.add(connection)
        return True

    def active(self, connection: _Protocol) -> None:
        """Record that the client of a connection has sent data."""
        self._group(connection).refresh(connection)

    def claim(self, connection: _Protocol, owner: str, *, keep: bool) -> None:
        """Set the owner of a connection. If `keep` is True, the connection is not closed to make room for others until
        its reply is complete."""
        if not connection.claimed or connection.owner != owner or keep:
            self._group(connection).discard(connection)
            connection.owner, connection.claimed = owner, True
            if not keep:
                self._claimed.add(connection)

    def replied(self, connection: _Protocol) -> None:
        """Record that a reply is complete. From now on, its connection may be closed to make room for others."""
        self._group(connection).add(connection)

    def upgraded(self, connection: _Protocol) -> None:
        """Record that a connection becomes a WebSocket, which is never closed to make room for others. `leave_upgraded`
        records its end."""
        self._group(connection).discard(connection)

    def leave(self, connection: _Protocol) -> None:
        self.leave_upgraded()
        self._group(connection).discard(connection)

    def leave_upgraded(self) -> None:
        self.open -= 1

    def _group(self, connection: _Protocol) -> _Closable:
        return self._claimed if connection.claimed else self._others

    def _to_close(self) -> _Protocol | None:
        either = (self._others, self._claimed)
        groups = either if self._others.size > self.most // 2 else reversed(either)
        return next((group.longest_silent(group.largest()) for group in groups if group.size), None)


class _Closable:
    """The connections that may be closed to make room for others, by owner. Each owner's connections are sorted by the
    time when the client last sent data, oldest first."""

    def __init__(self) -> None:
        self.size = 0
        self._by_owner: dict[str, dict[_Protocol, None]] = {}

    def add(self, connection: _Protocol) -> None:
        """Add a connection. A connection that is already here keeps its position."""
        owned = self._by_owner.setdefault(connection.owner, {})
        if connection not in owned:
            owned[connection] = None
            self.size += 1

    def discard(self, connection: _Protocol) -> None:
        owned = self._by_owner.get(connection.owner)
        if owned is not None and connection in owned:
            del owned[connection]
            self.size -= 1
            if not owned:
                del self._by_owner[connection.owner]

    def refresh(self, connection: _Protocol) -> None:
        owned = self._by_owner.get(connection.owner)
        if owned is not None and connection in owned:
            del owned[connection]
            owned[connection] = None

    def count(self, owner: str) -> int:
        return len(self._by_owner.get(owner, ()))

    def largest(self) -> str:
        return max(self._by_owner, key=self.count)

    def longest_silent(self, owner: str) -> _Protocol:
        """Remove and return the connection of this owner whose client has been silent for longest."""
        longest = next(iter(self._by_owner[owner]))
        self.discard(longest)
        return longest


class _CoalescedWrites:
    """Wraps a transport, and sends all writes of one pass of the event loop together. The headers of a reply, its first
    event and its first tokens are then one system call instead of three."""

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
    """uvicorn's protocol for one HTTP connection, with the limits of this module.

    One timer per connection checks all its timeouts at intervals. With many short requests, a timer for each request
    would cost more.
    """

    def __init__(self, *args: Any, timeouts: Timeouts, limit: ConnectionLimit, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._timeouts = timeouts
        self.limit = limit
        self.owner = ""
        """The owner of the connection for `ConnectionLimit`. `claimed` is True if the application has named the
        owner."""
        self.claimed = False
        self._answered: RequestResponseCycle | None = None
        """The request that is being answered. uvicorn's `cycle` is the latest request, which may be pipelined."""
        self._head = 0
        self._past_head = False
        self._pieces = 0
        self._due = self._moved = self.loop.time()
        self._seen = (0, 0)
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # narrowed as in uvicorn
        super().connection_made(_CoalescedWrites(transport))  # type: ignore[arg-type]  # the wrapper delegates the rest
        self._due = self.loop.time() + self._timeouts.head
        self._check_later()
        if not self.limit.enter(self, _address(self.client)):
            # Read the data that has arrived. If data is unread when a socket is closed, the kernel sends a reset, and
            # the client may never receive the response TOO_MANY (503).
            with contextlib.suppress(OSError):
                os.read(transport.get_extra_info("socket").fileno(), MAX_HEAD)
            self.transport.write(TOO_MANY)
            self.transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._pieces += 1
        self.limit.active(self)
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
        self._past_head = False
        self.scope["extensions"] = {DISCONNECT: Disconnect(), CONNECTION: self}  # type: ignore[dict-item]  # its values are typed as dicts
        self._due = self.loop.time() + self._timeouts.head

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._past_head:  # header fields after the body are dropped, because they are not checked against ONCE
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._past_head = True
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.abort()
            raise ConnectionAbortedError("too many requests were sent ahead")  # this error stops the parser
        named = [name for name, _ in self.headers if name in ONCE]
        if len(named) != len(set(named)):
            if self._busy:
                self.transport.abort()
            raise ValueError("a header is there twice")  # uvicorn replies to an error of the parser with 400
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._due = self.loop.time() + self._timeouts.idle
        self.limit.replied(self)
        if self.pipeline:
            super().on_response_complete()
            return
        # These are uvicorn's own steps after a reply, without its keep-alive timer.
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            self.flow.resume_reading()
        self.cycle.body = bytearray()  # frees the part of the body that the application has not read

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def handle_websocket_upgrade(self) -> None:
        if self._busy:  # an earlier request on this connection has no complete reply yet
            self.transport.abort()
            return
        if self._timer is not None:
            self._timer.cancel()
        self.limit.upgraded(self)
        super().handle_websocket_upgrade()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.limit.leave(self)
        self.pipeline.clear()  # pipelined requests can no longer get a reply
        super().connection_lost(exc)
        if (cycle := self._answered) is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            disconnect_of(cycle.scope).set()  # type: ignore[arg-type]  # uvicorn types the scope as a TypedDict

    @property
    def _busy(self) -> bool:
        """True while the current request has no complete reply."""
        return self.cycle is not None and not self.cycle.response_complete

    def _check_later(self) -> None:
        self._timer = self.loop.call_later(self._timeouts.head / 2, self._check)

    def _check(self) -> None:
        """Close the connection if one of its timeouts has expired."""
        now, unsent = self.loop.time(), self.transport.get_write_buffer_size()
        if (self._pieces, unsent) != self._seen:
            self._seen, self._moved = (self._pieces, unsent), now
        still = now - self._moved
        if unsent:
            overdue = still >= self._timeouts.unread
        elif not self._busy:
            overdue = now >= self._due
        else:
            # A silent client is overdue only while the server reads the body. It is not overdue when the whole body has
            # arrived, or when reading is paused.
            reads = self.cycle.more_body and not self.pipeline and not self.flow.read_paused
            overdue = reads and still >= self._timeouts.head
        if overdue:
            self.transport.abort()
        else:
            self._check_later()


class _WebSocket(WebSocketsSansIOProtocol):
    """uvicorn's protocol for a WebSocket, with the limits of this module.

    The next message is read only after the application has received the previous one. There is no timeout for a silent
    client here, because the application sends heartbeats. Received data is parsed in pieces, and other connections are
    served between two pieces. The parser is Python code and may take 0.3 s for the data of a single read.
    """

    def __init__(self, *args: Any, timeouts: Timeouts, limit: ConnectionLimit, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._timeouts = timeouts
        self._limit = limit
        self._unread: asyncio.TimerHandle | None = None
        self._closing: asyncio.TimerHandle | None = None
        self._was_closing = False
        self._rest = bytearray()
        """Received data that is not parsed yet. Reading is paused while there is such data."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._check_closing_later()

    def _check_closing_later(self) -> None:
        self._closing = self.loop.call_later(self._timeouts.unread, self._check_closing)

    def _check_closing(self) -> None:
        """Abort the connection if it has been closing for `unread` seconds. A connection closes only when all data was
        sent, and the client may read nothing more. `pause_writing` is not called for a little data."""
        if self._was_closing:
            self.transport.abort()
            return
        self._was_closing = self.transport.is_closing()
        self._check_closing_later()

    def data_received(self, data: bytes) -> None:
        if not self._rest and len(data) <= WEBSOCKET_PIECE:
            super().data_received(data)
            return
        begins = not self._rest
        self._rest += data
        self.transport.pause_reading()
        if begins:
            self._take_piece()

    def _take_piece(self) -> None:
        piece = bytes(self._rest[:WEBSOCKET_PIECE])
        del self._rest[:WEBSOCKET_PIECE]
        super().data_received(piece)
        if self.transport.is_closing():
            self._rest.clear()
        elif self._rest:
            self.loop.call_soon(self._take_piece)
        elif not self.read_paused:
            self.transport.resume_reading()

    async def receive(self) -> Any:
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            if not self._rest:
                self.transport.resume_reading()
        return message

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text":
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:  # uvicorn would log a traceback
                self.transport.abort()
                return
        super().send_receive_event_to_app()

    def handle_cont(self, event: Any) -> None:
        super().handle_cont(event)
        if len(self.frames) > MAX_FRAGMENTS:  # frames are counted, because empty frames have no bytes to count
            self.transport.abort()

    def pause_writing(self) -> None:
        """Close the connection after `unread` seconds, unless the client reads again before that. This method is called
        when the client has stopped reading."""
        super().pause_writing()
        self._unread = self.loop.call_later(self._timeouts.unread, self.transport.abort)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        super().resume_writing()

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:  # the client does not read, so pongs would pile up
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._unread, self._closing):
            if timer is not None:
                timer.cancel()
        self._limit.leave_upgraded()
        super().connection_lost(exc)


def disconnect_of(scope: Scope) -> Disconnect:
    """Return the `Disconnect` of a request. Raises KeyError if another server runs the application."""
    found: Disconnect = scope["extensions"][DISCONNECT]
    return found


def claim(scope: Scope, owner: str, *, keep: bool = False) -> None:
    """Set the owner of a request's connection; see `ConnectionLimit`. If `keep` is True, the connection is not closed
    to make room for others until the reply is complete. Has no effect on WebSockets."""
    connection: _Protocol | None = scope.get("extensions", {}).get(CONNECTION)
    if connection is not None:
        connection.limit.claim(connection, owner, keep=keep)


async def while_connected(scope: Scope, work: Awaitable[None]) -> None:
    """Await `work`. If the client disconnects before `work` has ended, cancel `work` and return without an error."""
    worker = asyncio.current_task()
    assert worker is not None
    disconnect = disconnect_of(scope)
    disconnect.notify(worker.cancel)
    try:
        await work
    except asyncio.CancelledError:
        if not disconnect.gone:
            raise
        worker.uncancel()
    finally:
        disconnect.notify(None)


def _address(client: tuple[str, int] | None) -> str:
    """Return the owner of an unclaimed connection: the client's IPv4 address or IPv6 network. The IPv6 network is used
    because one client may have all 2**64 addresses of the network."""
    if client is None:
        return ""
    host = client[0].partition("%")[0]
    if ":" in host and not host.startswith("::ffff:"):
        return socket.inet_pton(socket.AF_INET6, host)[:8].hex()
    return host


@contextlib.contextmanager
def noting_refusals(failures: Failures) -> Iterator[None]:
    """While the block runs, record a failure in `failures` when connections cannot be accepted because file descriptors
    or memory have run out. The failure is cleared when no attempt to accept a connection has failed for ACCEPT_SECONDS.

    asyncio tries again every second, and each time calls the loop's exception handler up to ACCEPTED_AT_ONCE times. The
    default handler would log a traceback for each call; `failures` limits the log lines. (uvloop keeps a spare
    descriptor to accept such a connection and close it.)
    """
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    ending: asyncio.TimerHandle | None = None

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal ending
        error = context.get("exception")
        if context.get("message") != ACCEPT_FAILED or not isinstance(error, OSError):
            (before or type(loop).default_exception_handler)(loop, context)
            return
        failures.note(ACCEPTING, error)
        if ending is not None:
            ending.cancel()
        ending = loop.call_later(ACCEPT_SECONDS, failures.note_success, ACCEPTING)

    loop.set_exception_handler(handle)
    try:
        yield
    finally:
        loop.set_exception_handler(before)
        if ending is not None:
            ending.cancel()


def server_settings(
    application: Application,
    timeouts: Timeouts = TIMEOUTS,
    *,
    connections: int = sys.maxsize,
    websockets: int = 0,
    tls: ssl.SSLContext | None = None,
) -> uvicorn.Config:
    """Return the settings of a server that runs in the caller's event loop. `connections` is the maximum number of open
    connections. `websockets` is the maximum number of bytes of a WebSocket message, or 0 for a server without
    WebSockets."""
    limit = ConnectionLimit(connections)
    return uvicorn.Config(
        application,
        http=partial(_Protocol, timeouts=timeouts, limit=limit),  # type: ignore[arg-type]  # typed for classes only
        ws=partial(_WebSocket, timeouts=timeouts, limit=limit) if websockets else "none",  # type: ignore[arg-type]
        ws_max_size=websockets,
        ws_ping_interval=None,
        ws_per_message_deflate=False,
        ssl_context_factory=None if tls is None else lambda config, default: tls,
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        # asyncio also uses this as the number of connections to accept at once. `api.gateway_server` then gives the
        # kernel's queue the length BACKLOG.
        backlog=ACCEPTED_AT_ONCE,
        server_header=False,
        date_header=False,
    )
