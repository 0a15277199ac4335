"""The HTTP server against clients that do not finish requests or do not read replies, and against new versions of
uvicorn."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import tomllib
from collections.abc import AsyncIterator, MutableMapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from packaging.requirements import Requirement
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from outrider.concurrency.chores import Failures
from outrider.lab.fakes.engine_servers.app import serving
from outrider.wire import http_server
from outrider.wire.http_server import (
    MAX_HEAD,
    MAX_PIPELINED,
    Application,
    Receive,
    Scope,
    Send,
    Timeouts,
    claim,
    noting_refusals,
    server_settings,
)
from support.clock import pass_time, stop_time

GET = b"GET / HTTP/1.1\r\nhost: here\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n"
PIECE = 64 << 10
FLOOD = 32 << 20
BRIEF = Timeouts(head=0.1, idle=1, unread=0.3)
LONG = 100_000_000


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Reply with the length of the body. A request of /wait gets no reply."""
    size, more = 0, True
    while scope["path"] == "/wait":
        if (await receive())["type"] != "http.request":
            return
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return
        size += len(message["body"])
        more = message["more_body"]
    said = b"%d!" % size
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(said))]})
    await send({"type": "http.response.body", "body": said})


@asynccontextmanager
async def a_connection(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


@asynccontextmanager
async def hasty(
    application: Application = app,
    *,
    timeouts: Timeouts = BRIEF,
    connections: int = 100,
    websockets: int = 0,
    state: ServerState | None = None,
) -> AsyncIterator[str]:
    """Run the server with short timeouts. Time passes only in `pass_time`, so that a busy machine makes no client
    slow."""
    stop_time()
    config = server_settings(application, timeouts=timeouts, connections=connections, websockets=websockets)
    config.load()
    state = state or ServerState()
    loop = asyncio.get_running_loop()
    make = config.http_protocol_class
    server = await loop.create_server(
        lambda: make(config=config, server_state=state, app_state={}, _loop=loop),  # type: ignore[call-arg]  # as uvicorn does it
        "127.0.0.1",
        0,
    )
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for connection in tuple(state.connections):
            connection.transport.abort()


async def taken(writer: asyncio.StreamWriter, piece: bytes) -> int:
    """Send `piece` again and again until the server hangs up, or up to FLOOD bytes. Returns the number of bytes that
    were sent."""
    sent = 0
    try:
        while sent < FLOOD:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
    except ConnectionError:
        pass
    return sent


async def rest(reader: asyncio.StreamReader) -> bytes:
    """Return all bytes that arrive until the server hangs up."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (GET, b"a: " + b"x" * PIECE + b"\r\n"),
        (GET, b"a: b\r\n" * 10_000),
        (GET + b"a: ", b"x" * PIECE),
        (b"GET /", b"x" * PIECE),
        (CHUNKED + b"1;", b"x" * PIECE),
        (CHUNKED + b"1\r\nx\r\n0\r\n", b"a: " + b"x" * PIECE + b"\r\n"),
    ],
    ids=["headers", "small headers", "one header", "address", "chunk head", "trailers"],
)
async def test_a_head_without_end_is_not_kept(start: bytes, piece: bytes) -> None:
    async with serving(app) as url, a_connection(url) as (_, writer):
        writer.write(start)
        assert await taken(writer, piece) < FLOOD


async def test_a_head_that_is_too_long_is_a_431() -> None:
    async with serving(app) as url, a_connection(url) as (reader, writer):
        writer.write(GET + b"a: " + b"x" * MAX_HEAD)
        assert (await rest(reader)).startswith(b"HTTP/1.1 431 ")


async def test_a_head_just_within_the_bound_is_served() -> None:
    async with serving(app) as url, a_connection(url) as (reader, writer):
        for _ in range(3):
            writer.write(GET + b"a: " + b"x" * (MAX_HEAD - 200) + b"\r\n\r\n")
            assert (await reader.readuntil(b"!")).startswith(b"HTTP/1.1 200 ")


async def test_what_stands_between_the_chunks_of_a_long_body_does_not_add_up() -> None:
    chunks = 40_000
    async with serving(app) as url, a_connection(url) as (reader, writer):
        writer.write(CHUNKED + b"1\r\nx\r\n" * chunks + b"0\r\n\r\n")
        assert (await reader.readuntil(b"!")).endswith(b"%d!" % chunks)


async def test_requests_sent_ahead_are_few() -> None:
    request = GET + b"\r\n"
    async with serving(app) as url, a_connection(url) as (reader, writer):
        writer.write(request * MAX_PIPELINED)
        for _ in range(MAX_PIPELINED):
            await reader.readuntil(b"!")
        writer.write(request.replace(b"/", b"/wait", 1) + request * (MAX_PIPELINED + 1))
        assert await rest(reader) == b""


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        GET,
        CHUNKED + b"5\r\nx",
        GET + b"\r\n",
        GET + b"\r\n" + GET,
    ],
    ids=["nothing", "half a head", "half a body", "no second request", "half a second head"],
)
async def test_a_client_that_stays_silent_is_hung_up_on(sent: bytes) -> None:
    async with hasty() as url, a_connection(url) as (reader, writer):
        writer.write(sent)
        reading = asyncio.ensure_future(rest(reader))
        while not reading.done():
            await pass_time(BRIEF.head)
        assert b"HTTP/1.1 5" not in reading.result()


async def test_a_client_that_does_not_read_its_reply_is_hung_up_on() -> None:
    left = asyncio.Event()

    async def long(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % LONG)]})
        await send({"type": "http.response.body", "body": b"x" * (LONG - 1), "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            """The request itself arrives first."""
        left.set()

    async with hasty(long) as url, a_connection(url) as (reader, writer):
        writer.write(GET + b"\r\n")
        while not left.is_set():
            await pass_time(BRIEF.unread)
        assert len(await rest(reader)) < LONG - 1


async def test_a_client_that_sends_something_now_and_then_is_hung_up_on_too() -> None:
    async with hasty() as url, a_connection(url) as (_, writer):
        writer.write(GET)
        try:
            while True:
                writer.write(b"a: b\r\n")
                await writer.drain()
                await pass_time(BRIEF.head / 4)
        except ConnectionError:
            pass


async def test_a_body_may_take_its_time_as_long_as_it_comes() -> None:
    come: asyncio.Queue[bytes] = asyncio.Queue()

    async def heard(scope: Scope, receive: Receive, send: Send) -> None:
        async def hear() -> MutableMapping[str, Any]:
            message = await receive()
            come.put_nowait(message["body"])
            return message

        await app(scope, hear, send)

    async with hasty(heard) as url, a_connection(url) as (reader, writer):
        writer.write(CHUNKED)
        for _ in range(12):
            writer.write(b"1\r\nx\r\n")
            while await come.get() != b"x":
                """The first message has no body: only the head has arrived."""
            await pass_time(BRIEF.head * 0.6)
        writer.write(b"0\r\n\r\n")
        assert (await reader.readuntil(b"!")).endswith(b"12!")


WAIT = GET.replace(b"/", b"/wait", 1) + b"\r\n"


def claimed(headers: dict[bytes, bytes]) -> str | None:
    """Return the client's name, which the tests' clients send in a header."""
    return headers[b"me"].decode() if b"me" in headers else None


async def naming(scope: Scope, receive: Receive, send: Send) -> None:
    """Claim the connection for the client, and keep it during the reply if the client sends the header `keep`. The
    reply to /large is larger than the buffers of a client that does not read."""
    headers = dict(scope["headers"])
    if (me := claimed(headers)) is not None:
        claim(scope, me, keep=b"keep" in headers)
    if scope["path"] != "/large":
        await app(scope, receive, send)
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % FLOOD)]})
    for _ in range(FLOOD // PIECE):
        await send({"type": "http.response.body", "body": bytes(PIECE), "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def request(path: str = "/", *headers: bytes) -> bytes:
    return b"".join((GET.replace(b"/", path.encode(), 1), *(b"%s\r\n" % header for header in headers), b"\r\n"))


class Crowd:
    """Connections of many clients to one server."""

    def __init__(self, url: str, state: ServerState, held: AsyncExitStack) -> None:
        self._url = url
        self._state = state
        self._held = held

    async def connects(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await self._held.enter_async_context(a_connection(self._url))

    async def comes(self, sent: bytes) -> int:
        """Open a connection and send `sent` on it. Returns the connection's number."""
        _, writer = await self.connects()
        writer.write(sent)
        await writer.drain()
        return number_of(writer)

    async def flood(self, number: int, sent: bytes) -> list[int]:
        """Open `number` connections. `sent` has reached the server on each of them before the next one is opened.
        Returns the connections' numbers."""
        flood = []
        for _ in range(number):
            flood.append(await self.comes(sent))
            await self.is_served(b"me: probe")
        return flood

    async def is_served(self, *headers: bytes) -> None:
        reader, writer = await self.connects()
        writer.write(request("/", b"connection: close", *headers))
        assert (await rest(reader)).startswith(b"HTTP/1.1 200 ")

    def open(self, numbers: list[int]) -> list[int]:
        """Return those of `numbers` whose connections the server has not closed."""
        there = {getattr(protocol, "client", (None, None))[1] for protocol in self._state.connections}
        return [number for number in numbers if number in there]


def number_of(writer: asyncio.StreamWriter) -> int:
    port: int = writer.get_extra_info("sockname")[1]
    return port


@asynccontextmanager
async def a_crowd(connections: int) -> AsyncIterator[Crowd]:
    state = ServerState()
    async with (
        hasty(naming, timeouts=Timeouts(), connections=connections, state=state) as url,
        AsyncExitStack() as held,
    ):
        yield Crowd(url, state, held)


@pytest.mark.deep
@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(request("/large") * MAX_PIPELINED, id="replies that are not read"),
        pytest.param(request("/wait", b"me: crowd"), id="long polls with a token"),
        pytest.param(GET, id="half a head"),
        pytest.param(request("/", b"me: crowd"), id="idle with a token"),
        pytest.param(CHUNKED, id="half a body"),
    ],
)
async def test_a_client_with_too_many_connections_loses_its_own(sent: bytes) -> None:
    """Other clients are served at once and lose no connection, however many connections the client opens."""
    async with a_crowd(20) as crowd:
        others = [await crowd.comes(request("/wait", b"me: other"))]
        others += [await crowd.comes(request("/wait", b"me: session", b"keep: 1")) for _ in range(4)]
        flood = await crowd.flood(60, sent)
        assert crowd.open(others) == others
        assert len(crowd.open(flood)) <= 15
        assert crowd.open(flood)[-1] == flood[-1]


