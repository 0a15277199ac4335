"""Attacks on a sandbox's door: ways in which an agent's program may try to get past its task's destinations."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from network.world import HELLO, a_door, a_server, connect, get, said
from outrider.destinations import Phase
from outrider.sandbox.network import proxy
from outrider.sandbox.network.dialer import abort
from outrider.sandbox.network.door import CONNECTIONS, MAX_CLIENTS, MAX_PLACES
from outrider.sandbox.network.proxy import LEAST_CONNECTIONS, ConnectionPool, ProxyWaits, flush
from outrider.sandbox.network.requests import NotAllowed, read_request

METADATA = [
    *("169.254.169.254", "2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "169.16689662", "0xa9.254.0251.254"),
    *("[::ffff:169.254.169.254]", "[::ffff:a9fe:a9fe]", "[64:ff9b::a9fe:a9fe]", "[2002:a9fe:a9fe::1]", "[::a9fe:a9fe]"),
    *("[fe80::1]", "[fe80::1%25eth0]", "[fd00:ec2::254]", "168.63.129.16", "100.100.100.200", "169.254.169.254."),
]
PRIVATE = [
    *("127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "0.0.0.0", "10.0.0.1", "172.17.0.1"),
    *("192.168.0.1", "100.64.0.1", "224.0.0.1", "255.255.255.255", "[::1]", "[::]", "[fc00::1]", "[fd12::1]"),
    *("[::ffff:127.0.0.1]", "[::ffff:10.0.0.1]", "[ff02::1]", "[2001:db8::1]", "localhost", "0"),
]


@pytest.mark.parametrize("host", [*METADATA, *PRIVATE])
async def test_no_spelling_of_a_private_address_is_reached(tmp_path: Path, host: str) -> None:
    """Private addresses are refused even if the task may reach every host at every port."""
    names = {"localhost": [["127.0.0.1", "::1"]]}
    async with a_server() as server, a_door(tmp_path, "*:*", names=names) as (door, _):
        for request in (connect(f"{host}:{server.port}"), get(f"http://{host}:{server.port}/latest/meta-data/")):
            got = await said(tmp_path, request)
            assert got.startswith(("HTTP/1.1 403 Forbidden", "HTTP/1.1 400 Bad Request")), got
        assert server.heard == []
        assert not any(use.requests and use.received for use in door.uses.values())


async def test_a_name_that_resolves_to_a_private_address_is_refused(tmp_path: Path) -> None:
    """The name is refused even if only one of its addresses is private."""
    table = {
        "one.evil.test": [["127.0.0.1"]],
        "two.evil.test": [["93.184.216.34", "127.0.0.1"]],
        "mapped.evil.test": [["::ffff:127.0.0.1"]],
        "meta.evil.test": [["169.254.169.254"]],
    }
    async with a_server() as server, a_door(tmp_path, f"*.evil.test:{server.port}", names=table) as (_, names):
        for host in table:
            assert (await said(tmp_path, connect(f"{host}:{server.port}"))).startswith("HTTP/1.1 403")
        assert names.asked == list(table)
        assert server.heard == []


async def test_a_name_is_resolved_once_for_a_connection(tmp_path: Path) -> None:
    rebinding = {"evil.test": [["192.0.2.7"], ["127.0.0.1"]]}
    async with a_server() as server, a_door(tmp_path, f"evil.test:{server.port}", names=rebinding) as (_, names):
        assert (await said(tmp_path, connect(f"evil.test:{server.port}"))).startswith("HTTP/1.1 403")
        assert names.asked == ["evil.test"]
        # The next look-up returns another address (DNS rebinding), which is checked and refused as well.
        assert (await said(tmp_path, get(f"http://evil.test:{server.port}/"))).startswith("HTTP/1.1 403")
        assert server.heard == []


async def test_the_connection_goes_to_the_checked_address(tmp_path: Path) -> None:
    """The name is looked up once. A second look-up would return another address, and in the operating system the name
    does not exist."""
    names = {"files.test": [["127.0.0.1"], ["203.0.113.9"]]}
    async with a_server() as server:
        place = f"files.test:{server.port}"
        async with a_door(tmp_path, place, names=names, internal=[place]) as (_, fake):
            assert (await said(tmp_path, get(f"http://{place}/x"))).endswith("hi")
            assert fake.asked == ["files.test"]


async def test_an_internal_name_never_leads_to_credentials(tmp_path: Path) -> None:
    names = {"files.test": [["169.254.169.254"]]}
    async with a_door(tmp_path, "files.test:80", names=names, internal=["files.test:80"]):
        assert (await said(tmp_path, get("http://files.test/"))).startswith("HTTP/1.1 403")


async def test_the_control_api_is_never_reached(tmp_path: Path) -> None:
    """The control API is refused even if the operator names its address in network.internal."""
    names = {"api.test": [["127.0.0.1"]]}
    async with a_server() as server:
        places = [f"127.0.0.1:{server.port}", f"api.test:{server.port}"]
        async with a_door(tmp_path, *places, names=names, internal=places, port=server.port):
            for place in (*places, f"LOCALHOST:{server.port}"):
                assert (await said(tmp_path, connect(place))).startswith("HTTP/1.1 403")
                assert (await said(tmp_path, get(f"http://{place}/v1/status"))).startswith("HTTP/1.1 403")
        assert server.heard == []


@pytest.mark.parametrize("place", ["files.test:22", "files.test:25", "files.test:8700", "other.test:443", "test:443"])
async def test_only_the_named_ports_and_hosts_are_reached(tmp_path: Path, place: str) -> None:
    async with a_door(tmp_path, "files.test", names={"files.test": [["93.184.216.34"]]}) as (door, names):
        got = await said(tmp_path, connect(place))
        assert got.startswith("HTTP/1.1 403")
        assert f"task.runtime.network does not allow {place} in this phase" in got
        assert names.asked == []
        assert [(use.server, use.refused) for use in door.uses.values()] == [(place, 1)]


@pytest.mark.parametrize(
    "fields",
    [
        "Host: evil.test\r\n",
        "Host: files.test@evil.test\r\n",
        "Host: files.test\r\nHost: evil.test\r\n",
        "Host: files.test,evil.test\r\n",
        "A: b\r\n folded\r\n",
        "A: b\r\n\tfolded\r\n",
        "A : b\r\n",
        "A: b\nHost: evil.test\r\n",
        "A: b\rHost: evil.test\r\n",
        "A: b\0\r\n",
        "\r\n",
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\n",
        "Transfer-Encoding : chunked\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Content-Length: 1\r\nContent-Length: 2\r\n",
        "Content-Length: 1, 2\r\n",
        "Content-Length: +5\r\n",
        "Content-Length: 0x5\r\n",
        "Content-Length: -1\r\n",
    ],
)
async def test_no_header_is_smuggled(tmp_path: Path, fields: str) -> None:
    async with a_server() as server:
        place = f"files.test:{server.port}"
        names = {"files.test": [["127.0.0.1"]]}
        async with a_door(tmp_path, place, names=names, internal=[place]):
            got = await said(tmp_path, f"POST http://{place}/x HTTP/1.1\r\n{fields}\r\n12345")
        if fields == "\r\n":  # the head ends here; the rest is not part of the request
            assert server.heard == [f"POST /x HTTP/1.1\r\nHost: {place}\r\nConnection: close\r\n\r\n".encode()]
        else:
            assert got.startswith(("HTTP/1.1 400", "HTTP/1.1 411")), got
            assert server.heard == []


@pytest.mark.parametrize(
    "target",
    [
        "http://files.test@evil.test/",
        "http://evil.test\\@files.test/",
        "http://files.test:80@evil.test/",
        "http://user:pw@files.test/",
        "http:/files.test/",
        "http:///files.test/",
        "http://files.test%00.evil.test/",
        "http://files%2etest/",
        "http://files.test:/",
        "http://files.test:80:80/",
        "http://files.test:99999/",
        "http://[files.test]/",
        "http://files_test..evil/",
        "https://files.test/",
        "ftp://files.test/",
        "file:///etc/passwd",
        "gopher://files.test:80/_GET",
        "*",
        "files.test",
        "http://\xe9vil.test/",
    ],
)
async def test_a_target_with_two_meanings_is_refused(tmp_path: Path, target: str) -> None:
    names = {"files.test": [["127.0.0.1"]], "evil.test": [["127.0.0.1"]]}
    async with a_door(tmp_path, "files.test", names=names, internal=["files.test:80"]) as (_, fake):
        assert (await said(tmp_path, get(target))).startswith("HTTP/1.1 400")
        assert fake.asked == []


async def test_each_request_on_a_connection_is_checked(tmp_path: Path) -> None:
    """A connection carries one request. A second request, to another host, is neither served nor passed on as a
    body."""
    async with a_server() as server:
        place = f"files.test:{server.port}"
        names = {"files.test": [["127.0.0.1"]]}
        async with a_door(tmp_path, place, names=names, internal=[place]):
            second = get("http://evil.test/", "Host: evil.test")
            got = await said(tmp_path, get(f"http://{place}/1", "Connection: keep-alive") + second)
        assert got.endswith("hi")
        assert got.count("HTTP/1.1") == 1
        assert "Connection: close" in got
        assert server.heard == [f"GET /1 HTTP/1.1\r\nHost: {place}\r\nConnection: close\r\n\r\n".encode()]


async def test_no_redirect_is_followed(tmp_path: Path) -> None:
    """The redirect of an allowed host is passed to the client. If the client follows it, the proxy refuses the other
    host."""
    async with a_server() as evil:
        redirect = f"HTTP/1.1 302 Found\r\nLocation: http://evil.test:{evil.port}/?secret\r\nContent-Length: 0\r\n\r\n"
        async with a_server(redirect.encode()) as server:
            place = f"files.test:{server.port}"
            names = {"files.test": [["127.0.0.1"]], "evil.test": [["127.0.0.1"]]}
            async with a_door(tmp_path, place, names=names, internal=[place]):
                assert (await said(tmp_path, get(f"http://{place}/"))).startswith("HTTP/1.1 302 Found")
                assert (await said(tmp_path, get(f"http://evil.test:{evil.port}/?secret"))).startswith("HTTP/1.1 403")
        assert evil.heard == []


async def test_headers_of_one_connection_do_not_pass(tmp_path: Path) -> None:
    async with a_server() as server:
        place = f"files.test:{server.port}"
        names = {"files.test": [["127.0.0.1"]]}
        async with a_door(tmp_path, place, names=names, internal=[place]):
            fields = ("Upgrade: h2c", "HTTP2-Settings: AAMA", "Connection: upgrade, x-secret", "X-Secret: 1", "TE: x")
            await said(tmp_path, get(f"http://{place}/", *fields, "Proxy-Authorization: Basic eA==", "Keep: 1"))
        assert server.heard == [f"GET / HTTP/1.1\r\nHost: {place}\r\nKeep: 1\r\nConnection: close\r\n\r\n".encode()]


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
        b"not http\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 9\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nA: b\r\n folded\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"A: " + b"x" * (70 << 10) + b"\r\n\r\n",
        b"",
    ],
)
async def test_a_reply_with_two_meanings_is_not_passed_on(tmp_path: Path, reply: bytes) -> None:
    async with a_server(reply) as server:
        place = f"files.test:{server.port}"
        async with a_door(tmp_path, place, names={"files.test": [["127.0.0.1"]]}, internal=[place]) as (door, _):
            assert (await said(tmp_path, get(f"http://{place}/"))).startswith("HTTP/1.1 502")
            assert [use.failed for use in door.uses.values()] == [1]
            assert door.broken(Phase.AGENT) is None


async def test_a_tunnel_does_not_outlive_its_phase(tmp_path: Path) -> None:
    """A tunnel that was opened in the agent's phase is closed when the grading begins."""
    held = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        held.set()
        await reader.read()

    async with a_server(answer=hold) as server:
        place = f"files.test:{server.port}"
        spec = {"agent": [place], "verifier": [place]}
        door = a_door(tmp_path, spec=spec, names={"files.test": [["127.0.0.1"]]}, internal=[place])
        async with door as (opened, _), asyncio.timeout(10):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "door")
            writer.write(connect(place).encode())
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"x\r\n\r\n")
            await held.wait()
            await opened.enter(Phase.VERIFIER)
            assert await reader.read() == b""
            writer.close()


