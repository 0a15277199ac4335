"""An HTTP/1.1 client for one server, with connections that are kept alive. Sends requests, and returns the bytes of
responses as they arrive.

The client has only the features that calls to engine servers and to the service need: no redirects, cookies, proxies or
compression. `httptools` parses the responses. The client replaces aiohttp to save processor time. With 32 concurrent
calls, a streamed call of 18 events takes 0.11 to 0.2 ms of CPU, and 0.24 to 0.31 ms with aiohttp 3.14. For comparison,
the gateway takes about 1 ms of CPU for a whole call. Importing aiohttp takes 0.25 s of CPU, more than the rest of a
command such as `outrider status`.

The callers encode JSON and retry requests. Invariant: a connection carries one exchange (a request and its response) at
a time, and is reused only after the whole response was read.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING, cast
from urllib.parse import quote, urlsplit

import httptools

from outrider.wire.tls import trusting_this_machine

if TYPE_CHECKING:
    import ssl  # imported only for annotations: see wire/tls.py

CONNECT_SECONDS = 10.0
# uvicorn, the server of vLLM and SGLang, closes idle connections after 5 s. This client reuses a connection only if the
# connection was idle for a shorter time. Otherwise the client might send a request over a connection that uvicorn is
# just closing.
KEEP_ALIVE_SECONDS = 4.0
Buffer = bytes | memoryview
"""A piece of a request's body. A piece may be sent without a copy, so it must not be changed afterwards."""
LARGE = 1 << 16
"""A request of more than this number of bytes is sent piece by piece, because joining the pieces would copy a long
prompt."""
PATH_CHARACTERS = "/%:@!$&'()*+,;=~"
"""Characters that are not percent-encoded in the path of a URL."""
PROBES = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
"""When a connection has been silent for 60 seconds, the kernel probes every 10 seconds whether the other machine still
answers. After 6 probes without an answer, reading raises TimeoutError. Some calls have no time limit of their own.
Where the module `socket` lacks these options, as on macOS, the system's own times apply."""
HIGH_WATER = 128 << 10
"""While more than this number of bytes of a response are unread, the connection reads no more from its socket."""


