"""Sandboxes of a real Apptainer, from images that a real Apptainer has built. `.ci/apptainer` installs one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from aiohttp import web

from outrider.errors import RuntimeFailure, RuntimeUnavailable
from outrider.sandbox.pythons.portable import portable_command
from outrider.sandbox.rootfs.store import ImageStore
from outrider.sandbox.runtimes.apptainer.command_line import APPTAINER, find_apptainer
from outrider.sandbox.runtimes.apptainer.runtime import ApptainerRuntime
from outrider.sandbox.runtimes.base import Runtime
from outrider.sandbox.runtimes.kernel import cgroups
from outrider.sandbox.runtimes.kernel.process_marks import marked
from support.ordinary import ordinary_user, python_of, run_tests

from . import sif_images
from .world import World

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

PYTHON = portable_command()
POST = (
    "import http.client\n"
    "c = http.client.HTTPConnection('127.0.0.1', 61080)\n"
    "c.request('POST', '/echo', body=b'x' * 100000)\n"
    "print(c.getresponse().read() == b'x' * 100000)\n"
)
FORK = """
import os, signal
pids = []
try:
    while len(pids) < 200:
        pids.append(os.fork())
        if not pids[-1]:
            signal.pause()
except OSError:
    pass
print(len(pids))
for pid in pids:
    os.kill(pid, 9)
"""
LONG = f"7{os.getpid():09}"
"""The number of seconds for `sleep` in sandboxes. No other process uses this number."""


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of these tests have the same OUTRIDER_HOME, so that the interpreter for sandboxes is made once."""
    monkeypatch.setenv("OUTRIDER_HOME", str(sif_images.folder() / "home"))


@pytest.fixture(params=["folder", "sif"])
def image(request: pytest.FixtureRequest) -> str:
    if shutil.which("apptainer") is None:
        pytest.skip("apptainer is not installed: `.ci/apptainer PREFIX` does it and prints what to add to the PATH")
    return str(sif_images.root() if request.param == "folder" else sif_images.sif("archive"))


@pytest.fixture
async def sandbox(world: World, image: str) -> Runtime:
    return await world.start("apptainer", image=image, resources={"disk_mb": 64})


async def output(sandbox: Runtime, *command: str, seconds: float = 30) -> str:
    result = await sandbox.exec(command[0] if len(command) == 1 else command, seconds=seconds)
    return (result.stdout + result.stderr).decode()


async def run_python(sandbox: Runtime, program: str) -> str:
    return await output(sandbox, *PYTHON, "-I", "-c", program)


class Traces:
    """The processes and mounts of this user's Apptainer, its sandboxes' `sleep LONG`, and the number of this process's
    descriptors."""

    def __init__(self) -> None:
        self.processes = {int(name) for name in os.listdir("/proc") if name.isdigit() and of_ours(name)}
        self.mounts = {line for line in Path("/proc/mounts").read_text().splitlines() if "apptainer" in line}
        self.descriptors = len(os.listdir("/proc/self/fd"))

    def left(self) -> tuple[set[int], bool, int]:
        now = Traces()
        return now.processes - self.processes, now.mounts != self.mounts, now.descriptors - self.descriptors


def of_ours(pid: str) -> bool:
    """Return whether the process is this user's, and is Apptainer or a sandbox's `sleep`. Other users may run these
    tests at the same time."""
    with contextlib.suppress(OSError):
        if f"\nUid:\t{os.getuid()}\t" not in Path(f"/proc/{pid}/status").read_text():
            return False
        command = Path(f"/proc/{pid}/cmdline").read_bytes().lower()
        return any(word in command for word in (b"apptainer", b"sleep\0" + LONG.encode()))
    return False


def below(pid: int) -> set[int]:
    """Return all descendants of a process."""
    found: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found.update(int(word) for word in path.read_text().split())
    return found.union(*map(below, found))