async def test_without_a_phase_there_is_no_network(tmp_path: Path) -> None:
    async with a_server() as server:
        place = f"files.test:{server.port}"
        spec = {"prepare": [place]}
        names = {"files.test": [["127.0.0.1"]]}
        async with a_door(tmp_path, spec=spec, names=names, internal=[place], phase=None) as (door, _):
            request = get(f"http://{place}/")
            assert "the sandbox has no network now" in await said(tmp_path, request)
            await door.enter(Phase.PREPARE)
            assert (await said(tmp_path, request)).endswith("hi")
            await door.enter(Phase.AGENT)
            assert (await said(tmp_path, request)).startswith("HTTP/1.1 403")


async def test_a_hostile_volume_ends_at_the_limit(tmp_path: Path) -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" * (256 << 10))
            await writer.drain()

    async with a_server(answer=flood) as server:
        place = f"files.test:{server.port}"
        names = {"files.test": [["127.0.0.1"]]}
        async with a_door(tmp_path, place, names=names, internal=[place], download_mb=4) as (door, _):
            got = await said(tmp_path, get(f"http://{place}/"))
            assert len(got) < 5 << 20
            [use] = door.uses.values()
            assert 4 << 20 < use.received < 5 << 20
            assert use.refusal == "the sandbox has received its 4 MiB: the operator's setting is network.download_mb"
            again = await said(tmp_path, get(f"http://{place}/"))
            assert again.startswith("HTTP/1.1 429")
            assert "network.download_mb" in again
            assert door.broken(Phase.AGENT) is None