class Connections:
    """The connections to one server, one for each concurrent exchange. `url` is an http or https URL without a query.
    For https, `tls` sets the accepted certificate authorities, by default those of this machine. Connecting may take up
    to `connect_seconds`.

    `request` raises OSError or TimeoutError if the server cannot be reached.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        *,
        tls: ssl.SSLContext | None = None,
        connect_seconds: float = CONNECT_SECONDS,
    ) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._secure = (tls or trusting_this_machine()) if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._secure else 80)
        self._path = quote(parts.path.rstrip("/"), safe=PATH_CHARACTERS)
        self._connect_seconds = connect_seconds
        host = parts.netloc.rpartition("@")[2]
        ascii_host = host if host.isascii() else host.encode("idna").decode()
        self._head = _lines({"Host": ascii_host, "Accept": "*/*", **headers})
        self._idle: deque[_Connection] = deque()
        self._busy: set[_Connection] = set()
        self._closed = False

    async def request(
        self,
        method: str,
        path: str,
        body: Sequence[Buffer] = (),
        headers: Mapping[str, str] | None = None,
        *,
        opened: Callable[[Response], None] | None = None,
        repeatable: bool = False,
    ) -> Response:
        """Send a request, and return the response once its status and headers have arrived. The caller must close the
        response. `body` is a series of pieces. `opened` is a function that is called with the response before the
        request is sent. Another task can then end the exchange at any time with `Response.cut`.

        A server may close an idle connection at the moment when a request is sent over this connection. If the request
        is `repeatable`, it is then sent again, over a new connection.
        """
        own = _lines(headers) if headers else b""
        length = b"Content-Length: %d\r\n" % sum(map(len, body)) if body or method == "POST" else b""
        start = f"{method} {self._path}{path} HTTP/1.1\r\n".encode()
        pieces = (start, self._head, own, length, b"\r\n", *body)
        kept = self._reused()
        if kept is not None and repeatable:
            with suppress(ConnectionError):
                return await self._exchange(kept, pieces, opened)
            kept = None
        return await self._exchange(kept or await self._connect(), pieces, opened)

    async def _exchange(
        self, connection: _Connection, pieces: Sequence[Buffer], opened: Callable[[Response], None] | None
    ) -> Response:
        if self._closed:
            connection.abort()
            raise ConnectionAbortedError("the client was closed")
        self._busy.add(connection)
        response = Response(self, connection)
        try:
            if opened is not None:
                opened(response)
            await connection.begin(pieces)
        except BaseException:  # also after a cancellation, because a connection with half a request cannot be reused
            response.close()
            raise
        return response

    @property
    def idle(self) -> int:
        """The number of idle connections that can be reused."""
        return sum(connection.reusable for connection in self._idle)

    @property
    def busy(self) -> int:
        """The number of exchanges in progress."""
        return len(self._busy)

    def close(self) -> None:
        """Close all connections. This ends the exchanges in progress, and reading their responses then raises
        ConnectionAbortedError."""
        self._closed = True
        for connection in (*self._idle, *self._busy):
            connection.abort()
        self._idle.clear()

    def give_back(self, connection: _Connection) -> None:
        """Keep a connection for reuse after its exchange, or close it if it cannot be reused."""
        self._busy.discard(connection)
        if connection.reusable and not self._closed:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.abort()

    def _reused(self) -> _Connection | None:
        oldest_allowed = asyncio.get_running_loop().time() - KEEP_ALIVE_SECONDS
        while self._idle:
            # Use the newest connection. Connections that are not needed then become too old and are closed.
            connection = self._idle.pop()
            if connection.reusable and connection.idle_since > oldest_allowed:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        """Connect to the first of the server's addresses that accepts. The time limit is divided among the addresses,
        so that an address that does not reply does not block the next one. If all addresses fail, raises the error of
        the last address."""
        async with asyncio.timeout(self._connect_seconds):
            *others, last = await self._addresses()
            for address in others:
                with suppress(OSError):  # includes TimeoutError
                    async with asyncio.timeout(self._connect_seconds / (len(others) + 1)):
                        return await self._connect_to(address)
            return await self._connect_to(last)

    async def _connect_to(self, address: str) -> _Connection:
        name = self._host if self._secure else None
        _, protocol = await asyncio.get_running_loop().create_connection(
            _Connection, address, self._port, ssl=self._secure, server_hostname=name
        )
        return protocol

    async def _addresses(self) -> Sequence[str]:
        """Return the server's IP addresses, at least one."""
        try:
            ip_address(self._host)
        except ValueError:
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            return list(dict.fromkeys(str(address[0]) for *_, address in found))
        return [self._host]


