"""The proxy of an image build connects only to the hosts that the operator names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from outrider.errors import InvalidField
from outrider.sandbox.build_proxy import BuildProxy, checked_hosts, index_variables
from outrider.sandbox.network.variables import proxy_variables


@asynccontextmanager
async def a_server(
    reply: bytes = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Run a server that replies to each connection with `reply`. Yields its port and the list of the bytes that it
    received."""
    heard: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(reply)
        await writer.drain()
        if heard[-1].startswith(b"PUT"):
            heard.append(await reader.read())
        if heard[-1].startswith(b"CONNECT"):
            heard.append(await reader.read(100))
            writer.write(b"through")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], heard


async def said(folder: Path, request: str, hosts: list[str], environ: Mapping[str, str] = {}) -> tuple[str, BuildProxy]:
    proxy = BuildProxy(checked_hosts(hosts), environ)
    async with proxy.serving(folder / "s"):
        reader, writer = await asyncio.open_unix_connection(folder / "s")
        try:
            writer.write(request.encode())
            if not request.endswith("\r\n\r\n"):
                writer.write_eof()
            first = b""
            if request.startswith("CONNECT"):
                first = await reader.readuntil(b"\r\n\r\n")
                if b" 200 " in first:
                    writer.write(b"bytes")
                    writer.write_eof()
            return (first + await reader.read()).decode(), proxy
        finally:
            writer.close()