async def test_an_address_has_a_quarter_before_its_clients_are_known() -> None:
    async with a_crowd(20) as crowd:
        unknown = await crowd.flood(30, request("/wait"))
        known = await crowd.flood(10, request("/wait", b"me: known"))
        assert crowd.open(known) == known
        assert crowd.open(unknown) == unknown[-4:]  # the fifth place went to each new client until the client was known


async def test_of_one_owner_the_longest_silent_is_closed_and_not_the_oldest() -> None:
    async with a_crowd(4) as crowd:
        reader, writer = await crowd.connects()
        silent = []
        for _ in range(8):
            writer.write(request("/", b"me: one"))
            assert (await reader.readuntil(b"!")).startswith(b"HTTP/1.1 200 ")
            silent += await crowd.flood(1, request("/wait", b"me: one"))
        assert crowd.open([number_of(writer), *silent]) == [number_of(writer), *silent[-2:]]


async def test_where_all_connections_must_be_kept_the_next_is_told_to_come_again() -> None:
    keep = request("/wait", b"me: session", b"keep: 1")
    async with a_crowd(3) as crowd:
        kept = [await crowd.comes(keep) for _ in range(3)]
        said = b""
        while not said:  # empty if this connection came before the others had sent anything, and took the place of one
            reader, writer = await crowd.connects()
            writer.write(request())
            said = await rest(reader)
            kept += [await crowd.comes(keep) for _ in range(3 - len(crowd.open(kept)))]
        assert said.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in said


