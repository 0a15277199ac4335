"""A tool server whose host is gone waits for the next one, and goes on for it with what was to outlive the first."""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import RuntimeFailure
from outrider.sandbox.runtimes.kernel.child import Child
from outrider.sandbox.runtimes.kernel.process_marks import started
from outrider.sandbox.runtimes.tool_server.bundle import compiled, delivery, server_command
from outrider.sandbox.runtimes.tool_server.client import Done, ExecDone, ShellOpened, ToolClient
from outrider.sandbox.runtimes.tool_server.launch import BRIDGE_PORT, ToolServerSetup, configure, connection
from outrider.sandbox.runtimes.tool_server.shared_folder import GATEWAY, MAX_STRANGERS, SOCKET, SharedFolder

SECRET = secrets.token_hex(8)


class Server:
    """A tool server that was told to wait for another host for so many seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shared = folder / "shared"
        self.gateway = folder / "gateway.sock"
        self.gateway.touch()
        self.child: Child
        self.tools: ToolClient

    async def start(self, seconds: float) -> None:
        with connection() as (ours, theirs):
            self.child = Child.spawn(server_command(sys.executable), {"PATH": os.defpath}, theirs)
        self.tools = ToolClient(ours, self.child.log_tail)
        await self.tools.open()
        self.tools.send_raw(delivery(await asyncio.to_thread(compiled, (), sys.executable, (1,))))
        await configure(self.tools, ToolServerSetup(env={"PATH": os.defpath}, workdir=str(self.folder), subreaper=True))
        args = {"path": str(self.shared / SOCKET), "secret": SECRET, "ms": round(seconds * 1000)}
        await self.tools.call("outlive", args, Done)

    def begin(self, script: str, name: str = "") -> asyncio.Task[ExecDone]:
        return asyncio.create_task(run(self.tools, script, name))

    async def lose_host(self) -> None:
        await self.tools.close()

    async def meet(self) -> ToolClient:
        self.tools = await SharedFolder(self.shared, self.gateway).meet(SECRET, self.runs)
        return self.tools

    async def runs(self) -> bool:
        return self.child.runs()

    async def until(self, file: str) -> None:
        while not (self.folder / file).exists():  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.01)


async def run(tools: ToolClient, script: str, name: str = "") -> ExecDone:
    args: dict[str, Any] = {"argv": [], "script": script, "merged": False, "env": {}, "cwd": "/", "stdin": b""}
    return await tools.call("exec", {**args, "name": name, "ms": 60_000, "cap": 1 << 16}, ExecDone)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    made = Server(tmp_path)
    await made.start(60)
    yield made
    await made.tools.close()
    made.child.kill()
    await made.child.end(5)


async def test_a_named_command_goes_on_for_the_next_host(server: Server) -> None:
    agent = server.begin(
        f"cd {server.folder}; touch begun; until [ -e go ]; do sleep 0.01; done; echo done; exit 3", "a"
    )
    other = server.begin(f"touch {server.folder}/other; sleep 60")
    await server.until("begun")
    await server.until("other")
    await server.lose_host()
    for lost in (agent, other):
        with pytest.raises(RuntimeFailure):
            await lost
    tools = await server.meet()
    listed = await run(tools, "ps -eo args | grep -c '[s]leep 60$' || true")
    assert listed.out == b"0\n", "what only the first host waited for has ended with it"
    (server.folder / "go").touch()
    done = await run(tools, "echo another", "a")
    assert (done.code, done.out) == (3, b"done\n")
    # It is known from now on.
    assert (await run(tools, "echo another", "a")).out == b"done\n"


async def test_what_has_ended_meanwhile_is_told(server: Server) -> None:
    agent = server.begin(f"echo told; touch {server.folder}/begun", "a")
    await server.until("begun")
    await server.lose_host()
    with suppress(RuntimeFailure):
        await agent
    assert (await run(await server.meet(), "false", "a")).out == b"told\n"


async def test_hosts_may_die_one_after_the_other(server: Server) -> None:
    numbers = []
    for _ in range(4):
        done = await run(server.tools, "echo $OUTRIDER_CALL")
        numbers.append(int(done.out.decode().rpartition(":")[2]))
        opened = await server.tools.call(
            "shell_open", {"kind": "bash", "cwd": "/", "program": "", "fallback": []}, ShellOpened
        )
        assert opened.shell is not None
        await server.lose_host()
        await server.meet()
    # A call of one host must never be taken for one of another.
    assert numbers == sorted(set(numbers))


async def test_a_restore_between_two_calls_ends_with_its_host(server: Server) -> None:
    left = traces(server.child.pid)
    args = {"key": 1, "roots": [[str(server.folder / "t"), "t"]], "limit": 1 << 20}
    await server.tools.call("restore", {**args, "data": b"x", "last": False}, Done)
    assert traces(server.child.pid) != left
    await server.lose_host()
    await server.meet()
    async with asyncio.timeout(30):
        while traces(server.child.pid) != left:  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.01)


def traces(pid: int) -> tuple[int, str]:
    """The number of a process's descriptors, and its children."""
    return len(os.listdir(f"/proc/{pid}/fd")), Path(f"/proc/{pid}/task/{pid}/children").read_text()


