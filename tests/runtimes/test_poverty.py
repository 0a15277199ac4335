"""Programs of a sandbox use up resources that its tool server needs. The failure is reported, and no result is silently
wrong."""

from __future__ import annotations

import asyncio
import errno
import io
import itertools
import os
import resource
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from outrider.errors import RuntimeFailure
from outrider.sandbox.runtimes.base import ExecResult, Runtime, Shell
from outrider.sandbox.runtimes.guest.bridge import MAX_PAIRS
from outrider.sandbox.runtimes.guest.filesystem.trees import Packer
from outrider.sandbox.runtimes.kernel import cgroups
from outrider.sandbox.runtimes.limits import open_files
from outrider.sandbox.runtimes.tool_server.sandbox import ToolServerSandbox

from .test_contract import LANDLOCK
from .test_leaks import at_most, first_process
from .world import World, snapshot

LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))"
"""Without this, a program has its tool server's limit."""
CALL = """
import socket, time
def connect():
    client = socket.create_connection(('127.0.0.1', {port}))
    client.settimeout(5)
    return client
def ends(client):
    try:
        client.sendall(b'GET /x HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n')
        return not client.recv(4096)
    except ConnectionError:
        return True
clients = [connect() for _ in range({number})]
ended = sum(map(ends, clients))
for client in clients: client.close()
"""
ESTABLISHED, CLOSE_WAIT = "01", "08"
FLOOD = """
import array, os, socket
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [os.open('/dev/null', os.O_RDONLY)] * 253))]
sent = []
try:
    while len(sent) < 1000:
        pair = socket.socketpair()
        pair[0].setblocking(False)
        sent.append(pair)
        try:
            for _ in range(100): pair[0].sendmsg([b'x'], rights)
        except BlockingIOError:
            pass
except OSError as error:
    print(error.errno, flush=True)
os.write(1, b'full\\n')
os.read(0, 1)
"""


RESTART = {
    "python": "import os; os.write(4, b'\\xff' * 100)",
    "bash": "trap '' INT; while :; do sleep 0.1; done",
}
"""Inputs after which the shell is killed and started again."""


def impoverish(number: int) -> None:
    """Set the limit of open files of the only sandbox's tool server."""
    hard = resource.prlimit(first_process(), resource.RLIMIT_NOFILE)[1]
    resource.prlimit(first_process(), resource.RLIMIT_NOFILE, (number, hard))


async def until_closed(sandbox: Runtime) -> None:
    """Raise the tool server's limit of open files, and wait until the tool server has also ended the connections that a
    program has left."""
    impoverish(1000)
    for _ in range(1000):
        told = (await sandbox.exec("cat /proc/net/tcp", seconds=10)).stdout.decode()
        states = [line.split()[3] for line in told.splitlines()[1:]]
        if not {ESTABLISHED, CLOSE_WAIT} & set(states):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(states)


async def python(sandbox: Runtime, program: str) -> ExecResult:
    return await sandbox.exec(["python3", "-c", program], seconds=30)


async def test_a_snapshot_for_want_of_descriptors_fails(world: World) -> None:
    """The snapshot is complete or fails, however many descriptors are missing."""
    sandbox = await world.start("namespace")
    await sandbox.exec("mkdir -p t/a/b; echo x | tee t/1 t/a/2 > t/a/b/3", seconds=20)
    failed = 0
    for number in range(30, 3, -1):
        impoverish(number)
        try:
            data = await snapshot(sandbox, world.folder, "t")
        except RuntimeFailure:
            failed += 1
            assert not (world.folder / "snapshot").exists()
            continue
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            assert archive.getnames() == [f"work/t{end}" for end in ("", "/1", "/a", "/a/2", "/a/b", "/a/b/3")], number
    assert failed


def descriptors() -> set[int]:
    """Return the open descriptors of the only sandbox's tool server."""
    if os.geteuid():
        pytest.skip("only root can list the descriptors of a process that is not dumpable")
    return set(map(int, os.listdir(f"/proc/{first_process()}/fd")))


def leave(number: int) -> None:
    """Let the tool server of the only sandbox open only `number` more descriptors."""
    free = itertools.filterfalse(descriptors().__contains__, itertools.count())
    impoverish(next(itertools.islice(free, number, None)))


async def failed_restart(sandbox: Runtime, shell: Shell, kind: str) -> bool:
    """Run an input after which the shell is started again. If the new start fails, the shell is dead and its result
    says so. The sandbox works in any case. Returns whether the new start failed."""
    output = (await shell.run(RESTART[kind], seconds=0.1 if kind == "bash" else 30)).output
    impoverish(1000)
    failed = "could not be started anew: " in output
    if failed:
        with pytest.raises(RuntimeFailure, match="the shell is gone"):
            await shell.run("1", seconds=10)
    else:
        assert "started anew: its state is lost" in output
        await shell.close()
    assert (await sandbox.exec("echo fine", seconds=30)).stdout == b"fine\n"
    return failed


@pytest.mark.deep
@pytest.mark.parametrize(("kind", "numbers"), [("python", range(8)), ("bash", (0, 1))])
async def test_a_shell_that_cannot_be_started_anew_for_want_of_descriptors(
    world: World, kind: Literal["bash", "python"], numbers: Sequence[int]
) -> None:
    sandbox = await world.start("namespace")
    await sandbox.exec("true", seconds=30)
    used = descriptors()
    outcomes = set()
    for number in numbers:
        shell = await sandbox.open_shell(kind)
        leave(number)
        outcomes.add(await failed_restart(sandbox, shell, kind))
        assert descriptors() == used
    assert outcomes == ({True, False} if kind == "python" else {True})