async def test_what_is_asked_behind_a_kept_call_is_not_kept() -> None:
    async with a_crowd(4) as crowd:
        flood = await crowd.flood(12, request("/", b"me: session", b"keep: 1") + request("/large"))
        assert len(crowd.open(flood)) <= 4


async def test_whose_connection_is_closed_is_told_whichever_of_its_requests_is_answered() -> None:
    """The requests that were sent ahead are not begun."""
    begun: list[str] = []
    begins, told = asyncio.Event(), asyncio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        begun.append(scope["path"])
        begins.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        told.set()

    async with hasty(wait, timeouts=Timeouts()) as url:
        async with a_connection(url) as (_, writer):
            writer.write(request("/first") + request("/second") + request("/third"))
            await begins.wait()
        await told.wait()
        for _ in range(10):
            await asyncio.sleep(0)
        assert begun == ["/first"]


async def test_places_are_given_back() -> None:
    async with hasty(timeouts=Timeouts(), connections=2) as url:
        for _ in range(10):
            async with a_connection(url) as (reader, writer):
                writer.write(GET + b"connection: close\r\n\r\n")
                assert (await rest(reader)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "twice",
    [
        b"host: there\r\n",
        b"HOST: here\r\n",
        b"authorization: Bearer a\r\nAuthorization: Bearer b\r\n",
        b"origin: http://127.0.0.1\r\norigin: http://evil\r\n",
        b"content-length: 0\r\ncontent-length: 5\r\n",
        b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 5\r\n",
    ],
)
async def test_a_header_that_decides_is_there_once(twice: bytes) -> None:
    async with serving(app) as url, a_connection(url) as (reader, writer):
        writer.write(GET + twice + b"\r\n")
        said = await rest(reader)
        assert said.startswith(b"HTTP/1.1 400 ")
        assert b"200 OK" not in said
    async with serving(app) as url, a_connection(url) as (reader, writer):
        writer.write(GET + b"accept: a\r\naccept: b\r\ncookie: c\r\ncookie: d\r\n\r\n")
        assert (await reader.readuntil(b"!")).startswith(b"HTTP/1.1 200 ")


