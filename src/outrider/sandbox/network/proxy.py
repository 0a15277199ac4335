"""The forward proxy: carries one request of each connection to a server, if the `ProxyGate` allows the request.

The gate has the rules, and the dialer checks the addresses. The proxy follows no redirect. Invariants: each connection
carries one request, whose head can be read in only one way, so every request is checked; a request needs little memory,
however large its reply is.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Protocol, Self

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
"""After the server's reply, the rest of the request's body is sent on for at most this many seconds."""
LINGER_SECONDS = 2.0
"""Seconds for a refused client to read the reason, while the rest of its request is discarded. A connection that is
closed with unread bytes would be reset, and the reason would be lost."""
CONNECT_PATIENCE = 5.0
"""If the phase ends after a request has waited longer than this many seconds for a connection to its server, the server
counts as failed. A shorter wait is not a failure, because a program can request a connection just before it ends."""
ANSWER_PATIENCE = 30.0
"""If the connection ends after waiting longer than this many seconds for the beginning or the next bytes of a reply,
the server counts as failed."""
CLIENT_SECONDS = 5.0
"""If the client has taken at least this many seconds to receive a reply, an early end of the reply is not a failure of
the server."""
LEAST_CONNECTIONS = 8
"""Number of connections that each sandbox may have, however many connections the other sandboxes have."""
CHUNK = 64 << 10
CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[\t ]*(?:;[^\r\n]*)?\r\n")
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
    """The route of an allowed request. `replaced` are pairs of texts: in the pages and redirects of a package index,
    the first text of each pair is replaced by the second. `methods` are the allowed methods; an empty set allows all
    methods."""

    server: ProxiedServer
    replaced: Sequence[tuple[str, str]] = ()
    methods: frozenset[str] = frozenset()


class Passage(Protocol):
    """An allowed request, until its connection ends. `sent` and `received` count bytes, and raise LimitExceeded."""

    route: ProxyRoute

    def sent(self, number: int) -> None: ...
    def received(self, number: int) -> None: ...
    async def pause(self, number: int) -> None:
        """Count `number` bytes, and wait until further bytes may pass."""
        ...

    def failed(self, reason: str, *, blameless: bool) -> None:
        """Record a failure of the server. `blameless` is True if no program in the sandbox can have caused the
        failure."""
        ...

    def reached(self) -> None: ...
    def waits(self, reason: str | None, *, blameless: bool = False, patience: float = 0.0) -> None:
        """Record that a wait for the server begins, or that it ends if `reason` is None. If the connection ends after a
        wait of more than `patience` seconds, the server has failed, and `reason` describes this failure."""
        ...

    def judge(self) -> None:
        """Record a failure if the current wait has lasted too long."""
        ...

    def close(self) -> None: ...


class ProxyGate(Protocol):
    """Decides which requests a proxy carries."""

    def admit(self, request: RequestHead) -> Passage:
        """Admit a request. Raises NotPassedOn for a request that is not allowed."""
        ...

    def refuse(self, request: RequestHead, reason: str) -> None:
        """Record that an admitted request was refused because of its server's address or its method."""
        ...


class Archive(Protocol):
    """Records replies, or replays recorded replies. Not used for tunnels."""

    def replay(self, request: RequestHead) -> bytes | None:
        """Return the whole recorded reply, or None if this archive does not replay. Raises NotPassedOn."""
        ...

    def keeps(self, request: RequestHead) -> bool:
        """Return whether the reply to a request is recorded."""
        ...

    def reserve(self, size: int) -> bool:
        """Reserve room for `size` bytes of a reply. If there is not enough room, records that a reply is missing and
        returns False. A negative `size` gives room back."""
        ...

    def keep(self, request: RequestHead, reply: bytes) -> None:
        """Record a whole reply. Room for it is already reserved."""
        ...


