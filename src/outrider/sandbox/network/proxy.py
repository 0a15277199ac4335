"""A forward proxy. It sends one request of each connection to a server, if the `ProxyGate` allows the request.

The gate contains the rules, and the dialer checks the server's addresses. The proxy follows no redirects. Invariants:
each connection carries one request, and ambiguous heads are rejected, so every request is checked; a request needs
little memory, even if the reply is large.
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

from outrider.sandbox.network.dialer import Dialer, ProxiedServer, ServerConnection, abort
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

LATE_BODY_SECONDS = 5.0
"""Once the server has replied, the proxy forwards the rest of the request's body for at most this many seconds."""
LINGER_SECONDS = 2.0
"""How many seconds a server has to take the last bytes that are sent to it, and a refused client to read the reason.
While the client reads, the rest of its request is read and discarded. Otherwise the connection would be closed while
bytes are unread. Such a close resets the connection, and the client would lose the reason."""
LAST_BYTES_SECONDS = 120.0
"""How many seconds a client has to take the last bytes of a reply."""
LEAST_CONNECTIONS = 8
"""Number of connections that each sandbox may always have, however many the other sandboxes have."""
CHUNK = 64 << 10
CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[\t ]*(?:;[^\r\n]*)?\r\n")
INDEX_FIELDS = frozenset(
    {"accept", "cache-control", "content-length", "if-modified-since", "if-none-match", "range", "user-agent"}
)
"""The request headers that a package index receives. Others are dropped, because they could make the index fail.
Without `accept-encoding`, the index sends uncompressed pages, in which the proxy can replace addresses."""
BODILESS = frozenset({204, 304})
OVERLOADED = frozenset({502, 503, 504})


class ProxyWaits(msgspec.Struct, frozen=True, kw_only=True):
    """How long a proxy waits, in seconds.

    - `head`: a connection is closed if the head of its request has not arrived in this time.
    - `silence`: a connection is closed after this time without a byte.
    - `connection`: maximum duration of one connection, even while bytes arrive.
    - `connect`: how long a request may wait for a connection to its server. If it has waited longer when the phase
        ends, the server counts as failed. A shorter wait is no failure, because a program may send a request just
        before it exits.
    - `answer`: how long a request may wait for the reply or for its next bytes. If it has waited longer when the
        connection ends, the server counts as failed.
    - `client`: a reply that ends too early is not the server's failure if the client took at least this time to
        receive it.
    """

    head: float = 60.0
    silence: float = 120.0
    connection: float = 3600.0
    connect: float = 5.0
    answer: float = 30.0
    client: float = 5.0


WAITS = ProxyWaits()


class LimitExceeded(Exception):
    """The sandbox has reached one of its network limits."""


class ProxyRoute(msgspec.Struct, frozen=True, kw_only=True):
    """The server for an allowed request.

    `replaced`: pairs of an old and a new text. The proxy replaces the old texts in the pages and redirects of a package
        index.
    `methods`: the allowed HTTP methods. An empty set allows all methods.
    """

    server: ProxiedServer
    replaced: Sequence[tuple[str, str]] = ()
    methods: frozenset[str] = frozenset()


class Passage(Protocol):
    """An allowed request, from its admission until its connection ends. `sent` and `received` count bytes, and raise
    LimitExceeded."""

    route: ProxyRoute

    def sent(self, number: int) -> None: ...
    def received(self, number: int) -> None: ...
    async def pause(self, number: int) -> None:
        """Count `number` bytes, and wait until the limit of bytes per second allows the next ones."""
        ...

    def failed(self, reason: str, *, blameless: bool) -> None:
        """Record that the server has failed. `blameless` is True if no program in the sandbox can have caused the
        failure."""
        ...

    def reached(self) -> None: ...
    def set_wait(self, reason: str | None, *, blameless: bool = False, patience: float = 0.0) -> None:
        """Record that the request now waits for the server. With None, the wait is over. If the connection ends after a
        wait of more than `patience` seconds, the server has failed, and `reason` says why."""
        ...

    def judge(self) -> None:
        """Record a failure if the current wait for the server has lasted too long."""
        ...

    def close(self) -> None: ...


class ProxyGate(Protocol):
    """Decides which requests the proxy forwards."""

    def admit(self, request: RequestHead) -> Passage:
        """Admit a request. Raises NotPassedOn if the request is not allowed."""
        ...

    def refuse(self, request: RequestHead, reason: str) -> None:
        """Record that a request was refused after `admit`, because of its server's address or its method."""
        ...


