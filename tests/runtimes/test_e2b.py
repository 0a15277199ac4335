"""The runtime `e2b` against a server of the E2B API: lost replies, faults, orphans, and the way to the model."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from aiohttp import web

from outrider.concurrency.chores import Chores, Failures
from outrider.errors import RuntimeFailure, RuntimeUnavailable
from outrider.lab.fakes.e2b_server.app import FakeE2B, Fault
from outrider.sandbox.runtimes.base import Runtime
from outrider.sandbox.runtimes.e2b.api import E2BApi, E2BError, E2BSettings
from outrider.sandbox.runtimes.e2b.envd import Envd, ProcessSocket
from outrider.sandbox.runtimes.e2b.runtime import E2BRuntime
from outrider.sandbox.runtimes.e2b.service import E2BService, Start
from outrider.sandbox.runtimes.guest.tunnel import OPENED
from outrider.sandbox.runtimes.node_host import Host
from outrider.sandbox.runtimes.remote import (
    NODE_LABEL,
    SESSION_LABEL,
    QueueClock,
    RemoteSandbox,
    StartQueue,
    gateway_tunnel,
    is_orphan,
    node_label,
)
from outrider.sandbox.runtimes.tool_server.client import ToolClient
from support.e2b import e2b, variables

from .world import World

pytestmark = pytest.mark.deep  # a test starts servers and many processes

Reply = Callable[[], Awaitable[web.StreamResponse]]


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeE2B]:
    async with e2b(monkeypatch) as running:
        yield running


def new(world: World, **fields: object) -> RemoteSandbox:
    sandbox = world.create_with(E2BRuntime, kind="e2b", **fields)
    assert isinstance(sandbox, RemoteSandbox)
    return sandbox


async def begun(world: World, **fields: object) -> RemoteSandbox:
    sandbox = new(world, **fields)
    await sandbox.start()
    return sandbox


async def said(sandbox: Runtime, program: str) -> str:
    done = await sandbox.exec(["python3", "-c", program], seconds=30)
    assert (done.exit_code, done.stderr) == (0, b"")
    return done.stdout.decode()


def refused(
    status: int, message: str = "not now", **headers: str
) -> Callable[[web.Request, Reply], Awaitable[web.StreamResponse]]:
    async def fault(request: web.Request, reply: Reply) -> web.StreamResponse:
        return web.json_response({"code": status, "message": message}, status=status, headers=headers)

    return fault


async def lost(request: web.Request, reply: Reply) -> web.StreamResponse:
    """Carry out the call, and lose its reply."""
    await reply()
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def hanging(request: web.Request, reply: Reply) -> web.StreamResponse:
    await asyncio.sleep(3600)
    return web.Response()


async def dripping(request: web.Request, reply: Reply) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    while True:
        await answer.write(b" ")
        await asyncio.sleep(0.05)


async def test_a_sandbox_is_labelled_without_internet_and_deleted_once(server: FakeE2B, world: World) -> None:
    sandbox = await begun(world)
    (made,) = server.sandboxes.values()
    assert made.metadata[SESSION_LABEL] == "s0"
    assert world.host.name in made.metadata[NODE_LABEL]
    assert not made.internet
    await sandbox.stop()
    await sandbox.stop()
    assert server.sandboxes == {}
    assert server.requests.count("DELETE /sandboxes/ID") == 2  # the second call finds no sandbox


async def test_a_lost_reply_leaves_no_second_sandbox(server: FakeE2B, world: World) -> None:
    server.faults["POST /sandboxes"].append(lost)
    sandbox = await begun(world)
    assert server.made == 2
    assert len(server.sandboxes) == 1
    assert await said(sandbox, "print(1)") == "1\n"
    await sandbox.stop()
    assert server.sandboxes == {}


async def test_a_lost_reply_to_a_deletion_is_no_failure(server: FakeE2B, world: World) -> None:
    sandbox = await begun(world)
    server.faults["DELETE /sandboxes/ID"].append(lost)
    await sandbox.stop()
    assert server.sandboxes == {}


async def test_a_service_that_fails_is_an_error_that_is_worth_another_attempt(server: FakeE2B, world: World) -> None:
    server.faults["POST /sandboxes"].extend([refused(500), refused(502), refused(503)])
    with pytest.raises(RuntimeFailure, match="create a sandbox: status 503: not now") as raised:
        await begun(world)
    assert raised.value.retryable
    assert server.sandboxes == {}


async def test_a_failure_or_two_is_passed_over(server: FakeE2B, world: World) -> None:
    server.faults["POST /sandboxes"].extend([refused(500), refused(503)])
    await begun(world)
    assert server.made == 1


@pytest.mark.parametrize("fault", [hanging, dripping])
async def test_a_call_without_a_whole_reply_ends(
    server: FakeE2B, fault: Callable[[web.Request, Reply], Awaitable[web.StreamResponse]]
) -> None:
    api = E2BApi(E2BSettings.read(), seconds=0.5)
    server.faults["GET /v2/sandboxes"].append(fault)
    began = time.monotonic()
    with pytest.raises(E2BError) as raised:
        await api.labelled(NODE_LABEL)
    assert raised.value.status == 0
    assert time.monotonic() - began < 5
    await api.close()


async def test_a_creation_that_hangs_leaves_nothing(server: FakeE2B, world: World) -> None:
    async with E2BService(world.host, call_seconds=2.0) as service:
        server.faults["POST /sandboxes"].extend([lost, hanging, hanging])
        start = Start()
        with pytest.raises(RuntimeFailure, match="no reply in time"):
            await service.create(start, "base", {}, QueueClock())
        await service.remove(start)
        assert server.sandboxes == {}
        assert server.made == 1


async def test_a_full_service_is_waited_for_off_the_clock(server: FakeE2B, world: World) -> None:
    server.faults["POST /sandboxes"].extend([refused(429, **{"Retry-After": "1"})] * 2)
    sandbox = await begun(world)
    assert 1.9 < sandbox.queued_seconds() < 20
    before = sandbox.queued_seconds()
    await sandbox.exec("true", seconds=10)
    assert sandbox.queued_seconds() == before


async def test_what_the_service_refuses_is_refused_by_name(
    server: FakeE2B, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RuntimeUnavailable, match="template 'none'") as raised:
        await begun(world, image="none")
    assert raised.value.field == "task.runtime.image"
    server.key = "another"
    caplog.clear()
    with pytest.raises(RuntimeUnavailable, match="refuses the key") as raised:
        await begun(world)
    assert FakeE2B.key not in f"{raised.value} {raised.value.hint} {raised.value.log_tail}"
    assert "refuses the key" in (await asyncio.to_thread(E2BRuntime.available)).detail
    monkeypatch.delenv("E2B_API_KEY")
    assert E2BRuntime.available().detail == "E2B_API_KEY is not set"
    server.key = FakeE2B.key
    assert caplog.messages == []


async def test_a_probe_of_the_service(server: FakeE2B, monkeypatch: pytest.MonkeyPatch) -> None:
    can = await asyncio.to_thread(E2BRuntime.available)
    assert can.ok
    assert server.url in can.detail
    monkeypatch.setenv("E2B_API_URL", "http://127.0.0.1:1")
    assert not E2BRuntime.available().ok
    monkeypatch.setenv("E2B_API_URL", "ftp://host")
    assert E2BRuntime.available().detail == "E2B_API_URL is not an http address"


@pytest.mark.parametrize(("name", "much"), [("cpus", 4000.0), ("memory_mb", 1 << 24)])
async def test_a_template_that_is_too_small_is_refused(server: FakeE2B, world: World, name: str, much: float) -> None:
    with pytest.raises(RuntimeUnavailable, match="less than the task asks for") as raised:
        await begun(world, resources={name: much})
    assert raised.value.field == f"task.runtime.resources.{name}"
    assert server.sandboxes == {}


async def test_memory_is_counted_in_the_sandbox(server: FakeE2B, world: World) -> None:
    sandbox = await begun(world, resources={"cpus": 1, "memory_mb": 200})
    done = await sandbox.exec(["python3", "-c", "import time; b = b'x' * (500 << 20); time.sleep(20)"], seconds=30)
    assert done.exit_code == 128 + signal.SIGKILL
    assert (await sandbox.exec("echo fine", seconds=10)).stdout == b"fine\n"


async def test_a_sandbox_that_the_service_ends_is_nobodys_fault_inside(server: FakeE2B, world: World) -> None:
    sandbox = await begun(world)
    running = asyncio.create_task(sandbox.exec("sleep 60", seconds=60))
    await sandbox.exec("true", seconds=10)
    for id in list(server.sandboxes):
        await server.end(id)
    with pytest.raises(RuntimeFailure) as raised:
        await running
    assert raised.value.retryable
    assert not await sandbox.broken_inside()


async def test_a_program_that_kills_the_tool_server_is_the_cause(server: FakeE2B, world: World) -> None:
    sandbox = await begun(world)
    with pytest.raises(RuntimeFailure):
        await sandbox.exec("kill -9 $PPID; sleep 60", seconds=60)
    assert await sandbox.broken_inside()


async def test_a_template_without_python_is_refused(server: FakeE2B, world: World) -> None:
    async def without(request: web.Request, reply: Reply) -> web.StreamResponse:
        (made,) = server.sandboxes.values()
        await (await made.machine.run(["sh", "-c", "mount -t tmpfs none /usr/bin"], {}, "/")).wait()
        return await reply()

    server.faults["POST /process.Process/Start"].append(without)
    with pytest.raises(RuntimeUnavailable, match="no usable Python"):
        await begun(world)
    assert server.sandboxes == {}


async def test_all_pages_of_the_list_are_read(server: FakeE2B, world: World) -> None:
    server.page = 2
    service = await world.host.part(E2BService)
    api = service.api
    made = {(await api.create("base", {NODE_LABEL: service.node}, seconds=60, key=str(n))).sandbox_id for n in range(5)}
    server.requests.clear()
    assert {one.id for one in await api.labelled(NODE_LABEL)} == made
    assert server.requests == ["GET /v2/sandboxes"] * 3
    assert await service.sweep() == 5  # no sandbox of this host uses them
    assert server.sandboxes == {}


async def test_a_list_without_an_end_is_given_up(server: FakeE2B) -> None:
    async def again(request: web.Request, reply: Reply) -> web.StreamResponse:
        return web.json_response([], headers={"x-next-token": "again"})

    api = E2BApi(E2BSettings.read(), max_pages=3)
    server.faults["GET /v2/sandboxes"].extend([again] * 3)
    with pytest.raises(E2BError, match="more than 3 pages"):
        await api.labelled(NODE_LABEL)
    await api.close()


async def test_a_sandbox_that_cannot_be_removed_keeps_no_other(server: FakeE2B, world: World) -> None:
    service = await world.host.part(E2BService)
    for key in "ab":
        await service.api.create("base", {NODE_LABEL: service.node}, seconds=60, key=key)
    server.faults["DELETE /sandboxes/ID"].append(refused(500))
    with pytest.raises(RuntimeFailure, match="remove a sandbox: status 500"):
        await service.sweep()
    assert len(server.sandboxes) == 1
    assert await service.sweep() == 1


async def test_removals_without_a_reply_wait_side_by_side(server: FakeE2B, world: World) -> None:
    async with E2BService(world.host, call_seconds=2.0) as service:
        for key in "abcdefgh":
            await service.api.create("base", {NODE_LABEL: service.node}, seconds=60, key=key)
        server.faults["DELETE /sandboxes/ID"].extend([hanging] * 8)
        began = time.monotonic()
        with pytest.raises(RuntimeFailure, match="remove a sandbox: no reply in time"):
            await service.sweep()
        assert time.monotonic() - began < 10
    assert server.sandboxes == {}


@pytest.mark.parametrize("path", ["POST /process.Process/Start", "POST /process.Process/SendInput"])
async def test_a_busy_envd_is_asked_again(server: FakeE2B, world: World, path: str) -> None:
    """The status 429 means that the call was not carried out, so no byte is missing or written twice."""
    server.faults[path].extend([refused(429, **{"Retry-After": "0"})] * 3)
    sandbox = await begun(world)
    assert server.faults[path] == deque()
    text = "x" * 3_000_000
    await sandbox.write("/tmp/big", text.encode())
    assert await said(sandbox, "print(len(open('/tmp/big').read()))") == "3000000\n"


def html(status: int) -> Callable[[web.Request, Reply], Awaitable[web.StreamResponse]]:
    async def fault(request: web.Request, reply: Reply) -> web.StreamResponse:
        return web.Response(status=status, text="<html>bad gateway</html>", content_type="text/html")

    return fault


def port_closed(request: web.Request, reply: Reply) -> Awaitable[web.StreamResponse]:
    return refused(502, message="The sandbox is running but port is not open")(request, reply)


@pytest.mark.parametrize(
    ("health", "inside"), [([html(502)] * 2, False), ([port_closed, html(502)], False), ([port_closed] * 2, True)]
)
async def test_a_bad_gateway_is_not_the_agents_fault(
    server: FakeE2B, world: World, health: list[Fault], inside: bool
) -> None:
    streams: list[web.Request] = []

    async def seen(request: web.Request, reply: Reply) -> web.StreamResponse:
        streams.append(request)
        return await reply()

    server.faults["POST /process.Process/Start"].append(seen)
    sandbox = await begun(world)
    running = asyncio.create_task(sandbox.exec("sleep 60", seconds=60))
    await sandbox.exec("true", seconds=10)
    server.faults["GET /health"].extend(health)
    [stream] = streams
    assert stream.transport is not None
    stream.transport.abort()
    with pytest.raises(RuntimeFailure) as failed:
        await running
    assert failed.value.retryable
    assert await sandbox.broken_inside() is inside


async def test_a_sandbox_whose_end_is_reported_late_is_not_the_agents_fault(server: FakeE2B, world: World) -> None:
    sandbox = await begun(world)
    with pytest.raises(RuntimeFailure):
        await sandbox.exec("kill -9 $PPID; sleep 60", seconds=60)
    asked = asyncio.create_task(sandbox.broken_inside())
    await asyncio.sleep(0.5)
    assert not asked.done()
    for id in list(server.sandboxes):
        await server.end(id)
    assert not await asked


@pytest.mark.parametrize("path", ["POST /process.Process/Start", "POST /process.Process/SendInput"])
async def test_an_envd_that_fails_is_no_sandbox(server: FakeE2B, world: World, path: str) -> None:
    server.faults[path].append(refused(500))
    with pytest.raises(RuntimeFailure) as raised:
        await begun(world)
    assert raised.value.retryable
    assert server.sandboxes == {}


DEEP = b'{"x":' + b"[" * 100_000


async def test_lists_within_each_other_are_an_unreadable_reply(server: FakeE2B, world: World) -> None:
    """An agent is root in its sandbox, and may have put another program in the place of `envd`."""

    async def deep(request: web.Request, reply: Reply) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response(status=502, body=DEEP)
        if request.method == "GET":
            return web.Response(body=DEEP)
        return web.Response(body=b"\0" + len(DEEP).to_bytes(4, "big") + DEEP)

    api = E2BApi(E2BSettings.read())
    envd = Envd(api, await api.create("base", {}, seconds=60, key="deep"))
    server.faults["GET /health"].append(deep)
    assert not await envd.is_closed()
    server.faults["POST /process.Process/Start"].append(deep)
    process = ProcessSocket(envd)
    await process.run(["true"], {})
    assert "recursion" in process.log_tail()
    process.end.close()
    server.faults["GET /v2/sandboxes"].append(deep)
    with pytest.raises(E2BError):
        await api.labelled(NODE_LABEL)
    await api.close()


ECHO = (
    "import http.client, sys, threading\n"
    "data = bytes(range(256)) * 2048\n"
    "def ask(n):\n"
    "    c = http.client.HTTPConnection('127.0.0.1', 61080)\n"
    "    for _ in range(3):\n"
    "        c.request('POST', f'/{n}', data + b'%d' % n)\n"
    "        assert c.getresponse().read() == data + b'%d' % n\n"
    "threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]\n"
    "[t.start() for t in threads]; [t.join() for t in threads]\n"
    "print('same')\n"
)


async def echo(request: web.Request) -> web.Response:
    return web.Response(body=await request.read())


async def test_the_model_gateway_is_reached_without_a_network(server: FakeE2B, world: World) -> None:
    async with world.gateway(echo):
        sandbox = await begun(world)
        assert sandbox.endpoint == "http://127.0.0.1:61080"
        assert await said(sandbox, ECHO.replace("2048", "16")) == "same\n"
        # The connection serves other calls at the same time.
        both = await asyncio.gather(said(sandbox, ECHO), sandbox.exec("echo hi", seconds=20))
        assert both[0] == "same\n"
        assert both[1].stdout == b"hi\n"


async def test_a_reply_streams_and_a_disconnect_arrives(server: FakeE2B, world: World) -> None:
    left = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(b"tick\n")
                await asyncio.sleep(0.05)
        finally:
            left.set()

    program = (
        "import http.client; c = http.client.HTTPConnection('127.0.0.1', 61080); c.request('GET', '/')\n"
        "print(c.getresponse().readline())"
    )
    async with world.gateway(stream):
        sandbox = await begun(world)
        assert await said(sandbox, program) == "b'tick\\n'\n"
        async with asyncio.timeout(30):
            await left.wait()


async def test_clients_beyond_the_bound_are_closed_and_the_rest_is_served(server: FakeE2B, world: World) -> None:
    program = (
        "import socket, time, urllib.request\n"
        "many = [socket.create_connection(('127.0.0.1', 61080)) for _ in range(400)]\n"
        "[s.close() for s in many]\n"
        "for _ in range(200):\n"
        "    try:\n"
        "        print(urllib.request.urlopen('http://127.0.0.1:61080/', b'x', timeout=20).read())\n"
        "        break\n"
        "    except OSError:\n"
        "        time.sleep(0.1)  # until the tunnel has seen that the many are closed\n"
    )
    async with world.gateway(echo):
        sandbox = await begun(world)
        assert await said(sandbox, program) == "b'x'\n"


async def test_a_sandbox_that_opens_clients_without_end_is_dropped(world: World) -> None:
    """The agent's own tool server announces clients without end, and does not read the replies."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    tools = ToolClient(ours, lambda: "")
    await tools.open()
    loop = asyncio.get_running_loop()

    async def flood() -> None:
        for first in itertools.count(1, 5000):
            frames = bytearray()
            for number in range(first, first + 5000):
                part = msgspec.msgpack.encode([1, "part", {"data": bytes((OPENED,)) + number.to_bytes(4, "big")}])
                frames += len(part).to_bytes(4, "big") + part
            await loop.sock_sendall(theirs, frames)

    ready = msgspec.msgpack.encode([1, "part", {"data": bytes(5)}])
    await loop.sock_sendall(theirs, len(ready).to_bytes(4, "big") + ready)
    world.socket.unlink()  # no client reaches a gateway, so each client is dropped again
    with theirs:
        async with Chores(Failures()) as chores, gateway_tunnel(tools, world.socket, chores, seconds=60):
            with pytest.raises(ConnectionError):
                async with asyncio.timeout(120):
                    await flood()
        assert tools.loss == "wrong"
        await tools.close()


