"""The proxy between a machine and its service: it passes on, cuts, loses and delays data, and answers in the service's
place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from campaign.proxy import Direction, FaultyProxy

LONG = bytes(range(256)) * 4096
HELD_SECONDS = 0.5


class Echo:
    """A server that sends back the data it receives, and keeps a copy in `heard`."""

    def __init__(self) -> None:
        self.heard = b""
        self.ended = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                self.heard += data
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            self.ended.set()
            writer.close()


@asynccontextmanager
async def reached() -> AsyncIterator[tuple[Echo, FaultyProxy, asyncio.StreamReader, asyncio.StreamWriter]]:
    """Yield a server, a proxy in front of it, and the two ends of a connection through the proxy."""
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    proxy = FaultyProxy(server.sockets[0].getsockname()[1])
    async with server, asyncio.timeout(30), proxy.open():
        parts = urlsplit(proxy.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        try:
            yield echo, proxy, reader, writer
        finally:
            writer.transport.abort()


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """Return the data that arrives until the connection ends, or nothing if the connection is reset."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


async def test_what_is_sent_arrives_and_so_does_the_end() -> None:
    async with reached() as (echo, _, reader, writer):
        writer.write(LONG)
        assert await reader.readexactly(len(LONG)) == LONG
        writer.write_eof()
        assert await reader.read() == b""
        assert echo.ended.is_set()


async def test_a_cut_ends_the_connection_at_both_ends_and_not_the_next_one() -> None:
    async with reached() as (echo, proxy, reader, _):
        assert proxy.cut() == 1
        await echo.ended.wait()
        assert await rest_of(reader) == b""
        _, writer = await asyncio.open_connection("127.0.0.1", urlsplit(proxy.url).port)
        writer.write(b"again")
        while not echo.heard.endswith(b"again"):  # noqa: ASYNC110  # the server sets no event for data
            await asyncio.sleep(0)
        writer.transport.abort()


@pytest.mark.parametrize("direction", Direction)
async def test_what_is_held_back_arrives_late_whole_and_in_order_though_its_sender_is_gone(
    direction: Direction,
) -> None:
    async with reached() as (echo, proxy, reader, writer), asyncio.TaskGroup() as tasks:
        clock = asyncio.get_running_loop().time
        began = clock()
        tasks.create_task(proxy.hold(HELD_SECONDS, (direction,)))
        await asyncio.sleep(0)
        for part in (b"one", b"two"):
            writer.write(part)
        writer.write_eof()
        await echo.ended.wait()
        assert echo.heard == b"helloonetwo"
        if direction is Direction.TO_SERVICE:
            assert clock() - began >= HELD_SECONDS
        assert await reader.read() == b"onetwo"
        assert clock() - began >= HELD_SECONDS


async def test_a_connection_to_a_service_that_is_down_is_closed() -> None:
    proxy = FaultyProxy(1)
    async with asyncio.timeout(30), proxy.open():
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(proxy.url).port)
        assert await rest_of(reader) == b""
        writer.transport.abort()


async def test_a_lost_connection_carries_nothing_more_and_new_ones_do() -> None:
    async with reached() as (echo, proxy, reader, writer):
        assert proxy.lose() == 1
        writer.write(b"more")
        await writer.drain()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(HELD_SECONDS):
                await reader.read(1)
        assert echo.heard == b"hello"
        parts = urlsplit(proxy.url)
        other, sink = await asyncio.open_connection(parts.hostname, parts.port)
        sink.write(b"again")
        assert await other.readexactly(5) == b"again"
        sink.close()


async def test_it_answers_in_its_servers_place() -> None:
    async with reached() as (echo, proxy, reader, _):
        answering = asyncio.create_task(proxy.answer(HELD_SECONDS))
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await reader.readexactly(1)
        parts = urlsplit(proxy.url)
        other, sink = await asyncio.open_connection(parts.hostname, parts.port)
        sink.write(b"POST / HTTP/1.1\r\n\r\n")
        said = await other.read()
        assert said.startswith(b"HTTP/1.1 200 OK")
        assert b"<html>" in said
        sink.close()
        await answering
        assert echo.heard == b"hello"
