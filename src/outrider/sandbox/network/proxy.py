"""The forward proxy: carries one request of each connection to a server, if the gate allows the request.

The gate has the rules, and the dialer checks the addresses. The proxy follows no redirect. Invariant: each connection
carries one request, whose head has one meaning, so every request is checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol

import msgspec

from outrider.sandbox.network.dialer import Dialer, ProxiedServer, ServerConnection
from outrider.sandbox.network.requests import (
    MAX_HEAD,
    NotAllowed,
    NotPassedOn,
    ReplyHead,
    RequestHead,
    Unreachable,
    place_of,
    read_request,
)

HEAD_SECONDS = 60.0
SILENCE_SECONDS = 120.0
"""A connection is closed after this many seconds without a byte."""
CONNECTION_SECONDS = 3600.0
"""Maximum duration of one connection, even while bytes arrive."""
LATE_BODY_SECONDS = 5.0
"""Seconds for the rest of a request's body, once the server has answered."""
CHUNK = 64 << 10
MAX_REWRITTEN = 32 << 20
"""Maximum bytes of a page of a package index, whose addresses are replaced."""
INDEX_FIELDS = frozenset(
    {"accept", "cache-control", "content-length", "if-modified-since", "if-none-match", "range", "user-agent"}
)
"""The header lines that are passed on to a package index. Other lines are dropped, so that a program cannot make the
index fail. Without `accept-encoding`, pages are not compressed, and their addresses can be replaced."""
BODILESS = frozenset({204, 304})
OVERLOADED = frozenset({502, 503, 504})


class LimitExceeded(Exception):
    """A limit of the sandbox's network is reached."""


class ProxyRoute(msgspec.Struct, frozen=True, kw_only=True):
    """The route of an allowed request. `replaced` are pairs of texts: the first one is replaced by the second one in
    the pages and redirects of a package index. `methods` are the allowed methods; all methods are allowed if it is
    empty."""

    server: ProxiedServer
    replaced: Sequence[tuple[str, str]] = ()
    methods: frozenset[str] = frozenset()


class Passage(Protocol):
    """One allowed request while it is carried. `sent` and `received` count bytes, and raise LimitExceeded."""

    route: ProxyRoute

    def sent(self, number: int) -> None: ...
    def received(self, number: int) -> None: ...
    async def pause(self, number: int) -> None:
        """Count `number` bytes, and wait until further bytes may pass."""
        ...

    def failed(self, reason: str, *, blameless: bool) -> None:
        """Note a failure of the server. `blameless` is True if no program in the sandbox can have caused the
        failure."""
        ...

    def reached(self) -> None: ...
    def close(self) -> None: ...


class ProxyGate(Protocol):
    """The rules of a proxy."""

    def admit(self, request: RequestHead) -> Passage:
        """Return the passage of an allowed request. Raises NotPassedOn."""
        ...

    def refuse(self, request: RequestHead, reason: str) -> None:
        """Note that an admitted request was refused for the address of its server, or for its method."""
        ...


class Archive(Protocol):
    """Keeps or replays the replies to requests that are not tunnels."""

    def replay(self, request: RequestHead) -> bytes | None:
        """Return the whole recorded reply, or None if requests are carried to servers. Raises NotPassedOn."""
        ...

    def keep(self, request: RequestHead, reply: bytes) -> None: ...
    def room(self) -> int:
        """Return the maximum number of bytes of a reply to keep; 0 if nothing is kept."""
        ...

    def skip(self) -> None:
        """Note that a reply is too large to be kept."""
        ...