class Archive(Protocol):
    """Records the replies of servers, or replays recorded ones. An archive never contains the content of tunnels."""

    def replay(self, request: RequestHead) -> bytes | None:
        """Return the recorded reply, or None if this archive only records. Raises NotPassedOn if no reply to this
        request is recorded."""
        ...

    def keeps(self, request: RequestHead) -> bool:
        """Return whether the archive records the reply to this request."""
        ...

    def reserve(self, size: int) -> bool:
        """Reserve `size` bytes for a reply. If the archive is too full, note that a reply is missing, and return False.
        A negative `size` cancels a reservation."""
        ...

    def keep(self, request: RequestHead, reply: bytes) -> None:
        """Record a whole reply, whose bytes have already been reserved."""
        ...


class Proxy:
    """A forward proxy. Its own error messages begin with `name`."""

    def __init__(
        self,
        gate: ProxyGate,
        dialer: Dialer,
        *,
        name: str = "outrider",
        archive: Archive | None = None,
        waits: ProxyWaits = WAITS,
    ) -> None:
        self._gate = gate
        self._dialer = dialer
        self._name = name
        self._archive = archive
        self._waits = waits

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        """Send the request of a connection to its server, and the reply to the client. `head` is the request's head."""
        try:
            request = read_request(head)
            passage = self._gate.admit(request)
        except NotPassedOn as error:
            await reply_with_error(reader, writer, error, name=self._name)
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
            passage.set_wait(late, blameless=True, patience=self._waits.connect)
            try:
                connection = await self._dialer.connect(route.server, tunnel=request.tunnel)
            except NotAllowed as error:
                if not route.methods:
                    raise
                # Only a package index has `methods`. The address of an index comes from the operator's settings, so an
                # address that is not allowed is a mistake in the settings.
                raise Unreachable(f"{error}: the operator may name {route.server.place} in network.internal") from error
            passage.set_wait(None)
        except NotAllowed as error:
            passage.set_wait(None)
            self._gate.refuse(request, str(error))
            await reply_with_error(reader, writer, error, name=self._name)
            return
        except LimitExceeded:
            writer.transport.abort()
            return
        except NotPassedOn as error:
            passage.set_wait(None)
            passage.failed(str(error), blameless=True)
            await reply_with_error(reader, writer, error, name=self._name)
            return
        awaited = None if request.tunnel else Awaited(request.place, is_plain_read(request, route))
        flow = Flow(passage, awaited, self._waits)
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
        except Unreachable as error:
            flow.end_wait()
            passage.failed(str(error), blameless=is_plain_read(request, route))
            await reply_with_error(reader, writer, error, name=self._name)
        except (TimeoutError, LimitExceeded, OSError) as error:
            if flow.exceeded:
                flow.end_wait()
            if isinstance(error, CutShort):
                passage.failed(str(error), blameless=is_plain_read(request, route) and error.by_server)
            passage.judge()  # records a failure before the client learns of it
            if isinstance(error, TimeoutError) and not (request.tunnel or flow.answered or flow.exceeded):
                text = f"{request.place} did not answer"
                await reply_with_error(reader, writer, NotPassedOn("504 Gateway Timeout", text), name=self._name)
            writer.transport.abort()  # after a normal close, an incomplete reply would look complete
        else:
            if connection.unsent():
                await flush(connection.writer, seconds=LINGER_SECONDS)
        finally:
            connection.drop()

    async def _exchange(
        self,
        request: RequestHead,
        route: ProxyRoute,
        connection: ServerConnection,
        flow: Flow,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Send a request to its server, and the reply to the client. Raises Unreachable if the reply is not HTTP."""
        server = route.server
        origin = place_of(server.host, server.port, hidden=443 if server.tls else 80)
        # The target is written anew from the parsed URL, because a server may interpret the client's spelling
        # differently.
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
            except (Unreachable, LimitExceeded, OSError) as error:
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
        # Only a package index has `methods`. An index gets only simple requests, so one of these statuses means that
        # the index has failed. From most other servers, a program can provoke such a status by an odd request.
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


async def reply_with_error(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, error: NotPassedOn, *, name: str
) -> None:
    """Reply to a request with an error, and discard the rest of the request for up to LINGER_SECONDS."""
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
    """Return whether the request reads from a package index and has no body. Such a request cannot make its server
    fail. Others can, for example with a body that never ends."""
    return bool(route.methods) and not request.length


async def flush(writer: asyncio.StreamWriter, *, seconds: float) -> None:
    """Close a connection, and wait for at most `seconds` until the other end has taken the bytes that were written. The
    caller must then abort the connection, which would otherwise stay open until the other end has taken the bytes."""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(seconds):
            writer.close()
            await writer.wait_closed()


async def put(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write bytes, and wait until the writer's buffer has room again. Raises OSError."""
    try:
        writer.write(data)
    except RuntimeError as error:  # uvloop raises RuntimeError for a closed connection
        raise ConnectionResetError(str(error)) from error
    await writer.drain()


class AddressReplacer:
    """Replaces addresses in a stream of text."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._new = {old.encode(): new.encode() for old, new in pairs}
        longest_first = sorted(self._new, key=len, reverse=True)
        self._old = re.compile(b"|".join(map(re.escape, longest_first)))
        self._held = len(longest_first[0]) - 1
        """Number of bytes at the end of the text that may be the beginning of an address."""
        self._text = b""

    def replaced(self, data: bytes, *, last: bool = False) -> bytes:
        """Add `data`, and return the text that is ready, with its addresses replaced. Unless `last` is true, some bytes
        at the end are held back, because an address may begin there."""
        text, found, at = self._text + data, [], 0
        for match in self._old.finditer(text):
            found += [text[at : match.start()], self._new[match[0]]]
            at = match.end()
        end = len(text) if last else max(at, len(text) - self._held)
        self._text = text[end:]
        return b"".join([*found, text[at:end]])


CHUNKS_END = b"\r\n\r\n"
"""The last bytes of every complete chunked body."""


class CutShort(OSError):
    """A reply ended too early. `by_server` is True if the server ended the reply and the client was not slow."""

    def __init__(self, text: str, *, by_server: bool) -> None:
        super().__init__(text)
        self.by_server = by_server


class KeptReply:
    """Collects a reply for the archive while there is room. Unless `store` is called, the room is given back at the end
    of the `with` block."""

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
        """Put the complete reply into the archive."""
        if self._archive is not None and self._data:
            self._archive.keep(self._request, bytes(self._data))
            self._reserved = 0

    def _drop(self) -> None:
        if self._archive is not None and self._reserved:
            self._archive.reserve(-self._reserved)
        self._reserved = 0
        self._data.clear()


class Awaited(msgspec.Struct, frozen=True):
    """The server that a request waits for. `blameless` is True if no program in the sandbox can delay the server's
    reply."""

    place: str
    blameless: bool


class Flow:
    """Moves the bytes of one connection, and watches for silence and limits.

    `awaited`: the server whose reply is expected, or None for a tunnel.
    `answered`: True once the server's reply has begun.
    `exceeded`: True once the connection has ended because the sandbox exceeded a limit.
    """

    def __init__(self, passage: Passage, awaited: Awaited | None, waits: ProxyWaits) -> None:
        self.passage = passage
        self.answered = False
        self.exceeded = False
        self._awaited = awaited
        self._waits = waits
        self._quiet: asyncio.Timeout | None = None
        self._server_ended = False
        self._left_in_chunk = 0
        """Bytes left in the current chunk, including the line end after the chunk."""
        self._client_seconds = 0.0
        """Total seconds that writing the reply to the client has taken."""

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Raise TimeoutError in the `with` block after a silence or a duration that is too long (`ProxyWaits`)."""
        async with asyncio.timeout(self._waits.connection), asyncio.timeout(self._waits.silence) as self._quiet:
            yield

    def stir(self) -> None:
        if self._quiet is not None and not self._quiet.expired() and not self.exceeded:
            self._quiet.reschedule(asyncio.get_running_loop().time() + self._waits.silence)

    def end(self) -> None:
        """End the `with` block of `watched` at once, because the sandbox has exceeded a limit."""
        self.exceeded = True
        if self._quiet is not None and not self._quiet.expired():
            self._quiet.reschedule(asyncio.get_running_loop().time())

    def begin_wait(self) -> None:
        """Record that the connection now waits for the next bytes of the reply."""
        if self._awaited is not None:
            what = "stopped in the middle of its reply" if self.answered else "did not answer"
            text = f"{self._awaited.place} {what}"
            self.passage.set_wait(text, blameless=self._awaited.blameless, patience=self._waits.answer)

    def end_wait(self) -> None:
        self.passage.set_wait(None)

    def cut_short(self) -> CutShort:
        """Return the exception for a reply that has ended too early."""
        place = "the server" if self._awaited is None else self._awaited.place
        by_server = self._server_ended and self._client_seconds < self._waits.client
        return CutShort(f"{place} ended its reply early", by_server=by_server)

    async def read(self, server: asyncio.StreamReader, number: int = CHUNK) -> bytes:
        """Return the next bytes of the server's reply, or b"" at the end of the connection. Raises LimitExceeded."""
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
        """Return the next bytes of a chunked reply without the chunks' size lines, or b"" at its end. Raises
        LimitExceeded. Raises CutShort if the reply ends too early or its chunks are malformed."""
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
        after = max(0, len(b"\r\n") - self._left_in_chunk)  # how much of the chunk's closing CRLF is in `data`
        return data[: max(0, len(data) - after)] or await self.read_chunked(server)

    async def write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        """Write bytes of the reply to the client, and wait until the limit of bytes per second allows the next ones.
        Raises OSError."""
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
        """Copy at most `limit` bytes from `reader` to `writer`. Without a `limit`, copy all bytes, and then give the
        receiver an end of file. If `count` raises LimitExceeded, the connection ends (see `end`)."""
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
    """Return the header lines of a package index's reply, with a replaced address in `Location`."""
    replaced = []
    for field in fields:
        name, _, value = field.partition(":")
        if name.lower() == "location":
            value = AddressReplacer(pairs).replaced(value.encode("latin-1"), last=True).decode("latin-1")
        replaced.append(f"{name}:{value}")
    return replaced


def is_page(reply: ReplyHead) -> bool:
    """Return whether a package index has sent a page (HTML or JSON), which may contain addresses. A file is not a
    page."""
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
    """Write a page of a package index with replaced addresses. An HTTP/1.1 client gets the page in chunks, because the
    page's new length is unknown until the end."""
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
    """Limits the connections of all sandboxes together to `most`. The first LEAST_CONNECTIONS connections of each
    sandbox are always allowed and do not count."""

    def __init__(self, most: int) -> None:
        self._left = most

    def take(self, others: int) -> bool:
        """Count a new connection of a sandbox that already has `others` connections. Returns False if the pool is
        full."""
        if others < LEAST_CONNECTIONS:
            return True
        if self._left <= 0:
            return False
        self._left -= 1
        return True

    def give_back(self, others: int) -> None:
        """Count a closed connection of a sandbox that still has `others` connections."""
        if others >= LEAST_CONNECTIONS:
            self._left += 1


class ProxyServer:
    """Accepts connections at a Unix socket, and calls `serve` with each connection and the head of its first request.

    `most`: maximum number of connections to this server.
    `pool`: a further limit, which this server shares with others.
    `name`: the beginning of the server's own error messages.
    `head_seconds`: a connection is closed if the head of its first request has not arrived in this time.
    """

    def __init__(
        self,
        serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]],
        *,
        most: int,
        pool: ConnectionPool | None = None,
        name: str = "outrider",
        head_seconds: float = WAITS.head,
    ) -> None:
        self._serve = serve
        self._most = most
        self._pool = pool or ConnectionPool(most)
        self._name = name
        self._head_seconds = head_seconds
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def at(self, path: Path | str) -> AsyncIterator[None]:
        """Accept connections at a path. All connections are closed at the end of the `with` block."""
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
            # Until the client has its last bytes, the connection counts against the limits.
            await flush(writer, seconds=LAST_BYTES_SECONDS)
        except asyncio.CancelledError:
            pass  # if this were raised, asyncio would log an error
        finally:
            self._tasks.discard(task)
            self._pool.give_back(len(self._tasks))
            abort(writer)

    async def _head(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes | None:
        """Return the head of a connection's first request, or None if no whole head arrives."""
        try:
            async with asyncio.timeout(self._head_seconds):
                return await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            error = NotPassedOn("431 Request Header Fields Too Large", f"the head has more than {MAX_HEAD >> 10} KiB")
            await reply_with_error(reader, writer, error, name=self._name)
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            pass
        return None