class Proxy:
    """A forward proxy. `name` is the prefix of the error texts that the proxy itself writes."""

    def __init__(
        self, gate: ProxyGate, dialer: Dialer, *, name: str = "outrider", archive: Archive | None = None
    ) -> None:
        self._gate = gate
        self._dialer = dialer
        self._name = name
        self._archive = archive

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        """Carry the request of a connection. `head` is the request's head, which has already been read."""
        try:
            request = read_request(head)
            passage = self._gate.admit(request)
        except NotPassedOn as error:
            await say(reader, writer, error, name=self._name)
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
            late = f"{request.place} was not reached before the network of the phase ended"
            passage.waits(late, blameless=True, patience=CONNECT_PATIENCE)
            try:
                connection = await self._dialer.connect(route.server, tunnel=request.tunnel)
            except NotAllowed as error:
                if not route.methods:
                    raise
                # The operator's settings name a package index, and no program can change its address. So a refused
                # address is an error in the settings.
                raise Unreachable(f"{error}: the operator may name {route.server.place} in network.internal") from error
            passage.waits(None)
        except NotAllowed as error:
            passage.waits(None)
            self._gate.refuse(request, str(error))
            await say(reader, writer, error, name=self._name)
            return
        except LimitExceeded:
            writer.transport.abort()
            return
        except NotPassedOn as error:
            passage.waits(None)
            passage.failed(str(error), blameless=True)
            await say(reader, writer, error, name=self._name)
            return
        flow = Flow(passage, None if request.tunnel else Awaited(request.place, is_plain_read(request, route)))
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
            # The program chooses the page, so a page that is not allowed is not a failure of the index.
            blameless = is_plain_read(request, route) and not isinstance(error, NotAllowed)
            flow.end_wait()
            passage.failed(str(error), blameless=blameless)
            await say(reader, writer, error, name=self._name)
        except (TimeoutError, LimitExceeded, OSError) as error:
            if flow.exceeded:
                flow.end_wait()
            if isinstance(error, CutShort):
                passage.failed(str(error), blameless=is_plain_read(request, route) and error.by_server)
            passage.judge()  # a failure is noted before the client gets the error
            if isinstance(error, TimeoutError) and not (request.tunnel or flow.answered or flow.exceeded):
                text = f"{request.place} did not answer"
                await say(reader, writer, NotPassedOn("504 Gateway Timeout", text), name=self._name)
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
        """Send a request to its server, and send the reply to the client. Raises Unreachable for a reply that is not
        HTTP."""
        server = route.server
        origin = place_of(server.host, server.port, hidden=443 if server.tls else 80)
        # The request's target is built from its parsed parts, because a server may read the client's text differently.
        target = f"http://{origin}{request.path}" if connection.absolute else request.path
        only = INDEX_FIELDS if route.methods else None
        head = request.head(target, origin, *connection.header, only=only)
        flow.passage.sent(len(head))
        await put(connection.writer, head)
        failure: Exception | None = None
        async with asyncio.TaskGroup() as both:
            sending = both.create_task(flow.relay(reader, connection.writer, flow.passage.sent, request.length))
            try:
                with KeptReply(request, self._archive) as kept:
                    await self._answer(request, route, connection.reader, flow, writer, kept)
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
        kept: KeptReply,
    ) -> None:
        flow.begin_wait()
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
        flow.end_wait()
        flow.answered = True
        # Such a status is a failure only of a package index, because requests to an index are restricted. By an odd
        # request, a program can make most other servers reply with this status.
        if route.methods and reply.status in OVERLOADED:
            status = f"{request.place} answered with status {reply.status}"
            flow.passage.failed(status, blameless=is_plain_read(request, route))
        else:
            flow.passage.reached()
        length = 0 if request.method == "HEAD" or reply.status in BODILESS else reply.length
        if route.replaced:
            reply = msgspec.structs.replace(reply, fields=_with_redirect(reply.fields, route.replaced))
            if length != 0 and is_page(reply):
                await _write_page(request, reply, length, route.replaced, server, flow, writer, kept)
                return
        kept.add(reply.head(recorded=True))
        await put(writer, reply.head())
        taken, end = 0, b""
        while length is None or taken < length:
            data = await flow.read(server, CHUNK if length is None else min(CHUNK, length - taken))
            if not data:
                break
            taken += len(data)
            end = (end + data[-len(CHUNKS_END) :])[-len(CHUNKS_END) :]
            kept.add(data)
            await flow.write(writer, data)
        if taken < length if length is not None else reply.chunked and end != CHUNKS_END:
            raise flow.cut_short()
        kept.store()


