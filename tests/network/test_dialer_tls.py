"""A TLS connection of the proxy delivers a reply up to its last byte, on uvloop and on asyncio's event loop."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from socket import AF_INET, SO_RCVBUF, SOL_SOCKET, create_server, socket
from threading import Event, Thread
from typing import Any

import pytest
import uvloop

from api.test_tls import OPENSSL, made
from outrider.sandbox.network.addresses import Address
from outrider.sandbox.network.dialer import Dialer, ProxiedServer
from outrider.sandbox.network.proxy import flush
from outrider.sandbox.network.requests import Unreachable

pytestmark = [
    pytest.mark.skipif(OPENSSL is None, reason="openssl makes the certificates"),
    pytest.mark.timeout(60),
]
BODY = bytes(range(256)) * 8192
"""Much larger than the buffer of a reader, which stops reading when its buffer is full."""


async def nobody(host: str, port: int, named: bool) -> Sequence[Address]:
    return [ip_address(host)]


def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Thread]:
    """Start a TLS server in a thread. It accepts one connection, replies with BODY, and closes the connection. Returns
    its port and its thread."""
    pair = made(folder, "mirror")
    monkeypatch.setenv("SSL_CERT_FILE", str(pair.certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    listening = create_server(("127.0.0.1", 0))

    def serve() -> None:
        with listening, listening.accept()[0] as accepted, suppress(ssl.SSLError, ConnectionError):
            client = context.wrap_socket(accepted, server_side=True)
            client.recv(1000)
            client.sendall(BODY)
            client.setblocking(False)
            with client, suppress(ssl.SSLWantReadError):
                client.unwrap()  # end TLS right after the reply, without waiting for the client

    thread = Thread(target=serve, name="mirror")
    thread.start()
    return listening.getsockname()[1], thread


async def reply(port: int, served: Thread, proxy: str) -> bytes:
    place = ProxiedServer(host="127.0.0.1", port=port, tls=True, internal=True, proxy=proxy)
    connection = await Dialer(nobody, environ={}).connect(place, tunnel=False)
    try:
        connection.writer.write(b"GET / HTTP/1.1\r\n\r\n")
        got = b""
        while data := await connection.reader.read(1 << 16):
            got += data
            await asyncio.sleep(0)
        return got
    finally:
        connection.writer.close()
        with suppress(OSError):
            await connection.writer.wait_closed()
        served.join()


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
@pytest.mark.parametrize("proxied", [False, True], ids=["direct", "through-a-proxy"])
def test_a_reply_keeps_its_end(run: Any, proxied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port, served = server(tmp_path, monkeypatch)

    async def through() -> bytes:
        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            up, down = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(copy(reader, down), copy(up, writer))

        async with await asyncio.start_server(carry, "127.0.0.1", 0) as proxy:
            at = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}" if proxied else ""
            return await reply(port, served, at)

    assert run(through()) == BODY


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
def test_a_server_that_replies_early_gets_the_whole_request(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the reply is complete, the end of the request may still be in the buffer below TLS."""
    pair = made(tmp_path, "mirror")
    monkeypatch.setenv("SSL_CERT_FILE", str(pair.certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    listening = socket(AF_INET)
    listening.setsockopt(SOL_SOCKET, SO_RCVBUF, 1 << 16)
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    read, taken = Event(), []

    def serve() -> None:
        with listening, context.wrap_socket(listening.accept()[0], server_side=True) as client:
            read.wait(30)
            while data := client.recv(1 << 16):
                taken.append(len(data))

    async def send() -> int:
        place = ProxiedServer(host="127.0.0.1", port=listening.getsockname()[1], tls=True, internal=True, proxy="")
        connection = await Dialer(nobody, environ={}).connect(place, tunnel=False)
        size = 0
        while not connection.unsent():
            connection.writer.write(bytes(1 << 14))
            size += 1 << 14
            assert size < 1 << 26
        assert not connection.writer.transport.get_write_buffer_size()
        asyncio.get_running_loop().call_later(0.1, read.set)
        await flush(connection.writer, seconds=30)
        connection.drop()
        return size

    served = Thread(target=serve, name="mirror", daemon=True)
    served.start()
    size = run(send())
    served.join()
    assert sum(taken) == size


def test_a_server_whose_issuer_is_not_trusted_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port, served = server(tmp_path, monkeypatch)
    monkeypatch.delenv("SSL_CERT_FILE")

    async def main() -> None:
        with pytest.raises(Unreachable, match="certificate verify failed"):
            await reply(port, served, "")

    uvloop.run(main())
    served.join()