async def test_a_time_limit_runs_on_without_a_host(server: Server) -> None:
    args: dict[str, Any] = {"argv": [], "script": "sleep 60", "merged": False, "env": {}, "cwd": "/", "stdin": b""}
    begun = time.monotonic()
    agent = asyncio.create_task(server.tools.call("exec", {**args, "name": "a", "ms": 500, "cap": 1 << 16}, ExecDone))
    await run(server.tools, "true")
    await server.lose_host()
    with pytest.raises(RuntimeFailure):
        await agent
    done = await run(await server.meet(), "false", "a")
    assert done.timed_out
    assert time.monotonic() - begun < 30


async def test_nobody_comes(tmp_path: Path) -> None:
    server = Server(tmp_path)
    await server.start(0.3)
    agent = server.begin(f"cd {tmp_path}; echo $$ > pid; touch begun; exec sleep 60", "a")
    await server.until("begun")
    pid = (await asyncio.to_thread((tmp_path / "pid").read_text)).strip()
    await server.lose_host()
    with pytest.raises(RuntimeFailure):
        await agent
    assert await server.child.end(20)
    assert started(int(pid)) == ""


async def test_only_who_knows_the_secret_is_met(server: Server) -> None:
    await server.lose_host()
    os.kill(server.child.pid, signal.SIGSTOP)  # The impostors come first.
    meeting = asyncio.create_task(server.meet())
    while not (server.shared / SOCKET).exists():  # noqa: ASYNC110  # nothing tells of it
        await asyncio.sleep(0.001)
    wrong = b"\x93\x00\xa4here\x81\xa6secret\xa5wrong"
    for said in (b"", b"\0\0\0\1", b"\xff" * 5000, len(wrong).to_bytes(4, "big") + wrong):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as end:
            end.setblocking(False)
            end.connect(str(server.shared / SOCKET))
            end.send(said)
    os.kill(server.child.pid, signal.SIGCONT)
    assert (await run(await meeting, "echo here")).out == b"here\n"
    assert not (server.shared / SOCKET).exists()


async def test_silent_connections_do_not_keep_the_server_out(server: Server) -> None:
    await server.lose_host()
    os.kill(server.child.pid, signal.SIGSTOP)  # The impostors come first.
    meeting = asyncio.create_task(server.meet())
    while not (server.shared / SOCKET).exists():  # noqa: ASYNC110  # nothing tells of it
        await asyncio.sleep(0.001)
    with ExitStack() as silent:
        for _ in range(2 * MAX_STRANGERS):
            end = silent.enter_context(socket.socket(socket.AF_UNIX))
            end.setblocking(False)
            while not meeting.done():
                with suppress(BlockingIOError):  # the queue is full
                    end.connect(str(server.shared / SOCKET))
                    break
                await asyncio.sleep(0.001)
        os.kill(server.child.pid, signal.SIGCONT)
        assert (await run(await meeting, "echo here")).out == b"here\n"


def asleep(pid: int) -> bool:
    """Whether a process sleeps without a connection, or has ended."""
    try:
        open_on = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return started(pid) == ""
    return state in "SZ" and not any(one.startswith("socket:") for one in open_on)


async def test_a_server_without_descriptors_looks_for_a_host_until_it_has_one(server: Server) -> None:
    pid = server.child.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
    await server.lose_host()
    while not asleep(pid):  # noqa: ASYNC110  # nothing tells of it
        await asyncio.sleep(0.01)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    assert (await run(await server.meet(), "echo here")).out == b"here\n"


async def test_a_sandbox_that_is_gone_is_not_waited_for(server: Server) -> None:
    await server.lose_host()
    os.kill(server.child.pid, signal.SIGKILL)
    with pytest.raises(RuntimeFailure, match="ended before"):
        await server.meet()


async def test_a_client_waits_for_the_next_gateway(tmp_path: Path) -> None:
    """As long as the sandbox may wait for its next host; another one is refused at once."""
    server = Server(tmp_path)
    with connection() as (ours, theirs):
        server.child = Child.spawn(server_command(sys.executable), {"PATH": os.defpath}, theirs)
    server.tools = tools = ToolClient(ours, server.child.log_tail)
    await tools.open()
    tools.send_raw(delivery(await asyncio.to_thread(compiled, (), sys.executable, (1,))))
    socket_of_gateway = str(server.shared / GATEWAY)
    await configure(
        tools,
        ToolServerSetup(
            env={"PATH": os.defpath},
            workdir=str(tmp_path),
            subreaper=True,
            bridge_port=BRIDGE_PORT + 1,
            bridge_socket=socket_of_gateway,
        ),
    )

    async def ask() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", BRIDGE_PORT + 1)
        try:
            return await reader.read(100)
        except ConnectionError:
            return b""
        finally:
            writer.close()

    assert await ask() == b""
    args = {"path": str(server.shared / SOCKET), "secret": SECRET, "ms": 60_000}
    await tools.call("outlive", args, Done)
    asked = asyncio.create_task(ask())
    await run(tools, "true")
    server.shared.mkdir()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    async with await asyncio.start_unix_server(answer, socket_of_gateway):
        assert await asked == b"hello"
    await tools.close()
    await server.child.end(5)