async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, error: NotPassedOn, *, name: str) -> None:
    """Send `error` in reply to a request that is not passed on, and discard the rest of the request for up to
    LINGER_SECONDS."""
    body = f"{name}: {error}\n".encode()
    lines = [f"HTTP/1.1 {error.status}", "Content-Type: text/plain; charset=utf-8", f"Content-Length: {len(body)}"]
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            await put(writer, ("\r\n".join([*lines, "Connection: close"]) + "\r\n\r\n").encode() + body)
            if writer.can_write_eof():
                writer.write_eof()
            while await reader.read(CHUNK):
                pass


def is_plain_read(request: RequestHead, route: ProxyRoute) -> bool:
    """Return whether the request is a read from a package index, without a body. Such a request cannot make the server
    fail. Any other server may fail because a program sends an odd request or never completes its body."""
    return bool(route.methods) and not request.length


async def put(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write bytes, and wait until there is room for more. Raises OSError."""
    try:
        writer.write(data)
    except RuntimeError as error:  # uvloop raises RuntimeError for a closed connection
        raise ConnectionResetError(str(error)) from error
    await writer.drain()


class AddressReplacer:
    """Replaces addresses in a text that arrives in pieces."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._new = {old.encode(): new.encode() for old, new in pairs}
        longest_first = sorted(self._new, key=len, reverse=True)
        self._old = re.compile(b"|".join(map(re.escape, longest_first)))
        self._held = len(longest_first[0]) - 1
        """Number of bytes at the end of the text that may be the beginning of an address."""
        self._text = b""

    def replaced(self, data: bytes, *, last: bool = False) -> bytes:
        """Add a piece of the text. Returns the bytes that can be passed on, with their addresses replaced. Unless
        `last` is true, the last bytes are held back, because they may be the beginning of an address."""
        text, found, at = self._text + data, [], 0
        for match in self._old.finditer(text):
            found += [text[at : match.start()], self._new[match[0]]]
            at = match.end()
        end = len(text) if last else max(at, len(text) - self._held)
        self._text = text[end:]
        return b"".join([*found, text[at:end]])


CHUNKS_END = b"\r\n\r\n"
"""The last bytes of a chunked body, after its last chunk or its trailer."""


class CutShort(OSError):
    """The error for a reply that ended too early. `by_server` is True if the server has ended the reply, and the client
    was not slow."""

    def __init__(self, text: str, *, by_server: bool) -> None:
        super().__init__(text)
        self.by_server = by_server


class KeptReply:
    """Collects a reply for the archive while there is room. Unless `store` is called, the reserved room is given back
    at the end of the block."""

    def __init__(self, request: RequestHead, archive: Archive | None) -> None:
        self._request = request
        self._archive = archive if archive is not None and archive.keeps(request) else None
        self._data = bytearray()
        self._reserved = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()

    def add(self, data: bytes) -> None:
        if self._archive is None:
            return
        if self._archive.reserve(len(data)):
            self._reserved += len(data)
            self._data += data
        else:
            self._drop()
            self._archive = None

    def store(self) -> None:
        """Keep the reply, which is complete."""
        if self._archive is not None and self._data:
            self._archive.keep(self._request, bytes(self._data))
            self._reserved = 0

    def _drop(self) -> None:
        if self._archive is not None and self._reserved:
            self._archive.reserve(-self._reserved)
        self._reserved = 0
        self._data.clear()


class Awaited(msgspec.Struct, frozen=True):
    """The server whose reply a request awaits. `blameless` is True if no program in the sandbox can delay the reply."""

    place: str
    blameless: bool


class Flow:
    """The bytes of one connection. `answered` is True once the server's reply has begun. `exceeded` is True once a
    limit of the sandbox has ended the connection. If `awaited` is None, the connection is a tunnel, and no reply is
    awaited."""

    def __init__(self, passage: Passage, awaited: Awaited | None) -> None:
        self.passage = passage
        self.answered = False
        self.exceeded = False
        self._awaited = awaited
        self._quiet: asyncio.Timeout | None = None
        self._server_ended = False
        self._left_in_chunk = 0
        """Bytes left in the current chunk, including the line end after the chunk."""
        self._client_seconds = 0.0
        """Total seconds that writing the reply to the client has taken."""

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

    def begin_wait(self) -> None:
        """Record that the reply's next bytes are awaited."""
        if self._awaited is not None:
            what = "stopped in the middle of its reply" if self.answered else "did not answer"
            text = f"{self._awaited.place} {what}"
            self.passage.waits(text, blameless=self._awaited.blameless, patience=ANSWER_PATIENCE)

    def end_wait(self) -> None:
        self.passage.waits(None)

    def cut_short(self) -> CutShort:
        """Return the error of a reply that ended too early."""
        place = "the server" if self._awaited is None else self._awaited.place
        by_server = self._server_ended and self._client_seconds < CLIENT_SECONDS
        return CutShort(f"{place} ended its reply early", by_server=by_server)

    async def read(self, server: asyncio.StreamReader, number: int = CHUNK) -> bytes:
        """Return the next bytes of the server's reply, b"" at its end. Raises LimitExceeded."""
        self.begin_wait()
        try:
            data = await server.read(number)
        except OSError:
            data = b""
        self.end_wait()
        self._server_ended = not data
        self.stir()
        if data:
            self.passage.received(len(data))
        return data

    async def read_chunked(self, server: asyncio.StreamReader) -> bytes:
        """Return the next bytes of a chunked reply's content, without the lines that state the sizes of the chunks; b""
        at the end. Raises LimitExceeded, and CutShort for a reply that ends too early or is not HTTP."""
        if not self._left_in_chunk:
            self.begin_wait()
            try:
                line = await server.readuntil(b"\r\n")
            except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
                self.end_wait()
                self._server_ended = True
                raise self.cut_short() from error
            self.end_wait()
            size = CHUNK_SIZE.fullmatch(line)
            if size is None:
                raise CutShort("the chunks of the server's reply are not HTTP", by_server=True)
            if not (left := int(size[1], 16)):
                return b""
            self._left_in_chunk = left + len(b"\r\n")
        data = await self.read(server, min(CHUNK, self._left_in_chunk))
        if not data:
            raise self.cut_short()
        self._left_in_chunk -= len(data)
        after = max(0, len(b"\r\n") - self._left_in_chunk)  # bytes of `data` after the chunk's content
        return data[: max(0, len(data) - after)] or await self.read_chunked(server)

    async def write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        """Write bytes of the reply to the client, and wait until more may pass. Raises OSError."""
        began = time.monotonic()
        await put(writer, data)
        self.stir()
        await self.passage.pause(len(data))
        self._client_seconds += time.monotonic() - began

    async def relay(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        count: Callable[[int], None],
        limit: int | None = None,
    ) -> None:
        """Copy bytes from `reader` to `writer`, until `reader` ends or `limit` bytes are copied. Without a `limit`, the
        receiver gets an end of file after the last byte. If the sandbox exceeds one of its limits, the block of
        `watched` is ended."""
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
                    return
                await put(writer, data)
                self.stir()
                await self.passage.pause(len(data))
        if limit is None:
            with suppress(OSError, RuntimeError):
                if writer.can_write_eof():
                    writer.write_eof()


def _with_redirect(fields: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return the header lines of a package index's reply, with the address of a redirect replaced."""
    replaced = []
    for field in fields:
        name, _, value = field.partition(":")
        if name.lower() == "location":
            value = AddressReplacer(pairs).replaced(value.encode("latin-1"), last=True).decode("latin-1")
        replaced.append(f"{name}:{value}")
    return replaced


def is_page(reply: ReplyHead) -> bool:
    """Return whether a reply of a package index is a page, whose body contains addresses."""
    kind = reply.value("content-type").lower()
    return not reply.value("content-encoding") and ("html" in kind or "json" in kind)


async def _write_page(
    request: RequestHead,
    reply: ReplyHead,
    length: int | None,
    pairs: Sequence[tuple[str, str]],
    server: asyncio.StreamReader,
    flow: Flow,
    writer: asyncio.StreamWriter,
    kept: KeptReply,
) -> None:
    """Write a page of a package index, with replaced addresses in its body. The new length of the body is not known
    before the body's end."""
    chunks = request.version == "HTTP/1.1"
    fields = [
        field
        for field in reply.fields
        if field.partition(":")[0].lower() not in ("content-length", "transfer-encoding")
    ]
    reply_head = msgspec.structs.replace(reply, fields=[*fields, *(["Transfer-Encoding: chunked"] if chunks else [])])
    kept.add(reply_head.head(recorded=True))
    await put(writer, reply_head.head())
    replacer = AddressReplacer(pairs)

    async def write(data: bytes, *, last: bool = False) -> None:
        out = replacer.replaced(data, last=last)
        if chunks:
            out = (b"%x\r\n" % len(out) + out + b"\r\n" if out else b"") + (b"0\r\n\r\n" if last else b"")
        if out:
            kept.add(out)
            await flow.write(writer, out)

    left = length
    while left is None or left:
        if reply.chunked:
            data = await flow.read_chunked(server)
        else:
            data = await flow.read(server, CHUNK if left is None else min(CHUNK, left))
        if not data:
            break
        left = None if left is None else left - len(data)
        await write(data)
    if left:
        raise flow.cut_short()
    await write(b"", last=True)
    kept.store()


class ConnectionPool:
    """Limits the clients' connections to several `ProxyServer`s together to `most`. The first LEAST_CONNECTIONS
    connections to each `ProxyServer` are always allowed, and are not counted."""

    def __init__(self, most: int) -> None:
        self._left = most

    def take(self, others: int) -> bool:
        """Count a new connection of a server that already has `others` connections. Returns False if there are too
        many."""
        if others < LEAST_CONNECTIONS:
            return True
        if self._left <= 0:
            return False
        self._left -= 1
        return True

    def give_back(self, others: int) -> None:
        """Count a connection as closed. Its server still has `others` connections."""
        if others >= LEAST_CONNECTIONS:
            self._left += 1


class ProxyServer:
    """Serves connections at a Unix socket: calls `serve` with each connection and the head of its first request. At
    most `most` connections are open at once, and `pool` counts the connections together with those of other servers.
    `name` is the prefix of the error texts that the server itself writes."""

    def __init__(
        self,
        serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]],
        *,
        most: int,
        pool: ConnectionPool | None = None,
        name: str = "outrider",
    ) -> None:
        self._serve = serve
        self._most = most
        self._pool = pool or ConnectionPool(most)
        self._name = name
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
        if len(self._tasks) >= self._most or not self._pool.take(len(self._tasks)):
            writer.transport.abort()
            return
        self._tasks.add(task)
        try:
            if (head := await self._head(reader, writer)) is not None:
                await self._serve(reader, writer, head)
        except asyncio.CancelledError:
            pass  # asyncio logs an error for a cancelled handler of a connection
        finally:
            self._tasks.discard(task)
            self._pool.give_back(len(self._tasks))
            writer.close()

    async def _head(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes | None:
        """Return the head of the first request, None if there is none."""
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                return await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            error = NotPassedOn("431 Request Header Fields Too Large", f"the head has more than {MAX_HEAD >> 10} KiB")
            await say(reader, writer, error, name=self._name)
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass
        return None