async def test_calls(sandbox: Runtime) -> None:
    assert await output(sandbox, "echo a; echo b >&2; exit 3") == "a\nb\n"
    assert (await sandbox.exec(["cat"], stdin=b"\0\xff", seconds=30)).stdout == b"\0\xff"
    await sandbox.write("deep/file", b"data")
    assert await sandbox.read("/work/deep/file") == b"data"
    shell = await sandbox.open_shell()
    await shell.run("cd deep; X=1", seconds=30)
    assert (await shell.run("pwd; echo $X", seconds=30)).output == "/work/deep\n1\n"
    live = await sandbox.open_shell("python")
    assert (await live.run("x = 20\nx + 1", seconds=30)).output == "21\n"
    late = await sandbox.exec(f"sleep {LONG} & sleep {LONG}", seconds=0.5)
    assert late.timed_out
    assert LONG not in await output(sandbox, "ps ax")


async def test_root_inside_is_nobody_special(sandbox: Runtime) -> None:
    assert await output(sandbox, "id -u; uname -n") == "0\nsandbox\n"
    status = await output(sandbox, "cat /proc/self/status")
    assert "CapEff:\t0000000000000000" in status
    assert "CapBnd:\t0000000000000000" in status
    assert "Seccomp:\t2" in status
    assert (await sandbox.exec("mount -t tmpfs none /tmp", seconds=30)).exit_code != 0
    assert (await sandbox.exec("echo 1 > /proc/sys/vm/swappiness", seconds=30)).exit_code != 0
    await sandbox.exec("kill -9 1; kill -STOP 1; kill -9 -1", seconds=30)
    assert await output(sandbox, "echo alive") == "alive\n"


async def test_nothing_of_the_host_is_there(
    world: World, image: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "secret").write_text("s3cret")
    monkeypatch.setenv("HOST_SECRET", "s3cret")
    monkeypatch.setenv("APPTAINER_BIND", str(folder))
    monkeypatch.setenv("APPTAINERENV_OTHER", "s3cret")
    sandbox = await world.start("apptainer", image=image)
    hidden = (folder / "secret", Path.home() / ".bashrc", "/etc/shadow", "/sys/class", "/sys/fs/cgroup/memory")
    for path in (*hidden, f"/proc/{os.getpid()}"):
        assert "No such file" in await output(sandbox, "ls", str(path)), path
    assert "s3cret" not in await output(sandbox, "env; cat /proc/*/environ")
    users = {entry.pw_name for entry in pwd.getpwall()} - {"root", pwd.getpwuid(os.getuid()).pw_name}
    seen = {line.split(":")[0] for line in (await output(sandbox, "cat /etc/passwd")).splitlines()}
    assert not users & seen
    assert await output(sandbox, "cat /etc/hosts") == "127.0.0.1 localhost sandbox\n::1 localhost\n"
    assert (await output(sandbox, "cat /etc/resolv.conf")).split() == ["nameserver", "127.0.0.1"]


async def test_nothing_but_loopback_and_the_gateway(world: World, image: str) -> None:
    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    async with world.gateway(echo):
        sandbox = await world.start("apptainer", image=image)
        assert await run_python(sandbox, POST) == "True\n"
        interfaces = (await output(sandbox, "cat /proc/net/dev")).splitlines()[2:]
        assert [line.split(":")[0].strip() for line in interfaces] == ["lo"]
        outside = "import socket; socket.create_connection(('192.0.2.1', 80), 2)"
        assert "unreachable" in await run_python(sandbox, outside)


async def test_writes_go_nowhere(sandbox: Runtime) -> None:
    result = await sandbox.exec("touch /usr/new /etc/new /new /root/new /tmp/new /work/new; rm /bin/seq", seconds=30)
    assert result.stderr == b""
    assert not list(sif_images.root().glob("**/new"))
    assert (sif_images.root() / "usr/bin/seq").exists()


async def test_what_may_be_written_is_bounded(sandbox: Runtime) -> None:
    for target in ("/work/big", "/tmp/big", "/dev/shm/big", "/usr/big"):
        result = await sandbox.exec(f"dd if=/dev/zero of={target} bs=1M count=80; rm {target}", seconds=60)
        assert b"No space left" in result.stderr, target
    assert await output(sandbox, "echo x > /work/fine; cat /work/fine") == "x\n"


