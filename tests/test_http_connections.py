"""The HTTP client against a server of raw bytes: how responses end and break, and when connections are reused."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from outrider.wire.http_connections import HIGH_WATER, LARGE, Connections

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-One: a\r\nX-One: b\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n"


class Script:
    """A server that sends the next response of its list for each request, on any connection. It closes the connection
    in place of a response None, and after each response if `end` is True."""

    def __init__(self, *answers: bytes | None, end: bool = False) -> None:
        self._answers = list(answers)
        self._end = end
        self.requests: list[bytes] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self._answers:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0] or 0)
                self.requests.append(head + await reader.readexactly(length))
                answer = self._answers.pop(0)
                if answer is None:
                    break
                writer.write(answer)
                await writer.drain()
                if self._end:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def a_server(script: Script, user: str = "", path: str = "/base/") -> AsyncIterator[Connections]:
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    connections = Connections(f"http://{user}127.0.0.1:{port}{path}", {"X-Own": "1"})
    try:
        yield connections
    finally:
        connections.close()
        server.close()
        await server.wait_closed()


async def get(connections: Connections) -> bytes:
    response = await connections.request("GET", "/x")
    try:
        return await response.whole()
    finally:
        response.close()


async def test_a_request_as_it_is_sent() -> None:
    script = Script(WHOLE)
    async with a_server(script) as connections:
        response = await connections.request("POST", "/x?y=1", (b"{", b"}"), {"X-More": "2"})
        assert (response.status, response.header(b"x-one"), await response.whole()) == (200, b"a", b"hi")
        response.close()
    (request,) = script.requests
    assert request.startswith(b"POST /base/x?y=1 HTTP/1.1\r\nHost: 127.0.0.1:")
    assert request.endswith(b"\r\nX-Own: 1\r\nX-More: 2\r\nContent-Length: 2\r\n\r\n{}")


async def test_a_large_request_is_sent_whole() -> None:
    pieces: list[bytes | memoryview] = [b"[", memoryview(b"0," * LARGE), b"0]"]
    script = Script(WHOLE)
    async with a_server(script) as connections:
        response = await connections.request("POST", "/x", pieces)
        assert await response.whole() == b"hi"
        response.close()
    (request,) = script.requests
    assert request.endswith(b"\r\n\r\n" + b"".join(pieces))


@pytest.mark.parametrize("answer", [WHOLE, CHUNKED], ids=["length", "chunked"])
async def test_a_connection_is_used_again_after_an_answer_read_to_its_end(answer: bytes) -> None:
    script = Script(answer, answer, answer)
    async with a_server(script) as connections:
        assert {await get(connections) for _ in range(3)} == {b"hi" if answer is WHOLE else b"abcde"}
    assert script.connections == 1


async def test_a_connection_is_not_used_again_after_an_answer_left_early() -> None:
    script = Script(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi", WHOLE)
    async with a_server(script) as connections:
        response = await connections.request("GET", "/x")
        assert await response.arrived() == b"hi"
        assert not response.complete
        response.close()
        assert await get(connections) == b"hi"
    assert script.connections == 2


@pytest.mark.parametrize(
    "head", [b"Connection: close\r\nContent-Length: 2\r\n", b"Content-Length: 2\r\n"], ids=["said", "unsaid"]
)
async def test_a_server_that_closes_is_met_with_a_new_connection(head: bytes) -> None:
    script = Script(*[b"HTTP/1.1 200 OK\r\n" + head + b"\r\nhi"] * 2, end=True)
    async with a_server(script) as connections:
        assert await get(connections) == b"hi"
        for _ in range(1000):  # until the client has seen the server's close
            await asyncio.sleep(0)
        assert await get(connections) == b"hi"
    assert script.connections == 2


async def test_a_request_that_meets_the_end_of_a_kept_connection_is_sent_again_if_it_may_be() -> None:
    script = Script(WHOLE, None, WHOLE, None)
    async with a_server(script) as connections:
        assert await get(connections) == b"hi"
        response = await connections.request("GET", "/x", repeatable=True)
        assert await response.whole() == b"hi"
        response.close()
        assert script.connections == 2
        with pytest.raises(ConnectionError):
            await connections.request("POST", "/x")
    assert (script.connections, len(script.requests)) == (2, 4)


async def test_a_request_is_sent_again_only_after_a_kept_connection() -> None:
    script = Script(None, WHOLE)
    async with a_server(script) as connections:
        with pytest.raises(ConnectionError):
            await connections.request("GET", "/x", repeatable=True)
    assert script.connections == 1


async def test_each_address_of_a_server_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    server = await asyncio.start_server(Script(WHOLE).serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
    found = [(*kind, (address, port)) for address in ("127.0.0.2", "127.0.0.2", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    connections = Connections(f"http://several.example:{port}", {})
    assert await get(connections) == b"hi"
    connections.close()
    server.close()
    await server.wait_closed()
    with pytest.raises(ConnectionRefusedError):  # the error of one address, not a text about all of them
        await Connections(f"http://several.example:{port}", {}).request("GET", "/x")


async def test_the_kernel_notices_a_machine_that_has_gone() -> None:
    """Some calls have no time limit. Without probes, they would wait for ever for a machine that has lost its power."""
    async with a_server(Script(WHOLE)) as connections:
        reply = await connections.request("GET", "/")
        assert reply._connection is not None
        assert reply._connection._transport is not None
        connected = reply._connection._transport.get_extra_info("socket")
        assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle, interval, count = (connected.getsockopt(socket.IPPROTO_TCP, option) for option in options)
        assert idle + interval * count <= 120
        reply.close()


async def test_an_odd_address_is_sent_as_http_allows() -> None:
    script = Script(WHOLE)
    async with a_server(script, "user:password@", "/a b/ü/%20/") as connections:
        await get(connections)
    assert script.requests[0].startswith(b"GET /a%20b/%C3%BC/%20/x HTTP/1.1\r\nHost: 127.0.0.1:")


async def test_an_answer_may_end_with_its_connection() -> None:
    async with a_server(Script(b"HTTP/1.1 200 OK\r\n\r\nall of it", end=True)) as connections:
        assert await get(connections) == b"all of it"


async def test_an_interim_answer_is_skipped() -> None:
    async with a_server(Script(b"HTTP/1.1 100 Continue\r\nX: 1\r\n\r\n" + WHOLE)) as connections:
        assert await get(connections) == b"hi"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"not HTTP at all\r\n\r\n",
    ],
    ids=["nothing", "half a head", "half a body", "half a chunk", "no HTTP"],
)
async def test_a_broken_answer_is_an_error(answer: bytes) -> None:
    async with a_server(Script(answer, end=True)) as connections:
        with pytest.raises(OSError, match=r"closed|not HTTP"):
            await get(connections)


async def test_closing_ends_what_is_in_flight() -> None:
    async with a_server(Script(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi", b"")) as connections:
        response = await connections.request("GET", "/x")
        assert await response.arrived() == b"hi"
        reading = asyncio.ensure_future(response.arrived())
        await asyncio.sleep(0)
        connections.close()
        with pytest.raises(ConnectionAbortedError):
            await reading
        response.close()
        with pytest.raises(ConnectionAbortedError):
            await connections.request("GET", "/x")


async def test_a_cancelled_request_leaves_no_connection() -> None:
    script = Script(b"", b"")
    async with a_server(script) as connections:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connections.request("GET", "/x")
        assert connections.busy == connections.idle == 0


async def test_a_slow_reader_pauses_the_server() -> None:
    body = b"x" * (64 * HIGH_WATER)
    async with a_server(Script(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)) as connections:
        response = await connections.request("GET", "/x")
        first = await response.arrived()
        for _ in range(1000):
            await asyncio.sleep(0)
        second = await response.arrived()
        assert len(first) + len(second) < len(body) // 2
        assert len(first) + len(second) + len(await response.whole()) == len(body)
        response.close()


@pytest.mark.parametrize("value", ["a\r\nX: b", "a\nb", "\r"])
def test_a_header_cannot_be_smuggled(value: str) -> None:
    with pytest.raises(ValueError, match="line break"):
        Connections("http://127.0.0.1:1", {"X": value})


ENDLESS = {
    "head": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * HIGH_WATER,
    "header": b"HTTP/1.1 200 OK\r\nX: " + b"y" * 2 * HIGH_WATER,
    "interim answers": b"HTTP/1.1 100 Continue\r\n\r\n" * HIGH_WATER,
    "trailers": CHUNKED[:-2] + b"X: y\r\n" * HIGH_WATER,
}


@pytest.mark.parametrize("case", ENDLESS)
async def test_what_is_no_body_has_an_end(case: str) -> None:
    async with a_server(Script(ENDLESS[case])) as connections, asyncio.timeout(30):
        with pytest.raises(ConnectionError, match=r"and none of its body|not HTTP"):
            await get(connections)


async def test_a_server_that_speaks_another_protocol_is_no_bug() -> None:
    upgrade = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n"
    async with a_server(Script(upgrade)) as connections:
        with pytest.raises(ConnectionError, match="not HTTP"):
            await get(connections)


async def test_a_second_answer_is_taken_for_no_answer() -> None:
    """A second response to one request is used neither for this request nor for the next one."""
    script = Script(WHOLE + b"HTTP/1.1 500 Oh\r\nContent-Length: 3\r\n\r\nbad", WHOLE)
    async with a_server(script) as connections:
        response = await connections.request("GET", "/x")
        assert (response.status, await response.whole()) == (200, b"hi")
        response.close()
        assert await get(connections) == b"hi"
    assert script.connections == 2


async def test_a_connection_that_does_not_read_is_not_used_again() -> None:
    """The rest of the first response arrives while no caller reads it."""
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
    size = HIGH_WATER + 1 - len(head % HIGH_WATER)  # with the last byte, one byte too many is unread
    script = Script(head % size + b"x" * size, WHOLE)
    async with a_server(script) as connections, asyncio.timeout(30):
        response = await connections.request("GET", "/x")
        while not response.complete:  # noqa: ASYNC110  # there is no event for it
            await asyncio.sleep(0)
        response.close()
        assert await get(connections) == b"hi"
    assert script.connections == 2