async def test_a_named_host_is_reached(tmp_path: Path) -> None:
    async with a_server() as (port, heard):
        host = f"127.0.0.1:{port}"
        request = f"GET http://{host}/simple/x?a=1 HTTP/1.1\r\nHost: {host}\r\nProxy-Connection: keep-alive\r\n\r\n"
        got, proxy = await said(tmp_path, request, [host])
        assert got.endswith("hi")
        assert heard == [f"GET /simple/x?a=1 HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()]
        assert proxy.refused == frozenset()


@pytest.mark.parametrize(
    ("request_line", "refused"),
    [
        ("GET http://mirror.lan/x", "mirror.lan"),
        ("CONNECT Mirror.lan.:443", "mirror.lan"),
        ("CONNECT mirror.lan:8443", "mirror.lan:8443"),
        ("GET http://127.0.0.1:PORT/x", "127.0.0.1:PORT"),
    ],
)
async def test_no_other_host_is_reached(tmp_path: Path, request_line: str, refused: str) -> None:
    async with a_server() as (port, heard):
        line, refused = request_line.replace("PORT", str(port)), refused.replace("PORT", str(port))
        got, proxy = await said(tmp_path, f"{line} HTTP/1.1\r\n\r\n", ["named.lan", "127.0.0.1"])
        assert got.startswith("HTTP/1.1 403 Forbidden")
        assert f"no --allow-host names {refused}" in got
        assert (proxy.refused, heard) == (frozenset({refused}), [])


@pytest.mark.parametrize(
    "line",
    ["GET /x HTTP/1.1", "GET https://a/ HTTP/1.1", "nonsense", "CONNECT a:b HTTP/1.1", "GET http://a@b/ HTTP/1.1"],
)
async def test_what_is_no_request_of_a_proxy_is_refused(tmp_path: Path, line: str) -> None:
    got, _ = await said(tmp_path, f"{line}\r\n\r\n", ["a"])
    assert got.startswith("HTTP/1.1 400 Bad Request")


@pytest.mark.parametrize(
    "fields",
    [
        "A: b\n\nGET http://other.lan/ HTTP/1.1\r\nHost: other.lan\r\n",
        "A: b\rC: d\r\n",
        "A: b\0\r\n",
        "A: b\r\n folded\r\n",
        "A : b\r\n",
        "no colon\r\n",
        "Content-Length: 1\r\nContent-Length: 2\r\n",
        "Content-Length: +1\r\n",
        "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\n",
        "Host: other.lan\r\n",
        "Host: index.lan\r\nHost: index.lan\r\n",
    ],
)
async def test_a_head_that_servers_may_read_differently_is_refused(tmp_path: Path, fields: str) -> None:
    async with a_server() as (port, heard):
        environ = {"http_proxy": f"http://127.0.0.1:{port}"}
        request = f"GET http://index.lan/x HTTP/1.1\r\n{fields}\r\n"
        got, _ = await said(tmp_path, request, ["index.lan"], environ)
        assert got.startswith(("HTTP/1.1 400 Bad Request", "HTTP/1.1 411 Length Required"))
        assert heard == []


async def test_the_server_gets_one_request_for_the_checked_host(tmp_path: Path) -> None:
    async with a_server() as (port, heard):
        environ = {"http_proxy": f"http://127.0.0.1:{port}"}
        request = "PUT http://index.lan?q HTTP/1.1\r\nHost: INDEX.lan:80\r\nContent-Length: 2\r\n\r\nhiGET "
        await said(tmp_path, request, ["index.lan"], environ)
        kept = b"Host: index.lan\r\nContent-Length: 2\r\nConnection: close\r\n\r\n"
        assert heard == [b"PUT http://index.lan/?q HTTP/1.1\r\n" + kept, b"hi"]


async def test_the_operators_proxy_is_used_and_its_password_stays_outside(tmp_path: Path) -> None:
    async with a_server(b"HTTP/1.1 200 Fine\r\n\r\n") as (port, heard):
        environ = {"HTTPS_PROXY": f"http://me:s%40t@127.0.0.1:{port}", "NO_PROXY": "x.lan, .y.lan"}
        got, _ = await said(tmp_path, "CONNECT index.lan:443 HTTP/1.1\r\n\r\n", ["index.lan"], environ)
        assert got.endswith("\r\n\r\nthrough")
        connect = (
            b"CONNECT index.lan:443 HTTP/1.1\r\nHost: index.lan:443\r\nProxy-Authorization: Basic bWU6c0B0\r\n\r\n"
        )
        assert heard == [connect, b"bytes"]
    async with a_server() as (port, heard):
        environ = {"http_proxy": f"http://127.0.0.1:{port}"}
        got, _ = await said(tmp_path, "GET http://index.lan/x HTTP/1.1\r\nA: b\r\n\r\n", ["index.lan"], environ)
        assert heard == [b"GET http://index.lan/x HTTP/1.1\r\nHost: index.lan\r\nA: b\r\nConnection: close\r\n\r\n"]
        assert got.endswith("hi")


async def test_the_connection_to_a_proxy_without_a_readable_reply_is_closed(tmp_path: Path) -> None:
    closed = asyncio.Event()

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            writer.write(b"x" * (70 << 10))
            await reader.read()
        writer.close()
        closed.set()

    async with await asyncio.start_server(babble, "127.0.0.1", 0) as server:
        environ = {"https_proxy": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"}
        got, _ = await said(tmp_path, "CONNECT index.lan:443 HTTP/1.1\r\n\r\n", ["index.lan"], environ)
        assert got.startswith("HTTP/1.1 502 Bad Gateway")
        async with asyncio.timeout(5):
            await closed.wait()


async def test_a_host_that_does_not_answer_is_told(tmp_path: Path) -> None:
    async with a_server() as (port, _):
        pass
    got, _ = await said(tmp_path, f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n", [f"127.0.0.1:{port}"])
    assert got.startswith("HTTP/1.1 502 Bad Gateway")
    assert f"cannot reach 127.0.0.1:{port}" in got


def test_the_variables_of_run() -> None:
    assert proxy_variables("http://127.0.0.1:1")["HTTPS_PROXY"] == "http://127.0.0.1:1"
    environ = {
        "PIP_INDEX_URL": "http://mirror.lan:3141/simple",
        "UV_INDEX_URL": "https://me:secret@named.lan/simple",
        "NPM_CONFIG_REGISTRY": "https://other.lan/",
        "GOPROXY": "direct",
        "PIP_CACHE_DIR": "/x",
    }
    assert index_variables(frozenset({"mirror.lan:3141", "named.lan"}), environ) == {
        "PIP_INDEX_URL": "http://mirror.lan:3141/simple"
    }
    assert index_variables(frozenset({"mirror.lan"}), environ) == {}
    for wrong in ("https://x", "a/b", "", "a b", "*"):
        with pytest.raises(InvalidField, match="is no host"):
            checked_hosts([wrong])