async def test_limits(world: World, image: str) -> None:
    resources = {"memory_mb": 256, "pids": 40, "cpus": 0.5}
    sandbox = await world.start("apptainer", image=image, resources=resources)
    least = await world.start("apptainer", image=image, resources={"memory_mb": 16, "pids": 8})
    assert await output(least, "echo alive") == "alive\n"
    if os.geteuid() == 0 and "pids" not in cgroups.find().folders:
        pytest.skip("root, without control groups: processes are not limited")
    counted = await run_python(sandbox, FORK)
    assert 10 < int(counted) < 120
    if "memory" in cgroups.find().folders:
        died = await sandbox.exec([*PYTHON, "-I", "-c", "x = b'x' * (400 << 20)"], seconds=60)
        assert died.exit_code == 137
    else:
        assert "MemoryError" in await run_python(sandbox, "x = b'x' * (400 << 20)")
    assert await output(sandbox, "echo alive") == "alive\n"


async def test_mounts_are_read_only(world: World, image: str, folder: Path) -> None:
    programs = folder / 'odd, "quoted" name'
    programs.mkdir()
    (programs / "run").write_text("tool")
    named = [{"source": str(programs / "run"), "target": "/opt/data/run"}]
    sandbox = await world.start("apptainer", image=image, mounts=(programs,), named=named)
    assert await sandbox.read(str(programs / "run")) == b"tool"
    assert await sandbox.read("/opt/data/run") == b"tool"
    assert "Read-only" in await output(sandbox, "touch", str(programs / "new"))


async def test_what_the_image_sets(world: World) -> None:
    if shutil.which("apptainer") is None:
        pytest.skip("apptainer is not installed")
    sandbox = await world.start("apptainer", image=str(sif_images.sif("archive")), env={"SHAPE": "square"})
    told = await output(sandbox, "echo $COLOUR $SHAPE $PATH $HOME $LANG $USER")
    assert re.fullmatch("dark blue square /opt/tool:/usr/bin:/bin\\S* /root C.UTF-8 root\n", told)
    assert "APPTAINER" not in await output(sandbox, "env")


async def test_one_sif_under_both_runtimes(world: World) -> None:
    if shutil.which("apptainer") is None:
        pytest.skip("apptainer is not installed")
    ImageStore().import_(sif_images.sif("root"), "small")
    for kind in ("namespace", "apptainer"):
        sandbox = await world.start(kind, image="small")
        assert await output(sandbox, "touch /usr/new; ls /usr; cat /etc/passwd | head -1") == (
            "bin\nnew\nroot:x:0:0:root:/root:/bin/bash\n"
        )


async def test_images_that_are_not_there(world: World, image: str, folder: Path) -> None:
    for fields in ({"image": "missing"}, {"image": str(folder / "missing")}, {"rootfs": str(folder / "missing")}, {}):
        with pytest.raises(RuntimeUnavailable):
            await world.create_with(ApptainerRuntime, kind="apptainer", **fields).start()
    before = Traces()
    (folder / "broken.sif").write_bytes(b"no image")
    with pytest.raises(RuntimeFailure) as failed:
        await world.start("apptainer", image=str(folder / "broken.sif"))
    assert "broken.sif" in (failed.value.log_tail or "")
    assert before.left() == (set(), False, 0)


async def test_stop_leaves_nothing(world: World, image: str) -> None:
    await (await world.start("apptainer", image=image)).stop()
    before = Traces()
    for _ in range(3):
        sandbox = await world.start("apptainer", image=image)
        await sandbox.exec(f"setsid sleep {LONG} & (setsid sleep {LONG} &); sleep {LONG} &", seconds=30)
        directory = world.folder / f"s{len(world.made) - 1}"
        await sandbox.stop()
        await sandbox.stop()
        assert before.left() == (set(), False, 0)
        shutil.rmtree(directory)
        with pytest.raises(RuntimeFailure):
            await sandbox.exec("true", seconds=1)


