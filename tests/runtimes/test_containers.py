"""Containers of real engines keep their limits, are isolated, and are all removed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import RuntimeFailure, RuntimeUnavailable
from outrider.sandbox.runtimes.base import Runtime
from outrider.sandbox.runtimes.containers.daemon import NODE_LABEL, ContainerDaemon
from outrider.sandbox.runtimes.containers.docker_api import DockerApi
from outrider.sandbox.runtimes.node_host import Host
from outrider.spec import Mount

from . import engines
from .test_isolation import FETCH, echo
from .world import CONTAINERS, World, snapshot

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

TESTS = [str(Path(__file__).parent.parent)]
NODE = """
import asyncio, os, sys
from pathlib import Path
sys.path[:0] = {path!r}
from outrider.sandbox.runtimes.base import SandboxContext
from outrider.sandbox.runtimes.node_host import Host
from outrider.spec import RuntimeSpec
from runtimes import engines

async def main():
    folder = Path({folder!r})
    async with Host(folder) as host:
        (folder / 'node').mkdir()
        context = SandboxContext(session_id='s', attempt=1, directory=folder / 'node', host=host,
                                 gateway_url='', gateway_socket=folder / 'gateway.sock')
        made = engines.RUNTIMES[{kind!r}].create(RuntimeSpec(kind={kind!r}, image={image!r}), context)
        await made.start()
        await made.exec('(setsid sleep 4101 &); sleep 4101 &', seconds=20)
        print(host.name, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture(params=CONTAINERS)
def kind(request: pytest.FixtureRequest) -> str:
    engines.engine(request.param)
    return str(request.param)


async def daemon_of(world: World, kind: str) -> ContainerDaemon:
    return await world.host.part(engines.RUNTIMES[kind].engine.daemon)


async def names(kind: str, node: str) -> list[str]:
    client = DockerApi(engines.engine(kind))
    try:
        return [one.name for one in await client.labelled(NODE_LABEL) if one.labels[NODE_LABEL] == node]
    finally:
        await client.close()


async def output(sandbox: Runtime, command: str, **options: Any) -> str:
    result = await sandbox.exec(command, seconds=30, **options)
    return (result.stdout + result.stderr).decode()


async def python(sandbox: Runtime, program: str) -> str:
    result = await sandbox.exec(["python3", "-c", program], seconds=30)
    return (result.stdout + result.stderr).decode()


async def test_a_fork_bomb_ends_with_its_call(world: World, kind: str) -> None:
    engines.needs_limits(kind)
    sandbox = await world.start(kind, resources={"pids": 128, "cpus": 1})
    result = await sandbox.exec("bomb() { bomb | bomb & }; bomb; sleep 60", seconds=2)
    assert result.timed_out or result.exit_code != 0
    await sandbox.stop()
    assert await names(kind, world.host.name) == []


async def test_no_file_is_larger_than_the_disk(world: World, kind: str) -> None:
    sandbox = await world.start(kind, resources={"disk_mb": 8})
    assert (await sandbox.exec("dd if=/dev/zero of=/big bs=1M count=6", seconds=30)).exit_code == 0
    assert (await sandbox.exec("dd if=/dev/zero of=/bigger bs=1M count=20", seconds=30)).exit_code != 0
    assert int((await output(sandbox, "stat -c %s /bigger")) or 0) <= 8 << 20


async def test_root_inside_is_nobody_special(world: World, kind: str) -> None:
    sandbox = await world.start(kind)
    status = dict(line.split(":\t") for line in (await output(sandbox, "cat /proc/self/status")).splitlines())
    assert status["CapEff"] == status["CapBnd"] == f"{1 << 1:016x}"  # CAP_DAC_OVERRIDE
    assert (status["NoNewPrivs"].strip(), status["Seccomp"].strip()) == ("1", "2")
    assert (await sandbox.exec("mount -t tmpfs none /mnt || unshare -r true", seconds=30)).exit_code != 0
    assert await output(sandbox, "hostname; kill -9 1; kill -STOP 1; echo $?") == "sandbox\n0\n"
    await sandbox.exec(["python3", "-c", "import os; os.kill(-1, 9)"], seconds=30)
    assert await output(sandbox, "echo alive") == "alive\n"


async def test_the_tool_server_cannot_be_looked_into(world: World, kind: str) -> None:
    sandbox = await world.start(kind)
    for name in ("mem", "environ", "maps"):
        assert "PermissionError" in await python(sandbox, f"open('/proc/1/{name}', 'rb').read(1)")
    attach = "import ctypes; print(ctypes.CDLL(None).ptrace(16, 1, 0, 0))"
    assert await python(sandbox, attach) == "-1\n"


async def test_several_users(world: World, kind: str) -> None:
    sandbox = await world.start(kind, users=65536)
    program = (
        "import os\n"
        "open('/tmp/x', 'w').close(); os.chown('/tmp/x', 7, 7)\n"
        "os.setgid(7); os.setuid(7); open('/tmp/x', 'w').write('7'); print(os.getuid())\n"
    )
    assert await python(sandbox, program) == "7\n"
    assert (await sandbox.exec("mount -t tmpfs none /mnt", seconds=30)).exit_code != 0


async def test_nothing_but_loopback(world: World, kind: str) -> None:
    sandbox = await world.start(kind)
    assert (await output(sandbox, "cut -d: -f1 /proc/net/dev | tail -n +3")).split() == ["lo"]
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        for address in ("192.0.2.1", "127.0.0.1"):
            connect = f"import socket; socket.create_connection(('{address}', {port}), 2)"
            assert (await sandbox.exec(["python3", "-c", connect], seconds=30)).exit_code == 1


async def test_gateway_through_the_bridge(world: World, kind: str) -> None:
    async with world.gateway(echo):
        sandbox = await world.start(kind)
        port = sandbox.endpoint.rpartition(":")[2]
        result = await sandbox.exec(["python3", "-c", FETCH, port], seconds=60)
        assert result.stdout == b"True\n", result.stderr


async def test_of_the_host_there_is_what_was_named_read_only(world: World, kind: str, folder: Path) -> None:
    shown, named = folder / "shown", folder / "named"
    for path in (shown, named):
        path.mkdir()
        (path / "file").write_text("text")
    sandbox = await world.start(kind, mounts=(shown,), named=[Mount(source=str(named), target="/data")])
    assert await output(sandbox, f"cat {shown}/file /data/file") == "texttext"
    for place in (f"{shown}/new", "/data/new", "/run/outrider/tools/new", "/run/outrider-python/new"):
        assert "Read-only file system" in await output(sandbox, f"touch {place}")
    assert "No such file" in await output(sandbox, f"ls {folder}/s0")


async def test_sockets_of_others_are_not_there(world: World, kind: str) -> None:
    one, other = await world.start(kind), await world.start(kind)
    # The paths are tested one by one, because the root of a rootless engine may not list their folder.
    listing = "import os; print(os.listdir('/run/outrider'), *map(os.path.exists, %r))"
    shown = ["/run/outrider/tools/gateway", "/run/outrider/tools/sock"]
    for sandbox in (one, other):
        assert await python(sandbox, listing % shown) == "['tools'] True False\n"
    engine = str(engines.engine(kind))
    there = (
        f"import os; print([os.path.exists(p) for p in ({engine!r}, {str(world.folder)!r}, '/var/run/docker.sock')])"
    )
    assert await python(one, there) == "[False, False, False]\n"


async def test_what_an_image_sets_is_set(world: World, kind: str) -> None:
    plain = await world.start(kind)
    assert await output(plain, "echo $GREETING") == "hello\n"
    own = await world.start(kind, env={"GREETING": "good day"})
    assert await output(own, "echo $GREETING") == "good day\n"


async def test_an_image_without_anything(world: World, kind: str) -> None:
    sandbox = await world.start(kind, image=engines.image(kind, "busybox"))
    result = await sandbox.exec(["/bin/busybox", "sh", "-c", "echo $0 $((6 * 7)); exit 3"], seconds=30)
    assert (result.exit_code, result.stdout) == (3, b"sh 42\n")
    await sandbox.write("made/here", b"\0\xff")
    assert await sandbox.read("made/here") == b"\0\xff"
    assert len(await snapshot(sandbox, world.folder, "made")) > 0


async def test_images_and_roots_that_cannot_be(world: World, kind: str) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"image": "not-there:1"}, "has no image"),
        ({"image": None, "rootfs": "/srv"}, "are made of images"),
        ({"image": None}, "need an image"),
    ]
    for fields, message in cases:
        with pytest.raises(RuntimeUnavailable, match=message) as raised:
            await world.start(kind, **fields)
        assert raised.value.hint
    assert await names(kind, world.host.name) == []


