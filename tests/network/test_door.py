"""The door of a sandbox: its rules, its counts, its mirrors and records, and the model gateway behind it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from network.world import ENDPOINT, HELLO, a_door, a_server, chunks, connect, get, said
from outrider.destinations import Phase
from outrider.errors import RuntimeUnavailable
from outrider.sandbox.network.door import ServerUse
from outrider.sandbox.network.record import record_file


async def test_a_request_and_a_tunnel_are_carried_and_counted(tmp_path: Path) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        writer.write(HELLO if head.startswith(b"GET") else b"echo " + head)
        writer.write_eof()

    async with a_server(answer=echo) as server:
        place = f"files.test:{server.port}"
        async with a_door(tmp_path, place, names={"files.test": [["127.0.0.1"]]}, internal=[place]) as (door, _):
            seen: list[ServerUse] = []
            unfollow = door.follow(seen.append)
            assert (await said(tmp_path, get(f"http://{place}/simple/x?a=1#b", "A: b"))).endswith("\r\n\r\nhi")
            assert server.heard == [
                f"GET /simple/x?a=1 HTTP/1.1\r\nHost: {place}\r\nA: b\r\nConnection: close\r\n\r\n".encode()
            ]
            got = await said(tmp_path, connect(place), then=b"bytes\r\n\r\n")
            assert got == "HTTP/1.1 200 Connection established\r\n\r\necho bytes\r\n\r\n"
            unfollow()
    [use] = door.uses.values()
    assert (use.phase, use.server, use.requests, use.refused, use.failed) == (Phase.AGENT, place, 2, 0, 0)
    assert use.sent == len(server.heard[0]) + len(b"bytes\r\n\r\n")
    assert use.received == len(HELLO) + len(b"echo bytes\r\n\r\n")
    assert seen[-1] is use
    assert not (tmp_path / "door").exists()


async def test_a_large_reply_and_a_large_body_pass_unchanged(tmp_path: Path) -> None:
    data = bytes(range(256)) * (8 << 10)

    async def swap(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        assert await reader.readexactly(len(data)) == data
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"%x\r\n" % len(data) + data + b"\r\n0\r\n\r\n")

    async with a_server(answer=swap) as server:
        place = f"files.test:{server.port}"
        async with a_door(tmp_path, place, names={"files.test": [["127.0.0.1"]]}, internal=[place]):
            head = f"PUT http://{place}/ HTTP/1.1\r\nContent-Length: {len(data)}\r\n\r\n".encode()
            got = await said(tmp_path, head + data)
    assert got.encode("latin-1").partition(b"\r\n\r\n")[2] == b"%x\r\n" % len(data) + data + b"\r\n0\r\n\r\n"


async def test_other_connections_go_to_the_model_gateway(tmp_path: Path) -> None:
    heard: list[bytes] = []

    async def gateway(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):  # the connection stays open for a second request
            heard.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(HELLO)
        writer.close()

    server = await asyncio.start_unix_server(gateway, tmp_path / "gateway")
    async with server, a_door(tmp_path, "files.test", phase=None) as (door, _):
        call = "POST /s/KEY/v1/messages HTTP/1.1\r\n\r\n"
        assert (await said(tmp_path, call, then=call.encode())) == 2 * HELLO.decode()
        odd = f"GET {ENDPOINT}/s/KEY/v1/models HTTP/1.1\r\n\r\n"  # a client that ignores NO_PROXY
        assert (await said(tmp_path, odd, then=call.encode())) == 2 * HELLO.decode()
        assert heard[2] == b"GET /s/KEY/v1/models HTTP/1.1\r\n\r\n"
        got = await said(tmp_path, connect("127.0.0.1:61080"), then=2 * call.encode())
        assert got.endswith(2 * HELLO.decode())
        assert heard[4:] == 2 * [call.encode()]
        assert door.uses == {}


async def test_requests_to_the_gateway_and_to_others_share_a_connection(tmp_path: Path) -> None:
    """A connection may carry requests to the gateway and then one through the proxy. Bun sends requests this way,
    because both have the same address."""
    heard: list[bytes] = []

    async def gateway(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(b"")
        while data := await reader.read(1 << 16):
            heard[-1] += data
            if data.endswith(END):
                writer.write(HELLO)
        writer.close()

    async with await asyncio.start_unix_server(gateway, tmp_path / "gateway"), a_server() as server:
        place = f"files.test:{server.port}"
        other = get(f"http://{place}/x").encode()
        body = other + b"x" * 200_000 + other + END
        call = b"POST /v1/messages HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        absolute = call.replace(b" /v1", f" {ENDPOINT}/v1".encode(), 1)
        names = {"files.test": [["127.0.0.1"]]}
        async with a_door(tmp_path, place, names=names, internal=[place]) as (door, _):
            got = await replies(tmp_path, call, absolute, call, other)
            assert got.startswith(3 * HELLO)
            assert got.endswith(b"Connection: close\r\n\r\nhi")
            assert heard == [3 * call]
            assert server.heard == [f"GET /x HTTP/1.1\r\nHost: {place}\r\nConnection: close\r\n\r\n".encode()]
            [use] = door.uses.values()
            assert (use.server, use.requests) == (place, 1)
            refused = get("http://elsewhere.test/").encode()
            assert (await replies(tmp_path, call, refused)).startswith(HELLO + b"HTTP/1.1 403 ")
            established = b"HTTP/1.1 200 Connection established\r\n\r\n"
            tunnel = connect(place).encode()
            assert await replies(tmp_path, call, tunnel, end=True) == HELLO + established
            tunnel = connect("127.0.0.1:61080").encode() + call
            assert await replies(tmp_path, call, tunnel, end=True) == HELLO + established + HELLO
            assert heard[-1] == 2 * call
            # if a request's head does not give the request's length, the rest of the connection goes to the gateway
            for fields in (b"Transfer-Encoding: chunked", b"Upgrade: x", b"Content-Length: 1\r\nContent-Length: 2"):
                odd = b"POST /v1/messages HTTP/1.1\r\n%s\r\n\r\n%s" % (fields, END)
                assert await replies(tmp_path, call, odd, other + END, end=True) == 3 * HELLO
                assert heard[-1] == call + odd + other + END
            # the same holds for a head that is too long and for a head that never ends
            for rest in (b"GET /" + b"x" * (100 << 10) + END, b"GET /v1" + END):
                assert await replies(tmp_path, call, rest, end=True) == 2 * HELLO
                assert heard[-1] == call + rest


END = b"the end"


async def replies(folder: Path, *requests: bytes, end: bool = False) -> bytes:
    """Send requests one after the other on one connection to the door. Return the replies. If `end` is true, the client
    shuts down its sending side after the last request."""
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_unix_connection(folder / "door")
        try:
            got = b""
            for request in requests[:-1]:
                writer.write(request)
                got += await reader.readexactly(len(HELLO))
            writer.write(requests[-1])
            if end:
                writer.write_eof()
            return got + await reader.read()
        finally:
            writer.close()


async def test_the_operators_proxy_leads_to_servers(tmp_path: Path) -> None:
    """The door itself sends the password of the operator's proxy. A name that this machine cannot resolve is passed on
    to that proxy. A private address is refused."""
    async with a_server(b"HTTP/1.1 200 Fine\r\n\r\nthrough") as server:
        environ = {"https_proxy": f"http://me:s%40t@127.0.0.1:{server.port}", "no_proxy": "direct.test"}
        names = {"inner.test": [["10.0.0.1"]]}
        async with a_door(tmp_path, "*:443", environ=environ, names=names):
            assert (await said(tmp_path, connect("files.test:443"))).endswith("\r\n\r\nthrough")
            assert (await said(tmp_path, connect("inner.test:443"))).startswith("HTTP/1.1 403")
            assert (await said(tmp_path, connect("10.0.0.1:443"))).startswith("HTTP/1.1 403")
            assert (await said(tmp_path, connect("direct.test:443"))).startswith("HTTP/1.1 502")
    line = b"CONNECT files.test:443 HTTP/1.1\r\nHost: files.test:443\r\nProxy-Authorization: Basic bWU6c0B0\r\n\r\n"
    assert server.heard == [line]


PAGE = b'<a href="https://files.test/x.whl">x</a> <a href="http://index.test:PORT/y.whl">y</a>'


async def test_a_mirror_has_a_name_of_its_own(tmp_path: Path) -> None:
    """Pages and redirects lead to the mirror's name instead of the index's address. Uploads are refused."""

    async def index(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        page = PAGE.replace(b"PORT", str(server.port).encode())
        if b"/old/" in head:
            writer.write(f"HTTP/1.1 301 Moved\r\nLocation: http://index.test:{server.port}/new/\r\n\r\n".encode())
        elif b".whl" in head:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\n\r\n" + page)
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nTransfer-Encoding: chunked\r\n\r\n")
            writer.write(
                b"%x\r\n" % len(page[:9]) + page[:9] + b"\r\n%x\r\n" % len(page[9:]) + page[9:] + b"\r\n0\r\n\r\n"
            )

    async with a_server(answer=index) as server:
        settings: dict[str, Any] = {
            "pip_index": f"http://index.test:{server.port}/simple/",
            "pip_files": "https://files.test/",
        }
        async with a_door(tmp_path, "mirror:pip", names={"index.test": [["127.0.0.1"]]}, **settings) as (door, _):
            got = await said(tmp_path, get("http://pip.mirror.internal/simple/x/", "Accept-Encoding: gzip"))
            body = '<a href="http://files.pip.mirror.internal/x.whl">x</a> <a href="http://pip.mirror.internal/y.whl">y</a>'
            assert chunks(got.partition("\r\n\r\n")[2]) == body
            assert b"gzip" not in server.heard[0]
            assert (
                (await said(tmp_path, get("http://pip.mirror.internal/x.whl")))
                .encode()
                .endswith(PAGE.replace(b"PORT", str(server.port).encode()))
            )
            moved = await said(tmp_path, get("http://pip.mirror.internal/old/"))
            assert "Location: http://pip.mirror.internal/new/\r\n" in moved
            post = "POST http://pip.mirror.internal/legacy/ HTTP/1.1\r\nContent-Length: 0\r\n\r\n"
            assert (await said(tmp_path, post)).startswith("HTTP/1.1 403")
            assert (await said(tmp_path, get(f"http://index.test:{server.port}/"))).startswith("HTTP/1.1 403")
            assert len(server.heard) == 3
            assert door.uses[Phase.AGENT, "pip.mirror.internal:80"].requests == 4


async def test_apt_goes_through_the_operators_cache(tmp_path: Path) -> None:
    async with a_server() as server:
        settings: dict[str, Any] = {"apt_cache": f"http://127.0.0.1:{server.port}", "apt_hosts": ["Packages.test."]}
        async with a_door(tmp_path, "mirror:apt", **settings):
            assert (await said(tmp_path, get("http://packages.test/debian/dists/x"))).endswith("hi")
            assert (await said(tmp_path, get("http://evil.test/debian/"))).startswith("HTTP/1.1 403")
            assert (await said(tmp_path, connect("packages.test:443"))).startswith("HTTP/1.1 403")
    assert server.heard[0].startswith(b"GET http://packages.test/debian/dists/x HTTP/1.1\r\nHost: packages.test\r\n")
    assert len(server.heard) == 1


async def test_a_record_is_replayed(tmp_path: Path) -> None:
    counts = 0

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        nonlocal counts
        counts += 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n%d" % counts)

    async with a_server(answer=count) as server:
        place = f"files.test:{server.port}"
        names = {"files.test": [["127.0.0.1"]]}
        request = get(f"http://{place}/x")
        spec = {"allow": [place], "record": True}
        async with a_door(tmp_path, spec=spec, names=names, internal=[place]) as (door, _):
            said_first = [await said(tmp_path, request) for _ in range(2)]
            assert door.record is not None
            (tmp_path / "record").write_bytes(record_file([door.record]))
    spec = {"allow": [place], "replay": "record"}
    async with a_door(tmp_path, spec=spec) as (door, fake):  # the server is stopped, and its name does not resolve
        assert [await said(tmp_path, request) for _ in range(3)] == [*said_first, said_first[1]]
        other = await said(tmp_path, get(f"http://{place}/other"))
        assert other.startswith("HTTP/1.1 504")
        assert "the record has no reply to GET" in other
        assert "a replay has no tunnels" in await said(tmp_path, connect(place))
        assert (await said(tmp_path, get("http://evil.test/"))).startswith("HTTP/1.1 403")
        assert fake.asked == []
        assert door.broken(*Phase) is None
        await door.enter(Phase.VERIFIER)
        assert (await said(tmp_path, request)).startswith("HTTP/1.1 504")


async def test_a_record_with_nonsense_is_refused(tmp_path: Path) -> None:
    (tmp_path / "record").write_bytes(b"{}\n")
    with pytest.raises(RuntimeUnavailable, match="is no record of a network"):
        async with a_door(tmp_path, spec={"replay": "record"}):
            raise AssertionError


async def test_a_reply_cut_off_is_not_recorded(tmp_path: Path) -> None:
    async with a_server(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi") as server:
        place = f"files.test:{server.port}"
        spec = {"allow": [place], "record": True}
        async with a_door(tmp_path, spec=spec, names={"files.test": [["127.0.0.1"]]}, internal=[place]) as (door, _):
            await said(tmp_path, get(f"http://{place}/"))
            assert door.record is not None
            assert door.record.replies == []


async def test_a_long_folder_has_a_door(tmp_path: Path) -> None:
    """The path of the folder is longer than 107 bytes, the maximum for the path of a Unix socket."""
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    async with a_door(folder, "files.test"):
        assert (folder / "door").is_socket()
    assert not (folder / "door").exists()


async def test_a_mirror_with_a_private_address_is_a_failure(tmp_path: Path) -> None:
    """A mirror whose host has a private address counts as broken. No program can cause this failure, so the reward that
    follows does not grade the program."""
    private = {"packages.test": [["10.1.2.3"]]}
    async with a_door(tmp_path, "mirror:apt", names=private, phase=Phase.VERIFIER, apt_hosts=["packages.test"]) as (
        door,
        _,
    ):
        answer = await said(tmp_path, get("http://packages.test/debian/dists/stable/InRelease"))
        assert answer.startswith("HTTP/1.1 502")
        assert "the operator may name packages.test:80 in network.internal" in answer
        assert door.broken(Phase.VERIFIER) is not None