async def test_a_field_behind_the_body_is_no_header() -> None:
    seen: list[bytes] = []

    async def names(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        seen.extend(name for name, _ in scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1")]})
        await send({"type": "http.response.body", "body": b"!"})

    async with serving(names) as url, a_connection(url) as (reader, writer):
        writer.write(CHUNKED + b"2\r\n{}\r\n0\r\nauthorization: Bearer a\r\nhost: there\r\n\r\n")
        await reader.readuntil(b"!")
        writer.write(GET + b"accept: a\r\n\r\n")
        await reader.readuntil(b"!")
    assert seen == [b"host", b"transfer-encoding", b"host", b"accept"]


UPGRADE = (
    GET + b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
)
PING = bytes([0x89, 0x80 | 125]) + bytes(4) + b"x" * 125  # masked with zeroes


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Send back each message of a WebSocket. `app` serves other requests."""
    if scope["type"] == "http":
        await app(scope, receive, send)
        return
    while (message := await receive())["type"] != "websocket.disconnect":
        if message["type"] == "websocket.connect":
            await send({"type": "websocket.accept"})
        else:
            await send({"type": "websocket.send", "bytes": message["bytes"]})


@asynccontextmanager
async def a_websocket(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with a_connection(url) as (reader, writer):
        writer.write(UPGRADE)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        yield reader, writer


def frame(data: bytes) -> bytes:
    """Return a binary message of a client, masked with zeroes."""
    return bytes([0x82, 0x80 | 127]) + len(data).to_bytes(8, "big") + bytes(4) + data


async def test_a_websocket_is_for_servers_that_have_them() -> None:
    async with serving(echo, websockets=1000) as url, a_websocket(url) as (reader, writer):
        writer.write(frame(b"hello"))
        assert await reader.readexactly(7) == b"\x82\x05hello"
    async with serving(echo) as url, a_connection(url) as (reader, writer):
        writer.write(UPGRADE)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


async def test_a_message_that_is_too_long_ends_its_websocket() -> None:
    async with serving(echo, websockets=1000) as url, a_websocket(url) as (reader, writer):
        writer.write(frame(b"x" * 1001))
        assert (await reader.readexactly(4))[2:] == (1009).to_bytes(2, "big")


@pytest.mark.parametrize("piece", [PING * 1000, frame(b"x" * 100_000)], ids=["pings", "messages"])
async def test_a_websocket_that_reads_no_answers_is_kept_in_little_memory(piece: bytes) -> None:
    async with hasty(echo, timeouts=Timeouts(unread=0.3), connections=1, websockets=1 << 20) as url:
        async with a_websocket(url) as (_, writer):
            sending = asyncio.ensure_future(taken(writer, piece))
            while not sending.done():
                await pass_time(0.3)
            assert sending.result() < FLOOD
        # The WebSocket's place is free again.
        async with a_connection(url) as (reader, writer):
            writer.write(GET + b"\r\n")
            assert (await reader.readuntil(b"!")).startswith(b"HTTP/1.1 200 ")


async def test_a_websocket_that_is_closed_gives_its_place_back_although_its_client_reads_nothing() -> None:
    """The client has left a little data unread, for which the transport does not pause the application."""
    state = ServerState()

    async def parting(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        [connection] = state.connections
        while not connection.transport.get_write_buffer_size():
            await send({"type": "websocket.send", "bytes": bytes(16 << 10)})
            await asyncio.sleep(0)
        await send({"type": "websocket.close"})

    async with hasty(parting, timeouts=Timeouts(unread=600), websockets=1000, state=state) as url:
        with socket.socket() as client:
            client.setblocking(False)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", int(url.rsplit(":", 1)[1])))
            await loop.sock_sendall(client, UPGRADE)
            while not any(connection.transport.is_closing() for connection in tuple(state.connections)):
                await pass_time(1)
            for _ in range(3):
                await pass_time(600)
            assert not state.connections


EMPTY_FRAGMENT = bytes([0x00, 0x80]) + bytes(4)
"""A fragment without data that continues a message and does not end it, masked with zeroes."""


async def test_a_message_of_fragments_without_end_is_not_kept() -> None:
    async with serving(echo, websockets=1 << 20) as url, a_websocket(url) as (reader, writer):
        writer.write(bytes([0x02, 0x81]) + bytes(4) + b"x")
        writer.write(EMPTY_FRAGMENT * http_server.MAX_FRAGMENTS)
        with suppress(ConnectionError):
            await writer.drain()
            assert await reader.read() == b""


async def test_a_message_in_fragments_arrives_whole() -> None:
    async with serving(echo, websockets=1 << 20) as url, a_websocket(url) as (reader, writer):
        part = bytes([0x00, 0x80 | 100]) + bytes(4) + b"y" * 100
        writer.write(bytes([0x02, 0x81]) + bytes(4) + b"x" + part * 600 + bytes([0x80, 0x80]) + bytes(4))
        assert (await reader.readexactly(2 + 2 + 60_001))[4:] == b"x" + b"y" * 60_000


async def test_many_small_messages_at_once_leave_turns_to_others() -> None:
    """One read returns thousands of messages. They are parsed in pieces, and each is answered, in order."""
    number, turns = 20_000, 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with serving(echo, websockets=1000) as url, a_websocket(url) as (reader, writer):
        small = b"".join(bytes([0x82, 0x84]) + bytes(4) + place.to_bytes(4) for place in range(number))
        counting = asyncio.ensure_future(others())
        writer.write(small)
        answers = await reader.readexactly(6 * number)
        counting.cancel()
        assert [int.from_bytes(answers[at + 2 : at + 6]) for at in range(0, len(answers), 6)] == list(range(number))
        assert turns > len(small) // http_server.WEBSOCKET_PIECE


async def test_a_quiet_websocket_stays_and_does_not_make_room() -> None:
    """The server does not close a quiet WebSocket. How long a WebSocket may be quiet depends on the application."""
    async with hasty(echo, connections=1, websockets=1000) as url, a_websocket(url) as (reader, writer):
        for _ in range(10):
            await pass_time(BRIEF.idle)
        async with a_connection(url) as (other, _):
            assert (await rest(other)).startswith(b"HTTP/1.1 503 ")
        writer.write(frame(b"hello"))
        assert await reader.readexactly(7) == b"\x82\x05hello"


async def test_a_websocket_cannot_be_asked_for_behind_an_open_request() -> None:
    async with serving(echo, websockets=1000) as url, a_connection(url) as (reader, writer):
        writer.write(WAIT + UPGRADE)
        assert await rest(reader) == b""


UNDOCUMENTED = {
    "protocol": {
        "_start_asgi_task",
        *("connection_made", "connection_lost", "data_received"),
        *("on_message_begin", "on_headers_complete", "on_body", "on_message_complete", "on_response_complete"),
        *("loop", "transport", "flow", "server_state", "pipeline", "scope", "headers", "cycle", "client"),
        "handle_websocket_upgrade",
    },
    "websocket": {
        *("pause_writing", "resume_writing", "handle_ping", "connection_made", "connection_lost", "loop", "transport"),
        "writable",
        *("data_received", "receive", "handle_cont", "frames", "queue", "read_paused"),
    },
    "protocol.cycle": {"scope", "body", "more_body", "response_complete", "disconnected", "message_event"},
    "protocol.flow": {"read_paused", "resume_reading"},
    "protocol.server_state": {"connections", "tasks", "total_requests"},
    "server": {"startup", "main_loop", "on_tick", "shutdown", "capture_signals", "should_exit", "server_state"},
}
"""The parts of uvicorn that wire/http_server.py and api/gateway_server.py use or override, although uvicorn does not
document them."""


async def test_uvicorn_has_every_undocumented_part_that_we_use() -> None:
    """The parts are looked up while a request is served, because some of them exist only then."""
    protocols: list[HttpToolsProtocol] = []
    found: dict[str, object] = {}

    async def look(scope: Scope, receive: Receive, send: Send) -> None:
        protocol = protocols[0]
        websocket = WebSocketsSansIOProtocol(config=config, server_state=ServerState(), app_state={})
        found.update({"protocol": protocol, "websocket": websocket, "server": uvicorn.Server(config)})
        found.update({f"protocol.{name}": getattr(protocol, name, None) for name in ("cycle", "flow", "server_state")})
        await app(scope, receive, send)

    def make() -> HttpToolsProtocol:
        protocols.append(HttpToolsProtocol(config=config, server_state=ServerState(), app_state={}))
        return protocols[0]

    config = uvicorn.Config(look, log_config=None)
    config.load()
    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, a_connection(url) as (reader, writer):
        writer.write(GET + b"connection: close\r\n\r\n")
        assert (await rest(reader)).startswith(b"HTTP/1.1 200 ")
    parts = [(owner, name) for owner, names in UNDOCUMENTED.items() for name in names]
    missing = [f"{owner}.{name}" for owner, name in parts if not hasattr(found[owner], name)]
    changed = f"uvicorn {version('uvicorn')} has changed"
    assert not missing, f"{changed}: adapt wire/http_server.py and api/gateway_server.py to it"


def test_the_installed_uvicorn_is_among_the_tested_ones() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    requirements = map(Requirement, project["dependencies"])
    tested = next(requirement.specifier for requirement in requirements if requirement.name == "uvicorn")
    assert version("uvicorn") in tested, (
        f"uvicorn {version('uvicorn')} is new: run all tests, compare its httptools_impl.py with the methods that "
        "wire/http_server.py overrides, then widen the range in pyproject.toml"
    )


async def test_what_cannot_be_accepted_is_counted_and_accepted_later(caplog: pytest.LogCaptureFixture) -> None:
    """The server runs on asyncio's own event loop, which calls its exception handler thousands of times a second."""
    loop = asyncio.SelectorEventLoop()
    failures, accepted = Failures(), []

    class Accepts(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            accepted.append(transport)

    async def work() -> None:
        with noting_refusals(failures), ExitStack() as sockets:
            server = await loop.create_server(Accepts, "127.0.0.1", 0)
            clients = [sockets.enter_context(socket.socket()) for _ in range(3)]
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (1 + max(map(int, os.listdir("/proc/self/fd"))), limits[1]))
            filling: list[int] = []
            try:
                with suppress(OSError):
                    while True:
                        filling.append(os.dup(0))
                for client in clients:
                    client.connect(server.sockets[0].getsockname())
                while not failures.failing():  # noqa: ASYNC110  # it has no event
                    await asyncio.sleep(0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                for descriptor in filling:
                    os.close(descriptor)
            while len(accepted) < len(clients):  # noqa: ASYNC110  # asyncio tries again after a second
                await asyncio.sleep(0.01)
            for transport in accepted:
                transport.close()
            server.close()
            [failing] = failures.failing()
            assert failing.name == "accept connections"
            assert "Too many open files" in failing.error

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(asyncio.wait_for(work(), 30))

    await asyncio.to_thread(run)
    # asyncio's timers for another try outlive the server and then fail. These failures do not belong to the test.
    told = [
        record.getMessage() for record in caplog.records if record.name != "asyncio" or "system resource" in record.msg
    ]
    assert len(told) == 1
    assert told[0].startswith("accept connections: failed, and is tried again")
