"""Keep-alive HTTP/1.1 connections to one server. Sends requests, and returns the bytes of responses as they arrive.

The module has only the features that engine servers and the service's own clients need: no redirects, cookies, proxies
or compression. `httptools` parses the responses. The module replaces aiohttp to save processor time: with 32 concurrent
calls, a streamed call of 18 events takes 0.11 to 0.2 ms of CPU here, and 0.24 to 0.31 ms with aiohttp 3.14. Importing
aiohttp takes a quarter of a second of CPU, which is more than all other work of a command such as `outrider status`.

The callers encode JSON and retry requests. Invariant: a connection carries one exchange at a time, and is reused only
after its response was read to the end.
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
# uvicorn, the server of vLLM and SGLang, closes idle connections after 5 s. This client gives up idle connections
# earlier, so that it sends no request over a connection that uvicorn is about to close.
KEEP_ALIVE_SECONDS = 4.0
Buffer = bytes | memoryview
"""A piece of a request's body. A piece may be sent without a copy, so it must not be changed afterwards."""
LARGE = 1 << 16
"""A request of more than this number of bytes is sent piece by piece, because joining the pieces would copy a long
prompt."""
PATH_CHARACTERS = "/%:@!$&'()*+,;=~"
"""Characters of a URL's path that are sent without percent-encoding."""
HIGH_WATER = 128 << 10
"""While more than this number of bytes of a response are unread, the connection does not read from its socket."""


class Connections:
    """The connections to a server, one for each concurrent exchange. `url` is an http or https URL without a query.
    `tls` has the certificate authorities that are accepted for an https URL, by default those of this machine. A
    connection is given up if it is not made within `connect_seconds`.

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
        """Send a request, and return the response once its head has arrived. `body` consists of consecutive pieces. The
        caller must close the response. `opened` is called with the response before the request is sent, so that another
        task can end the exchange with `Response.cut` at any time.

        A server may close a kept-alive connection at the moment when the request is sent. A `repeatable` request is
        then sent once more, over a new connection.
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
        except BaseException:  # includes a cancellation: a connection with half a request cannot be reused
            response.close()
            raise
        return response

    @property
    def idle(self) -> int:
        """The number of idle connections that can be reused."""
        return sum(connection.reusable for connection in self._idle)

    @property
    def busy(self) -> int:
        """The number of exchanges in flight."""
        return len(self._busy)

    def close(self) -> None:
        """End all exchanges in flight; each read then raises ConnectionAbortedError."""
        self._closed = True
        for connection in (*self._idle, *self._busy):
            connection.abort()
        self._idle.clear()

    def give_back(self, connection: _Connection) -> None:
        """Store a connection for reuse after its exchange, or close the connection if it cannot be reused."""
        self._busy.discard(connection)
        if connection.reusable and not self._closed:
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.abort()

    def _reused(self) -> _Connection | None:
        oldest_allowed = asyncio.get_running_loop().time() - KEEP_ALIVE_SECONDS
        while self._idle:
            # The newest connection is used, so that surplus connections become too old and are closed.
            connection = self._idle.pop()
            if connection.reusable and connection.idle_since > oldest_allowed:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        """Connect to the first of the server's addresses that accepts. Each address except the last may use only an
        equal share of the time limit, so that an address that does not reply does not block the others. Raises the
        error of the last address."""
        async with asyncio.timeout(self._connect_seconds):
            *others, last = await self._addresses()
            for address in others:
                with suppress(OSError):  # TimeoutError is an OSError
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
        """Return the server's IP addresses: one or more."""
        try:
            ip_address(self._host)
        except ValueError:
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            return list(dict.fromkeys(str(address[0]) for *_, address in found))
        return [self._host]


class Response:
    """A response whose body is read as it arrives. `status` and `header` are valid once `Connections.request` has
    returned the response. After `close`, reading raises ConnectionAbortedError."""

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
        """Return the value of the first header with this lower-case name, None if there is no such header."""
        return self._open().headers.get(name)

    async def arrived(self) -> bytes:
        """Wait for at least one byte, and return the bytes that have arrived since the last call. Returns b"" at the
        end of the body. Raises OSError if the connection breaks."""
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
        """Close the connection. A task that waits for the response then receives ConnectionAbortedError."""
        if self._connection is not None:
            self._connection.abort()

    def close(self) -> None:
        """Return the connection for reuse, or close the connection if the response was not read to its end.
        Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._owner.give_back(connection)

    def _open(self) -> _Connection:
        if self._connection is None:
            raise ConnectionAbortedError("the response was closed")
        return self._connection


class _Connection(asyncio.Protocol):
    """One connection, and the response that is arriving. asyncio calls `connection_made`, `data_received`,
    `eof_received` and `connection_lost`. The parser calls the methods whose names begin with `on_`."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.idle_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.body: list[bytes] = []
        """The unread part of the response's body; see `take_body`."""
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
        """Send a request and wait for the head of its response."""
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
        """Return a future that is done once data has arrived or the connection has ended. Raises the error that ended
        the connection if the connection has ended already."""
        if self._lost is not None:
            raise self._lost
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def take_body(self) -> bytes:
        """Return and clear the unread part of the body."""
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
        if waiter is not None and not waiter.done():  # the future is done if the reader was cancelled
            waiter.set_result(None)

    def _lose(self, error: Exception) -> None:
        if self._lost is None:
            self._lost = error
            self._wake()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.complete:  # bytes after the response must not become part of the next response
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
            # For example, the head or the trailers are too long. Reading cannot be paused here, because only
            # `take_body` resumes reading, and `take_body` is not called without a body.
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
            self.complete = True  # a response without a length ends when the connection is closed
        self._lose(error or ConnectionResetError("the server closed the connection"))
        self._wake()

    def on_message_begin(self) -> None:
        if self.complete:
            raise ConnectionError("there is more than one answer")  # this error stops the HTTP parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.setdefault(name.lower(), value)

    def on_headers_complete(self) -> None:
        # A status below 200 is an interim response, such as 100 Continue.
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
    """Encode header lines. Raises ValueError for a header with a line break."""
    text = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    if text.count("\r") != len(headers) or text.count("\n") != len(headers):
        raise ValueError("a header must not contain a line break")
    return text.encode()