async def test_cancelled_starts_leave_nothing(world: World, kind: str) -> None:
    began = time.monotonic()
    await (await world.start(kind)).stop()
    whole = time.monotonic() - began
    for step in range(10):
        sandbox = world.create(kind)
        try:
            async with asyncio.timeout(whole * step / 8):
                await sandbox.start()
        except TimeoutError:
            assert await names(kind, world.host.name) == []
        await sandbox.stop()
        assert await names(kind, world.host.name) == []
    left = [path for path in world.folder.rglob("*") if path.is_socket()]
    assert left == []


async def test_a_stop_while_it_starts(world: World, kind: str) -> None:
    began = time.monotonic()
    await (await world.start(kind)).stop()
    whole = time.monotonic() - began
    for step in range(5):
        sandbox = world.create(kind)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(fails_or_not(sandbox))
            await asyncio.wait({task}, timeout=whole * step / 5)
            await sandbox.stop()
        await sandbox.stop()
        assert await names(kind, world.host.name) == []
        with pytest.raises(RuntimeFailure):
            await sandbox.exec("true", seconds=1)


async def fails_or_not(sandbox: Runtime) -> None:
    with contextlib.suppress(RuntimeFailure):
        await sandbox.start()


async def test_eight_at_once(world: World, kind: str) -> None:
    async def live(number: int) -> None:
        sandbox = await world.start(kind)
        assert await output(sandbox, f"sleep 4102 & echo {number}") == f"{number}\n"
        await sandbox.stop()

    async with asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(live(number))
    assert await names(kind, world.host.name) == []