async def test_what_a_sandbox_sends_ends_at_the_limit(tmp_path: Path) -> None:
    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        while await reader.read(1 << 20):
            pass

    async with a_server(answer=swallow) as server:
        place = f"files.test:{server.port}"
        names = {"files.test": [["127.0.0.1"]]}
        async with a_door(tmp_path, place, names=names, internal=[place], upload_mb=1) as (door, _):
            got = await said(tmp_path, connect(place), then=b"x\r\n\r\n" + b"y" * (3 << 20))
            assert got.startswith("HTTP/1.1 200")
            assert "network.upload_mb" in next(iter(door.uses.values())).refusal
            head = f"POST http://{place}/ HTTP/1.1\r\nContent-Length: 9\r\n\r\n"
            assert (await said(tmp_path, head)).startswith("HTTP/1.1 429")


async def test_many_requests_end_at_the_limit(tmp_path: Path) -> None:
    async with a_server() as server:
        place = f"files.test:{server.port}"
        names = {"files.test": [["127.0.0.1"]]}
        async with a_door(tmp_path, place, names=names, internal=[place], requests=3):
            got = [await said(tmp_path, get(f"http://{place}/")) for _ in range(5)]
        assert [one.split(" ")[1] for one in got] == ["200", "200", "200", "429", "429"]
        assert len(server.heard) == 3