async def test_without_a_gateway_a_client_is_refused_quickly(server: FakeE2B, world: World) -> None:
    sandbox = await begun(world)
    program = "import urllib.request, sys; urllib.request.urlopen('http://127.0.0.1:61080/', timeout=5)"
    done = await sandbox.exec(["python3", "-c", program], seconds=10)
    assert (done.exit_code, done.timed_out) == (1, False)


async def test_programs_of_the_harness_are_copied_unless_they_are_there(
    server: FakeE2B, world: World, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/tool").write_text("#!/bin/sh\necho copied\n")
    (tmp_path / "bin/tool").chmod(0o755)
    (tmp_path / "link").symlink_to("bin/tool")
    sandbox = await begun(world, mounts=(tmp_path, Path("/usr/bin")))
    assert (await sandbox.exec([str(tmp_path / "link")], seconds=10)).stdout == b"copied\n"
    assert (await sandbox.exec("ls -A /tmp | grep outrider", seconds=10)).stdout == b""
    assert [path.name for path in world.host.folder.glob("programs-*")] == ["programs-0.tgz"]


async def test_an_envd_that_takes_no_program_fails_the_start(
    server: FakeE2B, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.sandbox.runtimes.e2b.envd.CALL_SECONDS", 1.0)
    (tmp_path / "tool").write_bytes(os.urandom(16 << 20))  # more than the buffers of a connection hold
    server.faults["POST /files"].append(hanging)
    async with asyncio.timeout(60):
        with pytest.raises(RuntimeFailure, match="into a sandbox: no reply in time") as raised:
            await begun(world, mounts=(tmp_path,))
    assert raised.value.retryable
    assert server.sandboxes == {}


async def test_a_slow_copy_may_take_long(server: FakeE2B, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.sandbox.runtimes.e2b.envd.CALL_SECONDS", 4.0)
    api = E2BApi(E2BSettings.read())

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(5):
            await asyncio.sleep(1.0)
            yield b"x"

    made = await api.create("base", {}, seconds=60, key="slow")
    await Envd(api, made).upload("/tmp/slow", pieces())
    await api.close()


ON_UVLOOP = """
import asyncio, contextlib, uvloop
from outrider.sandbox import open_sandbox
from outrider.spec import RuntimeSpec

@contextlib.asynccontextmanager
async def gateway(path):
    async def reply(reader, writer):
        await reader.readuntil(b"\\r\\n\\r\\n")
        writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\nConnection: close\\r\\n\\r\\nhi")
        await writer.drain()
        writer.close()
    async with await asyncio.start_unix_server(reply, path):
        yield

async def main():
    ask = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:61080/', timeout=20).read())"
    async with open_sandbox(RuntimeSpec(kind="e2b"), gateway=gateway) as sandbox:
        print((await sandbox.exec(["python3", "-c", ask], seconds=30)).stdout)

uvloop.run(main())
"""


async def test_a_sandbox_on_the_loop_of_the_service(server: FakeE2B) -> None:
    node = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ON_UVLOOP, stdout=subprocess.PIPE, env={**os.environ, **variables(server.url)}
    )
    out, _ = await node.communicate()
    assert out.decode() == """b"b'hi'\\n"\n"""


KILLED = """
import asyncio, sys
from outrider.sandbox import open_sandbox
from outrider.spec import RuntimeSpec

async def main():
    async with open_sandbox(RuntimeSpec(kind="e2b")) as sandbox:
        print("runs", flush=True)
        await sandbox.exec("sleep 600", seconds=600)

asyncio.run(main())
"""


async def test_sandboxes_of_a_killed_node_are_removed_by_the_next(server: FakeE2B, world: World) -> None:
    own = await begun(world)
    (kept,) = server.sandboxes
    node = await asyncio.create_subprocess_exec(
        sys.executable, "-c", KILLED, stdout=subprocess.PIPE, env={**os.environ, **variables(server.url)}
    )
    assert node.stdout is not None
    assert await node.stdout.readline() == b"runs\n"
    service = await world.host.part(E2BService)
    assert await service.sweep() == 0  # the other node lives
    assert len(server.sandboxes) == 2
    node.send_signal(signal.SIGKILL)
    await node.wait()
    assert await service.sweep() == 1
    assert list(server.sandboxes) == [kept]
    assert await said(own, "print(2)") == "2\n"


async def test_only_what_is_certainly_dead_is_an_orphan(world: World) -> None:
    label = node_label(world.host)
    assert len(label) <= 63
    machine, _, name = label.partition("-")
    prefix, namespace, _, since, end = name.split("-")
    dead = f"{prefix}-{namespace}-4194305-{since}-{end}"
    assert not is_orphan(label)
    assert is_orphan(f"{machine}-{dead}")
    assert not is_orphan(f"00000000-{dead}")  # a node of another machine
    assert not is_orphan(f"{machine}-{prefix}-1-4194305-{since}-{end}")  # a node in another pid namespace
    assert not is_orphan("a word")


async def test_a_sandbox_ends_by_itself_without_its_node(server: FakeE2B) -> None:
    api = E2BApi(E2BSettings.read())
    made = await api.create("base", {}, seconds=2, key="once")
    again = await api.create("base", {}, seconds=2, key="once")
    assert again.sandbox_id == made.sandbox_id
    await api.extend(made.sandbox_id, 1)
    assert await api.exists(made.sandbox_id)
    async with asyncio.timeout(20):
        while await api.exists(made.sandbox_id):  # noqa: ASYNC110  # the server's clock decides
            await asyncio.sleep(0.1)
    await api.close()


async def test_starts_are_spaced_and_a_cancelled_wait_takes_no_turn() -> None:
    queue = StartQueue(10)
    await queue.turn()
    cancelled = [asyncio.create_task(queue.turn()) for _ in range(50)]
    await asyncio.sleep(0)
    for task in cancelled:
        task.cancel()
    began = time.monotonic()
    for _ in range(4):
        await queue.turn()
    assert 0.35 < time.monotonic() - began < 3


async def test_a_host_takes_its_pace_from_the_settings(folder: Path, server: FakeE2B) -> None:
    async with Host(folder, starts_per_second=4) as host:
        world = World(host)
        world.socket.touch()
        began = time.monotonic()
        sandboxes = [new(world) for _ in range(4)]
        await asyncio.gather(*(sandbox.start() for sandbox in sandboxes))
        assert time.monotonic() - began > 0.7
        await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))
    assert server.sandboxes == {}


