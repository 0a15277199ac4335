"""A sandbox outlives its node: the next one goes on with what runs in it, and nothing is left when nobody does."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web

from outrider.errors import RuntimeFailure
from outrider.sandbox.node_folder import NodeFolder
from outrider.sandbox.runtimes.base import Outlives, SandboxContext, TakesOver
from outrider.sandbox.runtimes.containers.docker_api import DockerApi
from outrider.sandbox.runtimes.kernel.process_marks import OUTLIVE_SECONDS, RUN_FILE, marked
from outrider.sandbox.runtimes.node_host import Host, lives, survives
from outrider.sandbox.runtimes.tool_server import sandbox as tool_server_sandbox
from outrider.sandbox.runtimes.tool_server.sandbox import ToolServerSandbox
from outrider.spec import RuntimeSpec
from support.node_folders import temporary

from . import engines, sif_images
from .test_containers import names
from .world import KINDS

__all__ = ["temporary"]

pytestmark = pytest.mark.real

OWNER = "the service of this test"
WAITS = 15.0
"""Seconds, for a sandbox whose next node does not come."""
TESTS = Path(__file__).parents[1]

AGENT = """
import os, sys, time, urllib.request
told = []
while len(told) < 8:
    try:
        told.append(urllib.request.urlopen(sys.argv[1], timeout=60).read().decode())
    except Exception as error:
        told.append(type(error).__name__)
    print(told[-1], flush=True)
    time.sleep(0.3)
"""

NODE = """
import asyncio, json, os, signal, sys
sys.path[:0] = [sys.argv[1]]
from runtimes.test_outlives import node
asyncio.run(node(*sys.argv[2:]))
"""


def kind_of(name: str) -> TakesOver:
    module, attribute = KINDS[name].split(":")
    return cast(TakesOver, getattr(importlib.import_module(module), attribute))


@asynccontextmanager
async def gateway(path: Path, answer: str, called: asyncio.Event | None = None) -> AsyncIterator[None]:
    async def reply(request: web.Request) -> web.Response:
        if called is not None:
            called.set()
        return web.Response(text=answer)

    app = web.Application()
    app.router.add_get("/", reply)
    runner = web.AppRunner(app)
    await runner.setup()
    with suppress(FileNotFoundError):
        os.unlink(path)  # of the last node
    await web.UnixSite(runner, str(path)).start()
    try:
        yield
    finally:
        await runner.cleanup()


def context_of(host: Host, directory: Path) -> SandboxContext:
    socket = host.folder / "gateway.sock"
    return SandboxContext(
        session_id="s", attempt=1, directory=directory, host=host, gateway_url="", gateway_socket=socket
    )


async def node(temporary: str, spec: str, arm: str, waits: str) -> None:
    """The first node: it starts the sandbox and the agent in it, and says where it is when the agent has called."""
    tempfile.tempdir = temporary
    tool_server_sandbox.OUTLIVE_SECONDS = float(waits)  # type: ignore[attr-defined]  # imported there
    folder = NodeFolder.make(OWNER)
    folder.path.chmod(0o711)
    directory = folder.path / "s-1"
    directory.mkdir()
    parsed = RuntimeSpec.model_validate_json(spec)
    called = asyncio.Event()
    async with Host(folder.path) as host, gateway(host.folder / "gateway.sock", "first", called):
        sandbox: Any = cast(Any, kind_of(parsed.kind)).create(parsed, context_of(host, directory))
        await sandbox.start()
        handle = await cast(Outlives, sandbox).may_outlive()
        if arm == "armed":
            (directory / RUN_FILE).write_text(json.dumps(dict(handle)))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sandbox.exec_once("agent", ["python3", "-c", AGENT, sandbox.endpoint], seconds=100))
            tasks.create_task(sandbox.exec("sleep 4105", seconds=100))
            await called.wait()
            print(json.dumps([str(folder.path), host.name]), flush=True)


class Killed:
    """A node that was killed while its agent ran."""

    def __init__(self, folder: Path, name: str, spec: RuntimeSpec) -> None:
        self.folder = folder
        self.name = name
        self.spec = spec
        self.directory = folder / "s-1"

    @property
    def handle(self) -> dict[str, str]:
        found: dict[str, str] = json.loads((self.directory / RUN_FILE).read_text())
        return found

    def sandbox(self, host: Host, **changed: str) -> ToolServerSandbox:
        made = kind_of(self.spec.kind).take_over(
            self.spec, context_of(host, self.directory), {**self.handle, **changed}
        )
        assert isinstance(made, ToolServerSandbox)
        return made


async def killed_node(kind: str, temporary: Path, *, arm: str = "armed", waits: float = OUTLIVE_SECONDS) -> Killed:
    fields: dict[str, Any] = {"kind": kind}
    if kind == "apptainer":
        if not (can := cast(Any, kind_of(kind)).available()).ok:
            pytest.skip(f"{kind}: {can.detail}")
        fields["rootfs"] = str(sif_images.python_root())
    else:
        engines.engine(kind)
        fields["image"] = engines.image(kind)
    spec = RuntimeSpec(**fields)
    os.chmod(temporary, 0o711)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", NODE, str(TESTS), str(temporary), spec.model_dump_json(), arm, str(waits)),
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    folder, name = json.loads(await process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    await process.wait()
    return Killed(Path(folder), name, spec)


@pytest.fixture(params=["docker", "podman", "gvisor", "apptainer"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def alive(killed: Killed) -> bool:
    """Whether anything of the sandbox is. gVisor's processes cannot be seen from outside."""
    if killed.spec.kind in engines.RUNTIMES and await names(killed.spec.kind, killed.name):
        return True
    return bool(await asyncio.to_thread(marked, f"{killed.folder.name}/"))