async def test_a_slow_drip_ends(tmp_path: Path) -> None:
    """A connection ends after `ProxyWaits.head` if its head is incomplete, and after `ProxyWaits.connection` even while
    a slow reply arrives."""
    waits = ProxyWaits(head=0.2, silence=5.0, connection=0.5)

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    async with a_server(answer=drip) as server:
        place = f"files.test:{server.port}"
        names = {"files.test": [["127.0.0.1"]]}
        async with a_door(tmp_path, place, names=names, internal=[place], waits=waits):
            assert await said(tmp_path, "GET http://files.test/ HT", seconds=3) == ""
            await said(tmp_path, get(f"http://{place}/"), seconds=3)


async def test_a_silent_server_is_said(tmp_path: Path) -> None:
    waits = ProxyWaits(silence=0.2, answer=0.1)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        await reader.read()

    async with a_server(answer=silent) as server:
        place = f"files.test:{server.port}"
        names = {"files.test": [["127.0.0.1"]]}
        async with a_door(tmp_path, place, names=names, internal=[place], waits=waits) as (door, _):
            post = f"POST http://{place}/ HTTP/1.1\r\nHost: {place}\r\nContent-Length: 9\r\n\r\nx"
            for request in (get(f"http://{place}/"), post):
                got = await said(tmp_path, request, seconds=3)
                assert got.startswith("HTTP/1.1 504 Gateway Timeout"), got
                assert f"{place} did not answer" in got
            [use] = door.uses.values()
            assert (use.failed, use.failure) == (2, f"{place} did not answer")
            assert door.broken(Phase.AGENT) is None, "a program could make a server silent, to avoid its grade"


async def test_connections_at_once_are_bounded(tmp_path: Path) -> None:
    go, arrived = asyncio.Event(), asyncio.Semaphore(0)

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        arrived.release()
        await go.wait()
        writer.write(HELLO)

    async with a_server(answer=wait) as server:
        place = f"files.test:{server.port}"
        async with a_door(tmp_path, place, names={"files.test": [["127.0.0.1"]]}, internal=[place]):
            async with asyncio.TaskGroup() as group:
                first = [group.create_task(said(tmp_path, get(f"http://{place}/"))) for _ in range(CONNECTIONS)]
                for _ in first:
                    await arrived.acquire()
                another = await said(tmp_path, get(f"http://{place}/"))
                go.set()
            assert another.startswith("HTTP/1.1 429")
            assert all(task.result().endswith("hi") for task in first)