async def test_cancelled_starts(world: World, image: str) -> None:
    await (await world.start("apptainer", image=image)).stop()
    before = Traces()
    for milliseconds in (0, 2, 10, 30, 60, 100, 150, 200):
        sandbox = world.create("apptainer", image=image)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(milliseconds / 1000):
                await sandbox.start()
        await sandbox.stop()
        assert before.left() == (set(), False, 0)


async def test_processes_killed_from_outside(world: World, image: str) -> None:
    """Each process that makes up a sandbox is killed in turn. `stop` then leaves nothing of the others."""
    first = await world.start("apptainer", image=image)
    await first.stop()
    before = Traces()
    count = 0
    while True:
        sandbox = await world.start("apptainer", image=image)
        await sandbox.exec(f"setsid sleep {LONG} &", seconds=30)
        ours = sorted(below(os.getpid()))
        if count >= len(ours):
            break
        os.kill(ours[count], signal.SIGKILL)
        count += 1
        await sandbox.stop()
        assert before.left() == (set(), False, 0)
    assert count >= 3
    await sandbox.stop()


KILLED = """
import asyncio, os, sys
from pathlib import Path
from outrider.sandbox.runtimes.apptainer.runtime import ApptainerRuntime
from outrider.sandbox.runtimes.base import SandboxContext
from outrider.sandbox.runtimes.node_host import Host
from outrider.spec import RuntimeSpec

async def main():
    folder, image, moment = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    host = Host(folder)
    for name in (f"first-{moment}", f"second-{moment}"):
        (folder / name).mkdir()
        sandbox = ApptainerRuntime.create(RuntimeSpec(kind="apptainer", image=image), SandboxContext(session_id=name,
            attempt=1, host=host, directory=folder / name, gateway_url="", gateway_socket=folder / "gateway.sock"))
        starting = asyncio.create_task(sandbox.start())
        if name.startswith("first"):
            await starting
            await sandbox.exec(f"setsid sleep {sys.argv[4]} &", seconds=30)
    await asyncio.sleep(moment)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


async def test_a_node_that_is_killed(world: World, image: str, folder: Path) -> None:
    """The node is killed at several moments of its last start. Soon after, nothing of the node is left."""
    world.create("apptainer", image=image)  # skips the test without Apptainer
    before = Traces()
    for moment in (0, 0.03, 0.1, 0.2):
        command = [sys.executable, "-c", KILLED, str(folder), image, str(moment), LONG]
        killed = await asyncio.create_subprocess_exec(*command)
        assert await killed.wait() == -signal.SIGKILL
        async with asyncio.timeout(20):
            while await asyncio.to_thread(anything, folder, before):
                """Programs that have lost their connection end by themselves, a moment later."""
    async with cgroups.Cgroups(world.host):
        """The next node removes the control groups."""


def anything(folder: Path, before: Traces) -> bool:
    return bool(marked(f"{folder.name}/")) or before.left()[:2] != (set(), False)


def test_available(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with contextlib.suppress(RuntimeUnavailable):
        assert APPTAINER.get().version in ApptainerRuntime.available().detail
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeUnavailable, match="not installed"):
        find_apptainer()
    (tmp_path / "singularity").write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo singularity 2.6 || echo odd >&2; exit 1"
    )
    (tmp_path / "singularity").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(RuntimeUnavailable, match="cannot make a sandbox"):
        find_apptainer()


@pytest.mark.nightly
@pytest.mark.timeout(560)
def test_all_of_it_as_an_ordinary_user(image: str) -> None:
    """An ordinary user runs these tests again, and the tests of builds."""
    if image.endswith(".sif"):
        pytest.skip("with a folder and a SIF file in one run")
    tests = ("runtimes/test_apptainer.py", "rootfs/test_build.py")
    with ordinary_user(shutil.which("apptainer") or "") as user, python_of(user) as python:
        told = run_tests(python, tests, "-m", "real", seconds=540)
    assert " passed" in told
    assert "is not installed" not in told