async def test_a_container_that_is_killed_from_outside(world: World, kind: str) -> None:
    sandbox = await world.start(kind)
    (name,) = await names(kind, world.host.name)
    engines.kill(kind, name)
    with pytest.raises(RuntimeFailure):
        await sandbox.exec("sleep 60", seconds=90)
    await sandbox.stop()
    assert await names(kind, world.host.name) == []


async def test_a_node_that_is_killed_leaves_no_container(world: World, kind: str, folder: Path) -> None:
    world.create(kind)  # also prepares the image and the interpreter for the other node
    program = NODE.format(path=TESTS, folder=str(folder), kind=kind, image=engines.image(kind))
    node = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert node.stdout is not None
    name = (await node.stdout.readline()).decode().strip()
    assert len(await names(kind, name)) == 1
    node.kill()
    await node.wait()
    async with asyncio.timeout(30):
        while await names(kind, name):  # noqa: ASYNC110  # the engine removes it, and sends no event
            await asyncio.sleep(0.05)


async def test_sweep(world: World, kind: str, folder: Path) -> None:
    daemon = await daemon_of(world, kind)
    image = (await daemon.image(engines.image(kind))).id
    namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    dead = f"outrider-{namespace}-{os.getpid()}-1-00000000"  # this process's number, and another start time
    other = Host(folder / "other")
    kept = await world.start(kind)
    client = DockerApi(engines.engine(kind))
    try:
        for node in (dead, other.name, world.host.name):
            await client.create(f"{node}-x", {"Image": image, "Cmd": ["true"], "Labels": {NODE_LABEL: node}})
        assert await daemon.sweep() == 2
        assert await names(kind, other.name) == [f"{other.name}-x"]
        assert await names(kind, dead) == []
        assert len(await names(kind, world.host.name)) == 1
        assert await output(kept, "echo alive") == "alive\n"
    finally:
        await client.remove(f"{other.name}-x")
        await client.close()


async def test_gvisor(world: World) -> None:
    async with world.gateway(echo):
        sandbox = await world.start("gvisor")
        assert await python(sandbox, "import os; print(os.uname().release)") != f"{os.uname().release}\n"
        port = sandbox.endpoint.rpartition(":")[2]
        result = await sandbox.exec(["python3", "-c", FETCH, port], seconds=60)
        assert result.stdout == b"True\n", result.stderr