async def test_connections_of_all_sandboxes_are_bounded(tmp_path: Path) -> None:
    """A sandbox that holds all connections of the pool, all silent, leaves LEAST_CONNECTIONS connections to each other
    sandbox."""
    pool = ConnectionPool(5)
    one, two = (a_door(tmp_path, "files.test", name=name, connections=pool) for name in ("one", "two"))
    async with one, two, asyncio.timeout(20):
        held = []
        for name, most in (("one", LEAST_CONNECTIONS + 5), ("two", LEAST_CONNECTIONS)):
            for _ in range(most):
                reader, writer = await asyncio.open_unix_connection(tmp_path / name)
                writer.write(b"CONNECT ")
                held.append((reader, writer))
            assert await said(tmp_path, connect("files.test:22"), name=name) in ("", "[reset]")
        for _, writer in held[:6]:
            writer.close()
        got = ""
        while not got.startswith("HTTP/1.1 403"):
            got = await said(tmp_path, connect("files.test:22"), name="two")
        for _, writer in held:
            writer.close()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (f"GET http://files.test/ HTTP/1.1\r\nA: {'x' * 70_000}\r\n\r\n", "431 Request Header Fields Too Large"),
        ("POST http://evil.test/ HTTP/1.1\r\nContent-Length: 999999\r\n\r\n" + "x" * 300_000, "403 Forbidden"),
    ],
)
async def test_a_refusal_is_read_although_the_request_is_not(tmp_path: Path, request_: str, status: str) -> None:
    """The door reads the rest of a refused request before it closes. Otherwise the kernel resets the connection because
    of the unread bytes, and the client does not get the reason."""
    async with a_door(tmp_path, "files.test"), asyncio.timeout(20):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "door")
        writer.write(request_.encode())
        await writer.drain()  # raises if the other side no longer reads
        assert (await reader.read()).startswith(f"HTTP/1.1 {status}".encode())
        writer.close()


async def test_invented_names_are_counted_together(tmp_path: Path) -> None:
    async with a_door(tmp_path, "files.test") as (door, _):
        for number in range(MAX_PLACES + 7):
            with pytest.raises(NotAllowed):
                door.admit(read_request(connect(f"x{number}.evil.test:443").encode()))
        assert len(door.uses) == MAX_PLACES + 1
        assert door.uses[Phase.AGENT, "other servers"].refused == 7


async def test_a_made_up_name_is_no_failure_of_the_network(tmp_path: Path) -> None:
    """A name that only a pattern allows never counts as broken. Otherwise an agent could veto its grade with a name
    that does not exist."""
    async with a_door(tmp_path, "*.test:80", "files.test:80") as (door, _):
        assert (await said(tmp_path, get("http://nothing.other.test/"))).startswith("HTTP/1.1 502")
        assert door.broken(Phase.AGENT) is None
        assert (await said(tmp_path, get("http://files.test/"))).startswith("HTTP/1.1 502")
        assert door.broken(Phase.AGENT) == "cannot reach files.test:80: Name or service not known"
        assert door.broken(Phase.VERIFIER) is None


async def test_another_sandbox_is_not_reached(tmp_path: Path) -> None:
    """Each door counts its own requests. No door leads to another door, because doors listen on Unix sockets, which
    have no network address."""
    async with a_server() as server:
        place = f"files.test:{server.port}"
        names = {"files.test": [["127.0.0.1"]]}
        mine = a_door(tmp_path, place, names=names, internal=[place], requests=2)
        other = a_door(tmp_path, "else.test", name="other")
        async with mine as (one, _), other as (two, _):
            assert (await said(tmp_path, get(f"http://{place}/"))).endswith("hi")
            assert (await said(tmp_path, get(f"http://{place}/"), name="other")).startswith("HTTP/1.1 403")
            # The endpoint's address leads to the sandbox's own model gateway, which does not run in this test.
            assert await said(tmp_path, connect("127.0.0.1:61080")) == ""
            assert (await said(tmp_path, connect("127.0.0.1:61081"))).startswith("HTTP/1.1 403")
            assert [use.requests for use in one.uses.values()] == [1, 0]
            assert [use.requests for use in two.uses.values()] == [0]