class Proxy:
    """A forward proxy. `name` begins its own error texts."""

    def __init__(
        self, gate: ProxyGate, dialer: Dialer, *, name: str = "outrider", archive: Archive | None = None
    ) -> None:
        self._gate = gate
        self._dialer = dialer
        self._name = name
        self._archive = archive

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        """Carry the request with this head, the first bytes of a connection."""
        try:
            request = read_request(head)
            passage = self._gate.admit(request)
        except NotPassedOn as error:
            await self._say(writer, error)
            return
        try:
            await self._carry(request, passage, reader, writer)
        finally:
            passage.close()

    async def _carry(
        self, request: RequestHead, passage: Passage, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        route = passage.route
        try:
            if route.methods and request.method not in route.methods:
                raise NotAllowed(f"{request.place} takes only {' and '.join(sorted(route.methods))}")
            if self._archive is not None and (recorded := self._archive.replay(request)) is not None:
                passage.received(len(recorded))
                await put(writer, recorded)
                return
            connection = await self._dialer.connect(route.server, tunnel=request.tunnel)
        except NotAllowed as error:
            self._gate.refuse(request, str(error))
            await self._say(writer, error)
            return
        except LimitExceeded:
            writer.transport.abort()
            return
        except NotPassedOn as error:
            passage.failed(str(error), blameless=True)
            await self._say(writer, error)
            return
        flow = Flow(passage)
        try:
            async with flow.watched():
                if request.tunnel:
                    passage.reached()
                    await put(writer, b"HTTP/1.1 200 Connection established\r\n\r\n")
                    async with asyncio.TaskGroup() as both:
                        both.create_task(flow.relay(reader, connection.writer, passage.sent))
                        both.create_task(flow.relay(connection.reader, writer, passage.received))
                else:
                    await self._exchange(request, route, connection, flow, reader, writer)
        except NotPassedOn as error:
            # A program chooses the page, so a page that is refused is not a failure of the index.
            blameless = is_plain_read(request, route) and not isinstance(error, NotAllowed)
            passage.failed(str(error), blameless=blameless)
            await self._say(writer, error)
        except (TimeoutError, LimitExceeded, OSError) as error:
            silent = isinstance(error, TimeoutError) and not flow.exceeded
            if silent and not request.tunnel and not flow.answered:
                passage.failed(f"{request.place} did not answer", blameless=is_plain_read(request, route))
            writer.transport.abort()  # a reply that ends with a normal close would look complete
        finally:
            connection.writer.close()

    async def _exchange(
        self,
        request: RequestHead,
        route: ProxyRoute,
        connection: ServerConnection,
        flow: Flow,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Send a request to its server, and the reply to the client. Raises Unreachable for a reply that is not
        HTTP."""
        server = route.server
        origin = place_of(server.host, server.port, hidden=443 if server.tls else 80)
        # The target is written anew, because a server may read the client's text differently.
        target = f"http://{origin}{request.path}" if connection.absolute else request.path
        only = INDEX_FIELDS if route.methods else None
        head = request.head(target, origin, *connection.header, only=only)
        flow.passage.sent(len(head))
        await put(connection.writer, head)
        failure: Exception | None = None
        async with asyncio.TaskGroup() as both:
            sending = both.create_task(flow.relay(reader, connection.writer, flow.passage.sent, request.length))
            try:
                await self._answer(request, route, connection.reader, flow, writer)
            except (NotPassedOn, LimitExceeded, OSError) as error:
                failure = error
            else:
                await asyncio.wait({sending}, timeout=LATE_BODY_SECONDS)
            sending.cancel()
        if failure is not None:
            raise failure

    async def _answer(
        self,
        request: RequestHead,
        route: ProxyRoute,
        server: asyncio.StreamReader,
        flow: Flow,
        writer: asyncio.StreamWriter,
    ) -> None:
        while True:
            try:
                head = await server.readuntil(b"\r\n\r\n")
            except asyncio.LimitOverrunError as error:
                raise Unreachable("the head of the server's reply is too long") from error
            except (asyncio.IncompleteReadError, OSError) as error:
                raise Unreachable(f"{request.place} closed the connection without a reply") from error
            flow.passage.received(len(head))
            reply = ReplyHead.read(head)
            if reply.status == 101:
                raise Unreachable("the server changes the protocol")
            if reply.status >= 200:
                break
        flow.answered = True
        # Any program can make a server fail by an odd request, except a package index, whose requests are restricted.
        if route.methods and reply.status in OVERLOADED:
            status = f"{request.place} answered with status {reply.status}"
            flow.passage.failed(status, blameless=is_plain_read(request, route))
        else:
            flow.passage.reached()
        length = 0 if request.method == "HEAD" or reply.status in BODILESS else reply.length
        if route.replaced:
            await _write_replaced(reply, length, route.replaced, server, flow, writer, self._kept(request))
            return
        kept = self._kept(request)
        kept.add(first := reply.head())
        await put(writer, first)
        taken = await flow.relay(server, writer, flow.passage.received, length, kept.add)
        if length is not None and taken < length:
            raise OSError("the reply ended early")
        kept.store(reply, length)

    def _kept(self, request: RequestHead) -> KeptReply:
        return KeptReply(request, self._archive)

    async def _say(self, writer: asyncio.StreamWriter, error: NotPassedOn) -> None:
        body = f"{self._name}: {error}\n".encode()
        lines = [f"HTTP/1.1 {error.status}", "Content-Type: text/plain; charset=utf-8", f"Content-Length: {len(body)}"]
        with suppress(OSError):
            await put(writer, ("\r\n".join([*lines, "Connection: close"]) + "\r\n\r\n").encode() + body)


def is_plain_read(request: RequestHead, route: ProxyRoute) -> bool:
    """Return whether the request is a read from a package index, without a body. Such a request cannot make the server
    fail. Any other server may fail because a program sends an odd request or never completes its body."""
    return bool(route.methods) and not request.length


async def put(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write bytes, and wait until there is room for more. Raises OSError."""
    try:
        writer.write(data)
    except RuntimeError as error:  # uvloop raises this for a closed connection
        raise ConnectionResetError(str(error)) from error
    await writer.drain()


class KeptReply:
    """Collects a reply for the archive, as far as there is room."""

    def __init__(self, request: RequestHead, archive: Archive | None) -> None:
        self._request = request
        self._archive = archive
        self._room = 0 if archive is None else archive.room()
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        if self._room and len(self._data) + len(data) > self._room:
            self._room = 0
            self._data.clear()
            if self._archive is not None:
                self._archive.skip()
        elif self._room:
            self._data += data

    def store(self, reply: ReplyHead, length: int | None) -> None:
        """Keep a reply that is complete. A chunked reply is complete only with its last chunk."""
        whole = length is not None or not reply.chunked or self._data.endswith(b"0\r\n\r\n")
        if self._archive is not None and self._room and self._data and whole:
            self._archive.keep(self._request, bytes(self._data))


class Flow:
    """The bytes of one connection, in both directions. `answered` is True once the server's reply has begun, and
    `exceeded` once a limit of the sandbox has ended the connection."""

    def __init__(self, passage: Passage) -> None:
        self.passage = passage
        self.answered = False
        self.exceeded = False
        self._quiet: asyncio.Timeout | None = None

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """End the block with TimeoutError after SILENCE_SECONDS without a byte, or after CONNECTION_SECONDS."""
        async with asyncio.timeout(CONNECTION_SECONDS), asyncio.timeout(SILENCE_SECONDS) as self._quiet:
            yield

    def stir(self) -> None:
        if self._quiet is not None and not self._quiet.expired() and not self.exceeded:
            self._quiet.reschedule(asyncio.get_running_loop().time() + SILENCE_SECONDS)

    def end(self) -> None:
        """End the block of `watched` now, because a limit of the sandbox is reached."""
        self.exceeded = True
        if self._quiet is not None and not self._quiet.expired():
            self._quiet.reschedule(asyncio.get_running_loop().time())

    async def relay(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        count: Callable[[int], None],
        limit: int | None = None,
        see: Callable[[bytes], None] | None = None,
    ) -> int:
        """Copy the bytes of one direction to its end, or up to `limit` bytes. Returns their number. Without a limit,
        the other side's input is then ended. A limit of the sandbox ends the block of `watched`."""
        taken = 0
        with suppress(OSError):
            while limit is None or taken < limit:
                data = await reader.read(CHUNK if limit is None else min(CHUNK, limit - taken))
                if not data:
                    break
                taken += len(data)
                self.stir()
                try:
                    count(len(data))
                except LimitExceeded:
                    self.end()
                    return taken
                if see is not None:
                    see(data)
                await put(writer, data)
                self.stir()
                await self.passage.pause(len(data))
        if limit is None:
            with suppress(OSError, RuntimeError):
                if writer.can_write_eof():
                    writer.write_eof()
        return taken


async def _write_replaced(
    reply: ReplyHead,
    length: int | None,
    pairs: Sequence[tuple[str, str]],
    server: asyncio.StreamReader,
    flow: Flow,
    writer: asyncio.StreamWriter,
    kept: KeptReply,
) -> None:
    """Write a reply of a package index, with replaced addresses in its redirect and, if the body is a page, in its
    body."""
    kind = reply.value("content-type").lower()
    page = length != 0 and not reply.value("content-encoding") and ("html" in kind or "json" in kind)
    fields = []
    for field in reply.fields:
        name, _, value = field.partition(":")
        if page and name.lower() in ("content-length", "transfer-encoding"):
            continue
        fields.append(f"{name}:{_replaced(value, pairs)}" if name.lower() == "location" else field)
    if not page:
        kept.add(first := msgspec.structs.replace(reply, fields=fields).head())
        await put(writer, first)
        taken = await flow.relay(server, writer, flow.passage.received, length, kept.add)
        if length is not None and taken < length:
            raise OSError("the reply ended early")
        kept.store(reply, length)
        return
    body = await _whole_body(reply, length, server, flow)
    body = _replaced(body.decode("utf-8", "surrogateescape"), pairs).encode("utf-8", "surrogateescape")
    fields.append(f"Content-Length: {len(body)}")
    kept.add(data := msgspec.structs.replace(reply, fields=fields).head() + body)
    await put(writer, data)
    kept.store(reply, len(body))


async def _whole_body(reply: ReplyHead, length: int | None, server: asyncio.StreamReader, flow: Flow) -> bytes:
    """Return a body, without the marks of chunks. Raises Unreachable for a body that is cut off, and NotAllowed for a
    body that is too large."""
    body = bytearray()

    async def take(number: int | None) -> None:
        if number is not None and len(body) + number > MAX_REWRITTEN:
            raise NotAllowed("a page of the package index is too large")
        left = number
        while left is None or left:
            data = await server.read(CHUNK if left is None else min(CHUNK, left))
            if not data:
                if left is None:
                    return
                raise Unreachable("the package index ended its reply early")
            flow.stir()
            flow.passage.received(len(data))
            body.extend(data)
            if len(body) > MAX_REWRITTEN:
                raise NotAllowed("a page of the package index is too large")
            left = None if left is None else left - len(data)

    if not reply.chunked:
        await take(length)
        return bytes(body)
    try:
        while size := int((await server.readuntil(b"\r\n")).split(b";")[0], 16):
            if size < 0:
                raise ValueError("a negative size")
            await take(size)
            await server.readexactly(2)
    except (ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise Unreachable("the package index's reply is not HTTP") from error
    return bytes(body)


def _replaced(text: str, pairs: Sequence[tuple[str, str]]) -> str:
    for old, new in pairs:
        text = text.replace(old, new)
    return text


class ProxyServer:
    """Serves connections at a Unix socket: calls `serve` with each connection and the head of its first request. At
    most `most` connections are open at once."""

    def __init__(
        self,
        serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]],
        *,
        most: int,
    ) -> None:
        self._serve = serve
        self._most = most
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def at(self, path: Path | str) -> AsyncIterator[None]:
        """Serve at a path. All connections are closed when the block ends."""
        server = await asyncio.start_unix_server(self._accept, path, limit=MAX_HEAD)
        try:
            yield
        finally:
            server.close()
            await self.cut()

    async def cut(self) -> None:
        """Close all connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._tasks) >= self._most:
            writer.transport.abort()
            return
        self._tasks.add(task)
        try:
            try:
                async with asyncio.timeout(HEAD_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
            except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                return
            await self._serve(reader, writer, head)
        except asyncio.CancelledError:
            pass  # asyncio logs an error for a cancelled handler of a connection
        finally:
            self._tasks.discard(task)
            writer.close()