class Response:
    """A response whose body can be read while it arrives. `status` and `header` are valid once `Connections.request`
    has returned. After `close`, reading raises ConnectionAbortedError."""

    def __init__(self, owner: Connections, connection: _Connection) -> None:
        self._owner = owner
        self._connection: _Connection | None = connection

    @property
    def status(self) -> int:
        return self._open().status

    @property
    def complete(self) -> bool:
        """True once the whole response has arrived."""
        return self._open().complete

    def header(self, name: bytes) -> bytes | None:
        """Return the value of the first header with this name (in lower case), or None if there is no such header."""
        return self._open().headers.get(name)

    async def arrived(self) -> bytes:
        """Wait for at least one byte of the body, and return the bytes that have arrived since the last call. Returns
        b"" at the end of the body. Raises OSError if the connection breaks."""
        connection = self._open()
        while not connection.body:
            if connection.complete:
                return b""
            await connection.more()
        return connection.take_body()

    async def whole(self, most: int | None = None) -> bytes:
        """Read and return the body, or its first `most` bytes if the body is longer."""
        parts: list[bytes] = []
        size = 0
        while part := await self.arrived():
            parts.append(part)
            size += len(part)
            if most is not None and size >= most:
                break
        return b"".join(parts)[:most]

    def cut(self) -> None:
        """Close the connection. A task that is reading the response then gets ConnectionAbortedError."""
        if self._connection is not None:
            self._connection.abort()

    def close(self) -> None:
        """Give the connection back for reuse, or close it if the response was not read to its end. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._owner.give_back(connection)

    def _open(self) -> _Connection:
        if self._connection is None:
            raise ConnectionAbortedError("the response was closed")
        return self._connection


class _Connection(asyncio.Protocol):
    """One connection and the response that arrives on it. asyncio calls `connection_made`, `data_received`,
    `eof_received` and `connection_lost`; the HTTP parser calls the methods named `on_...`."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.body: list[bytes] = []
        """The unread part of the response's body."""
        self._unread = 0
        self._paused = False
        self.complete = True
        self._head_complete = False
        self._lost: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def reusable(self) -> bool:
        return self.complete and self._lost is None and self._transport is not None and not self._paused

    async def begin(self, request: Sequence[Buffer]) -> None:
        """Send a request, and wait for the status and headers of its response."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self.status, self.headers, self.body, self._unread = 0, {}, [], 0
        self.complete = self._head_complete = False
        if sum(map(len, request)) > LARGE:
            self._transport.writelines(request)
        else:
            self._transport.write(b"".join(request))
        while not self._head_complete:
            await self.more()

    def more(self) -> asyncio.Future[None]:
        """Return a future that is done once more data has arrived or the connection has ended. If the connection has
        already ended, raises the error that ended it."""
        if self._lost is not None:
            raise self._lost
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def take_body(self) -> bytes:
        """Return the unread part of the body, and forget it."""
        parts, self.body, self._unread = self.body, [], 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def abort(self) -> None:
        if self._transport is not None:
            self._lose(ConnectionAbortedError("the connection was closed"))
            self._transport.abort()
            self._transport = None

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # the future is done already if the reader was cancelled
            waiter.set_result(None)

    def _lose(self, error: Exception) -> None:
        if self._lost is None:
            self._lost = error
            self._wake()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        connected = transport.get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in PROBES.items():
            if (option := getattr(socket, name, None)) is not None:
                connected.setsockopt(socket.IPPROTO_TCP, option, value)

    def data_received(self, data: bytes) -> None:
        if self.complete:  # bytes after a response must not become part of the next response
            self.abort()
            return
        self._unread += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._lose(ConnectionError(f"the answer is not HTTP: {error}"))
            self.abort()
            return
        if self._unread > HIGH_WATER and not self.body and not self.complete:
            # The response has many bytes but no body yet, for example because its headers are too long. Close the
            # connection instead of pausing it, because only `take_body` resumes reading, and `take_body` is not called
            # before a body arrives.
            self._lose(ConnectionError(f"{self._unread} bytes of an answer came, and none of its body"))
            self.abort()
            return
        if self._unread > HIGH_WATER and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        return None

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        sized = self.headers.keys() & {b"content-length", b"transfer-encoding"}
        if self._head_complete and not self.complete and error is None and not sized:
            self.complete = True  # a response without a stated length ends when its connection ends
        self._lose(error or ConnectionResetError("the server closed the connection"))
        self._wake()

    def on_message_begin(self) -> None:
        if self.complete:
            raise ConnectionError("there is more than one answer")  # this error stops the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.setdefault(name.lower(), value)

    def on_headers_complete(self) -> None:
        # A status below 200, such as 100 Continue, is followed by another response.
        if (status := self._parser.get_status_code()) >= 200:
            self.status = status
            self._head_complete = True
        else:
            self.headers = {}

    def on_body(self, part: bytes) -> None:
        self.body.append(part)

    def on_message_complete(self) -> None:
        if self._head_complete:
            self.complete = True
            if not self._parser.should_keep_alive():
                self._lose(ConnectionResetError("the server closed the connection"))


def _lines(headers: Mapping[str, str]) -> bytes:
    """Encode header lines. Raises ValueError if a header contains a line break."""
    text = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    if text.count("\r") != len(headers) or text.count("\n") != len(headers):
        raise ValueError("a header must not contain a line break")
    return text.encode()