def sdk_python() -> str:
    """Return an interpreter that has E2B's own SDK."""
    named = os.environ.get("E2B_SDK_PYTHON")
    if named is None and importlib.util.find_spec("e2b") is None:
        pytest.skip("the package e2b is not installed, and E2B_SDK_PYTHON names no interpreter that has it")
    return named or sys.executable


async def test_the_real_sdk_works_against_the_server(server: FakeE2B) -> None:
    """E2B's SDK shows that the server's protocol is E2B's own, and not only what this runtime expects."""
    script = Path(__file__).with_name("e2b_sdk_session.py")
    env = {"PATH": os.environ["PATH"], "E2B_HTTP_VERSION": "1.1", **variables(server.url)}
    process = await asyncio.create_subprocess_exec(
        sdk_python(), str(script), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    )
    out, complaint = await process.communicate()
    assert (process.returncode, out) == (0, b"all as expected\n"), complaint.decode()
    assert server.sandboxes == {}


async def test_a_service_that_is_slow_to_remove_a_sandbox_is_not_hammered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It confirms each request to remove the sandbox, but still has the sandbox."""
    monkeypatch.setattr("outrider.sandbox.runtimes.e2b.service.REMOVE_SECONDS", 1.5)
    asked = 0

    async def delete(sandbox: str) -> bool:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.01)
        return True

    async with Host(folder) as host:
        part = E2BService(host)
        part.api = cast(E2BApi, SimpleNamespace(delete=delete))
        start = Start()
        start.sandbox = "x"
        with pytest.raises(RuntimeFailure, match="did not remove sandbox x"):
            await part.remove(start)
    assert asked < 20  # the pauses are random; without pauses, there are more than a hundred requests