async def gone(killed: Killed) -> None:
    """A node's keeper kills what it sees. It sees nothing of a gVisor sandbox, which ends when it has waited long
    enough for the next node."""
    async with asyncio.timeout(30):
        while await alive(killed):  # noqa: ASYNC110  # nothing tells of it
            await asyncio.sleep(0.1)


async def test_the_next_node_goes_on(kind: str, temporary: Path) -> None:
    killed = await killed_node(kind, temporary)
    assert lives(killed.name)  # so nobody else takes its control groups and containers for those of a dead node
    await asyncio.sleep(1)
    left = await asyncio.to_thread(NodeFolder.make, OWNER)
    try:
        assert left.path == killed.folder
        assert left.outlived() == [killed.directory]
        async with Host(left.path) as host, gateway(host.folder / "gateway.sock", "second"):
            sandbox = killed.sandbox(host)
            await sandbox.start()
            done = await sandbox.exec_once("agent", ["false"], seconds=100)
            assert done.exit_code == 0
            told = done.stdout.decode().split()
            assert len(told) == 8
            assert (told[0], told[-1]) == ("first", "second")
            # One call may have been cut off in the middle; the others waited for the next gateway.
            assert set(told[1:-1]) <= {"first", "second", "RemoteDisconnected", "ConnectionResetError", "URLError"}
            assert sum(one not in ("first", "second") for one in told) <= 1
            # What was of use to the first node only was ended with it; all else works as before.
            listed = await sandbox.exec(["ps", "-eo", "args"], seconds=30)
            assert b"sleep 4105" not in listed.stdout
            shell = await sandbox.open_shell()
            assert (await shell.run("echo $((6 * 7))", seconds=30)).output == "42\n"
            await sandbox.stop()
            assert not await alive(killed)
    finally:
        await asyncio.to_thread(left.remove)
    async with asyncio.timeout(10):
        while lives(killed.name):  # noqa: ASYNC110  # its keeper ends by itself
            await asyncio.sleep(0.01)
    assert not killed.folder.exists()


async def test_what_may_not_outlive_its_node_is_ended_with_it(kind: str, temporary: Path) -> None:
    killed = await killed_node(kind, temporary, arm="unarmed", waits=WAITS)
    await gone(killed)
    assert not survives(killed.directory)


async def test_nobody_comes(kind: str, temporary: Path) -> None:
    """The keeper ends the sandbox when the next node has not come in time, or comes without wanting it."""
    killed = await killed_node(kind, temporary, waits=WAITS)
    left = await asyncio.to_thread(NodeFolder.make, OWNER)
    await asyncio.to_thread(left.remove)
    await gone(killed)
    assert not killed.folder.exists()


async def test_another_owner_gets_nothing(kind: str, temporary: Path) -> None:
    killed = await killed_node(kind, temporary, waits=WAITS)
    other = await asyncio.to_thread(NodeFolder.make, "another service")
    assert other.path != killed.folder
    await asyncio.to_thread(other.remove)
    assert await alive(killed)
    await asyncio.to_thread((await asyncio.to_thread(NodeFolder.make, OWNER)).remove)
    await gone(killed)


async def test_a_program_inside_cannot_be_the_tool_server(kind: str, temporary: Path) -> None:
    """An agent that connects to the next node first is turned away, however often and with whatever it says."""
    killed = await killed_node(kind, temporary)
    left = await asyncio.to_thread(NodeFolder.make, OWNER)
    try:
        async with Host(left.path) as host, gateway(host.folder / "gateway.sock", "second"):
            shared = killed.directory / "tools" / "sock"
            tries = asyncio.create_task(intrude(shared))
            sandbox = killed.sandbox(host)
            await sandbox.start()
            done = await sandbox.exec_once("agent", ["false"], seconds=100)
            assert done.stdout.decode().split()[-1] == "second"
            tries.cancel()
            await sandbox.stop()
    finally:
        await asyncio.to_thread(left.remove)


async def intrude(path: Path) -> None:
    said = [b"", b"\0\0\0\x01", b"\xff" * 5000, frame(b"\x93\x00\xa4here\x81\xa6secret\xa0")]
    while True:
        for what in said:
            with suppress(OSError), socket.socket(socket.AF_UNIX) as end:
                end.settimeout(0.2)
                end.connect(str(path))
                end.sendall(what)
        await asyncio.sleep(0.01)


def frame(message: bytes) -> bytes:
    return len(message).to_bytes(4, "big") + message


async def test_a_sandbox_that_has_ended_meanwhile(kind: str, temporary: Path) -> None:
    killed = await killed_node(kind, temporary)
    if kind == "gvisor":
        client = DockerApi(engines.engine(kind))
        await client.remove(killed.handle["container"])
        await client.close()
    for pid in await asyncio.to_thread(marked, f"{killed.folder.name}/"):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    left = await asyncio.to_thread(NodeFolder.make, OWNER)
    try:
        async with Host(left.path) as host, gateway(host.folder / "gateway.sock", "second"):
            sandbox = killed.sandbox(host)
            with pytest.raises(RuntimeFailure):
                await sandbox.start()
            await sandbox.stop()
    finally:
        await asyncio.to_thread(left.remove)
    assert not await alive(killed)