def test_clients_that_hang_up_leave_no_traceback(tmp_path: Path) -> None:
    """On uvloop, the service's event loop, clients hang up in the middle of a head, a body, a tunnel or a reply."""
    faults: list[str] = []

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" * 100_000)
            await writer.drain()

    async def hang_up(text: str, taken: int) -> None:
        reader, writer = await asyncio.open_unix_connection(tmp_path / "door")
        writer.write(text.encode())
        if taken:
            await reader.read(taken)
        writer.transport.abort()

    async def trial() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(str(context)))
        async with a_server(answer=flood) as server:
            place = f"files.test:{server.port}"
            names = {"files.test": [["127.0.0.1"]]}
            async with a_door(tmp_path, place, names=names, internal=[place]) as (door, _):
                url = f"http://{place}/"
                post = f"POST {url} HTTP/1.1\r\nContent-Length: 100\r\n\r\nhalf"
                texts = (
                    "",
                    "GET htt",
                    get(url),
                    connect(place),
                    connect(place) + "x\r\n\r\n",
                    post,
                    get("/s/KEY/v1/x"),
                )
                for text in texts:
                    for taken in (0, 10, 200_000):
                        async with asyncio.timeout(10):
                            await hang_up(text, taken if text.endswith("\r\n\r\n") else 0)
                await door.enter(None)

    uvloop.run(trial())
    assert faults == []


def open_sockets_to(port: int) -> int:
    """Return how many sockets that are connected to this port a process still holds."""
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return sum(int(line[2].rpartition(":")[2], 16) == port and line[9] != "0" for line in lines)


@pytest.mark.deep
@pytest.mark.parametrize("ending", ["phase", "reply"])
async def test_no_connection_stays_open_to_a_server_that_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Such a server never takes the last bytes of a request. They must not keep the connection open: a program in the
    sandbox and a server of its own could otherwise use up the descriptors of the node."""
    monkeypatch.setattr(proxy, "LATE_BODY_SECONDS", 0.2)
    size, begun, ended = 32 << 20, asyncio.Event(), asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # the transport of a socket has it
        if ending == "reply":
            writer.write(HELLO)
        begun.set()
        await ended.wait()

    async with a_server(answer=answer) as server, asyncio.timeout(60):
        place = f"files.test:{server.port}"
        door = a_door(tmp_path, place, names={"files.test": [["127.0.0.1"]]}, internal=[place])
        async with door as (opened, _):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "door")
            writer.write(f"POST http://{place}/ HTTP/1.1\r\nContent-Length: {size}\r\n\r\n".encode() + bytes(size))
            await begun.wait()
            assert open_sockets_to(server.port) == 1
            if ending == "phase":
                await asyncio.sleep(0.5)  # until the buffers of the connection are full
                await opened.enter(None)
            else:
                with suppress(ConnectionResetError):
                    await reader.read()
            await asyncio.sleep(0.1)
            assert open_sockets_to(server.port) == 0
            ended.set()
            writer.transport.abort()


@pytest.mark.parametrize("run", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
def test_a_connection_whose_last_bytes_are_taken_late_ends_without_an_error(run: Any) -> None:
    size, taken = 1 << 20, bytearray()

    async def trial() -> None:
        ours, theirs = socket.socketpair()
        _, writer = await asyncio.open_unix_connection(sock=ours)
        writer.write(bytes(size))
        with theirs:
            flushing = asyncio.create_task(flush(writer, seconds=30))
            await asyncio.sleep(0)
            while piece := await asyncio.to_thread(theirs.recv, 1 << 16):
                taken.extend(piece)
            await flushing
        abort(writer)

    run(trial())
    assert len(taken) == size


@pytest.mark.deep
async def test_clients_that_read_nothing_are_counted_until_their_connections_end(tmp_path: Path) -> None:
    """In a container, programs can connect to the door's socket directly. A client that does not read the last bytes
    of its reply must not hold a connection that no limit counts."""

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(bytes(250_000))  # the buffers of a Unix socket take 200 KiB
        await writer.drain()
        writer.close()

    gateway = await asyncio.start_unix_server(reply, tmp_path / "gateway")
    async with gateway, asyncio.timeout(60), a_door(tmp_path):
        before = len(os.listdir("/proc/self/fd"))
        clients = []
        for _ in range(MAX_CLIENTS + 20):
            client = socket.socket(socket.AF_UNIX)
            client.connect(str(tmp_path / "door"))
            client.send(b"GET /v1/models HTTP/1.1\r\n\r\n")
            client.shutdown(socket.SHUT_WR)
            clients.append(client)
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        held = len(os.listdir("/proc/self/fd")) - before - len(clients)
        for client in clients:
            client.close()
        assert 0 < held <= MAX_CLIENTS