async def test_a_shell_that_cannot_be_started_anew_for_want_of_processes(world: World) -> None:
    if "pids" not in cgroups.find().folders:
        pytest.skip("this process can set no pids limits by control groups")
    sandbox = await world.start("namespace")
    assert isinstance(sandbox, ToolServerSandbox)
    assert sandbox.server.group is not None
    (limit,) = (folder / "pids.max" for folder in sandbox.server.group.folders if (folder / "pids.max").exists())
    most, used = limit.read_text(), descriptors()
    shell = await sandbox.open_shell("python")
    limit.write_text("1")
    output = (await shell.run(RESTART["python"], seconds=30)).output
    for start in (sandbox.exec("true", seconds=10), sandbox.glob("*"), sandbox.open_shell()):
        with pytest.raises(RuntimeFailure, match="Resource temporarily unavailable"):
            await start
    limit.write_text(most)
    assert "could not be started anew: " in output
    assert (await sandbox.exec("echo fine", seconds=30)).stdout == b"fine\n"
    assert descriptors() == used


@pytest.mark.deep
async def test_a_command_without_descriptors_ends_at_its_time_limit(world: World) -> None:
    """The tool server looks for the command's processes in /proc, which needs a descriptor."""
    sandbox = await world.start("namespace")
    running = asyncio.create_task(sandbox.exec("touch begun; sleep 4106", seconds=3))
    while not await sandbox.glob("begun"):  # noqa: ASYNC110  # there is no event for it
        await asyncio.sleep(0.01)
    leave(0)
    assert (await running).timed_out
    impoverish(1000)
    assert (await sandbox.exec("pgrep -f '[s]leep 4106'", seconds=30)).exit_code == 1


@pytest.mark.parametrize("name", ["file", "tree"])
def test_what_cannot_be_opened_for_want_of_descriptors_is_not_left_out(tmp_path: Path, name: str) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "file").touch()
    folder = os.open(tmp_path, os.O_RDONLY)
    with tarfile.open(fileobj=io.BytesIO(), mode="w|") as archive, at_most(0):
        last = os.dup(folder)  # takes the descriptor that was in use while `at_most` counted
        with pytest.raises(OSError, match="Too many open files"):
            Packer(archive, lambda *_: None).add_tree(folder, name, "t")
    os.close(last)
    os.close(folder)


async def idle(request: web.Request) -> web.Response:
    return web.Response(text="hello")


async def test_a_bridge_without_descriptors_ends_nothing_but_the_connection(world: World) -> None:
    async with world.gateway(idle):
        sandbox = await world.start("namespace")
        program = CALL.format(port=urlsplit(sandbox.endpoint).port, number=150)
        for most in (101, 102, 500):  # a pair is two sockets: none is left for one of them, or for both
            await until_closed(sandbox)
            impoverish(most)
            result = await python(
                sandbox, f"{LIMIT}{program.replace('ends, clients', 'ends, clients[:20]')}\nprint(ended)"
            )
            assert (result.stdout, result.stderr) == (b"0\n", b"")
        assert (await python(sandbox, f"{LIMIT}{program}\nprint(ended)")).stdout == b"0\n"


@pytest.mark.deep
async def test_only_so_many_connections_are_bridged_at_once(world: World) -> None:
    async with world.gateway(idle):
        sandbox = await world.start("namespace")
        port = urlsplit(sandbox.endpoint).port
        program = CALL.format(port=port, number=MAX_PAIRS + 20)
        assert (await python(sandbox, f"{program}\nprint(ended)")).stdout == b"20\n"
        for _ in range(3):  # connections that have ended do not count
            program = CALL.format(port=port, number=MAX_PAIRS)
            assert (await python(sandbox, f"{program}\nprint(ended)")).stdout == b"0\n"


@pytest.mark.parametrize("kind", ["namespace", LANDLOCK])
async def test_a_sandbox_has_half_of_the_descriptors_of_its_node(world: World, kind: str) -> None:
    sandbox = await world.start(kind)
    most = max(1024, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
    assert int((await sandbox.exec("ulimit -Hn", seconds=10)).stdout) <= most


@pytest.mark.parametrize(
    ("soft", "hard", "most"),
    [
        (20_000, 20_000, 10_000),
        (1 << 16, 1 << 20, 1 << 15),
        (1 << 20, 1 << 20, 1 << 16),
        (-1, -1, 1 << 16),
        (1500, 1500, 1024),
        (1024, 4096, 1024),
        (256, 4096, 1024),
        (512, 512, 512),
    ],
)
def test_how_many_descriptors_a_program_has(soft: int, hard: int, most: int) -> None:
    assert open_files(soft, hard) == most


@pytest.fixture
def plenty() -> Iterator[None]:
    """Raise this process's limit of open files, as `outrider serve` does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 16), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("plenty")
async def test_descriptors_on_their_way_in_a_sandbox_keep_none_from_the_node(world: World) -> None:
    """The kernel counts descriptors in transit for each user. Root may have any number."""
    sandbox = await world.start("namespace")
    shell = await sandbox.open_shell()
    await sandbox.write("flood.py", FLOOD.encode())
    flood = "sleep 60 | python3 flood.py > told & until grep -q full told; do sleep 0.01; done"
    assert (await shell.run(flood, seconds=30)).exit_code == 0
    assert str(errno.ETOOMANYREFS) in (await sandbox.read("told")).decode()
    fresh = await world.start("namespace")
    assert (await fresh.exec("echo fine", seconds=10)).stdout == b"fine\n"
