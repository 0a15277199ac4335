"""No process, mount, descriptor, socket or folder is left, however the sandbox ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.errors import RuntimeFailure
from outrider.sandbox.runtimes.base import Runtime
from outrider.sandbox.runtimes.host_process.process import server_process
from outrider.sandbox.runtimes.kernel.process_marks import marked
from outrider.sandbox.runtimes.namespace import zygote as zygotes
from outrider.sandbox.runtimes.tool_server.launch import START_SECONDS, ToolServerSetup

from .world import World


class Traces:
    """The child processes of this process, the mounts of its tests, and its descriptors."""

    def __init__(self) -> None:
        self.processes = children()
        lines = Path("/proc/mounts").read_text().splitlines()
        # Other programs of this machine mount file systems at the same time.
        self.mounts = [line for line in lines if f"/or-{os.getpid()}-" in line]
        self.descriptors = descriptors()

    def left(self) -> tuple[set[int], bool, set[str]]:
        now = Traces()
        return now.processes - self.processes, now.mounts != self.mounts, now.descriptors - self.descriptors

    async def are_all(self) -> None:
        """Wait until nothing is left beside these processes, mounts and descriptors."""
        async with asyncio.timeout(30):
            while self.left() != (set(), False, set()):  # noqa: ASYNC110  # no event for exits
                await asyncio.sleep(0.01)


def descriptors() -> set[str]:
    """Return the descriptors of this process, each with the file that it is open on."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            found.add(f"{name}: {os.readlink(f'/proc/self/fd/{name}')}")
    return found


def children() -> set[int]:
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended; the main thread has its children
            found.update(map(int, Path(f"/proc/self/task/{task}/children").read_text().split()))
    return found


def lives(marker: str) -> bool:
    """Return whether another process of this host, in any namespace, has `marker` in its command line. A zombie has no
    command line."""
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if marker in Path(f"/proc/{name}/cmdline").read_text(errors="replace"):
                    return True
            except OSError:
                continue
    return False


@pytest.fixture(params=("namespace", "process"))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.deep
async def test_twenty_at_once(world: World, kind: str) -> None:
    await (await world.start(kind)).stop()  # opens the resources that are opened once and kept
    before = Traces()

    async def live(number: int) -> None:
        sandbox = await world.start(kind)
        await sandbox.exec("(setsid sleep 4001 &); sleep 4001 &", seconds=10)
        shell = await sandbox.open_shell()
        await shell.run("sleep 4001 &", seconds=10)
        if number % 2:
            await sandbox.stop()
        else:
            async with asyncio.TaskGroup() as group:
                running = group.create_task(broken(sandbox))
                await sandbox.exec("true", seconds=10)
                await sandbox.stop()
            assert running.result()

    async with asyncio.TaskGroup() as group:
        for number in range(20):
            group.create_task(live(number))
    assert before.left() == (set(), False, set())
    assert not lives("sleep\x004001")


async def broken(sandbox: Runtime) -> bool:
    try:
        await sandbox.exec("sleep 4001", seconds=60)
    except RuntimeFailure:
        return True
    return False


async def test_cancelled_starts(world: World, kind: str) -> None:
    """The start is cancelled at several moments."""
    await (await world.start(kind)).stop()
    before = Traces()
    for milliseconds in (0, 1, 3, 8, 15, 25):
        sandbox = world.create(kind)
        try:
            async with asyncio.timeout(milliseconds / 1000):
                await sandbox.start()
        except TimeoutError:
            with pytest.raises(RuntimeFailure):
                await sandbox.exec("true", seconds=1)
        await sandbox.stop()
    # If a start was cancelled before the zygote's reply, one descriptor stays open until the reply.
    await before.are_all()


async def test_a_start_that_is_cancelled_before_it_is_answered(world: World) -> None:
    """The process that is started nevertheless is killed, and its descriptors are closed."""
    others = children()  # children of earlier tests
    await (await world.start("namespace")).stop()
    before = Traces()
    [zygote] = before.processes - others
    os.kill(zygote, signal.SIGSTOP)
    try:
        sandbox = world.create("namespace")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await sandbox.start()
        await sandbox.stop()
        assert before.left()[2] != set()
    finally:
        os.kill(zygote, signal.SIGCONT)
    await before.are_all()
    assert children() - others == {zygote}


async def test_a_zygote_that_is_stopped_holds_up_no_later_start(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sandboxes go on. The start that it does not answer fails, and the next one is forked from another zygote."""
    others = children()  # children of earlier tests
    old = await world.start("namespace")
    before = Traces()
    [stopped] = before.processes - others
    os.kill(stopped, signal.SIGSTOP)
    try:
        async with asyncio.timeout(60):
            with monkeypatch.context() as patch:
                patch.setattr(zygotes, "ANSWER_SECONDS", 0.3)
                with pytest.raises(RuntimeFailure, match="that makes sandboxes has not answered"):
                    await world.start("namespace")
            new = await world.start("namespace")
        for sandbox in (old, new):
            assert (await sandbox.exec("true", seconds=10)).exit_code == 0
        await new.stop()
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert (await old.exec("true", seconds=10)).exit_code == 0
    await old.stop()
    assert len(children() - others) == 2


async def test_server_killed_from_outside(world: World, kind: str) -> None:
    before = Traces()
    sandbox = await world.start(kind)
    await sandbox.exec("setsid sleep 4002 & true", seconds=10)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(broken(sandbox))
        await sandbox.exec("true", seconds=10)
        (victim,) = children() - before.processes  # in the namespace runtime, this is the zygote
        os.kill(victim, signal.SIGKILL)
    assert running.result()
    with pytest.raises(RuntimeFailure, match="gone"):
        await sandbox.read("x")
    await sandbox.stop()
    assert not lives("sleep\x004002")
    after = await world.start(kind)
    assert (await after.exec("echo fine", seconds=10)).stdout == b"fine\n"
    await after.stop()


def first_process() -> int:
    """Return the first process of this process's only sandbox, a child of the zygote."""
    (zygote,) = (pid for pid in children() if "outrider-sandbox" in Path(f"/proc/{pid}/cmdline").read_text())
    (first,) = Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split()
    return int(first)


async def test_first_process_of_a_namespace_killed_from_outside(world: World) -> None:
    sandbox = await world.start("namespace")
    await sandbox.exec("setsid sleep 4004 & true", seconds=10)
    os.kill(first_process(), signal.SIGKILL)
    with pytest.raises(RuntimeFailure, match="gone"):  # the process dies a moment after the signal
        await sandbox.exec("sleep 60", seconds=10)
    await sandbox.stop()
    assert not lives("sleep\x004004")


async def test_setsid_escapees_of_the_process_runtime_die(world: World) -> None:
    sandbox = await world.start("process")
    escape = (
        "import os\n"
        "r, w = os.pipe()\n"
        "if os.fork(): os.close(w); os.read(r, 1); os._exit(0)  # both ends close on exec\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        "os.execvp('sleep', ['sleep', '4003'])"
    )
    await sandbox.exec(["env", "-i", "python3", "-c", escape], seconds=10)
    assert lives("sleep\x004003")
    await sandbox.stop()
    assert not lives("sleep\x004003")


async def test_starts_that_run_out_of_descriptors(world: World, kind: str) -> None:
    """Descriptors run out at each moment of the start in turn. This is a failure of the sandbox that leaves nothing.
    With enough descriptors, the start succeeds."""
    await (await world.start(kind)).stop()
    before = Traces()
    for available in range(20):
        sandbox = world.create(kind)
        with at_most(available):
            try:
                await sandbox.start()
            except RuntimeFailure:
                assert before.left() == (set(), False, set())
            else:
                break
            finally:
                await sandbox.stop()
    else:
        pytest.fail("20 descriptors must do")
    assert available > 2
    assert before.left() == (set(), False, set())


KILLED_WHILE_STARTING = """
import asyncio, os, sys
from pathlib import Path
from outrider.sandbox.runtimes.base import SandboxContext
from outrider.sandbox.runtimes.node_host import Host
from outrider.sandbox.runtimes.namespace.runtime import NamespaceRuntime
from outrider.spec import RuntimeSpec

async def main():
    folder, moment = Path(sys.argv[1]), float(sys.argv[2])
    host = Host(folder)
    for name in ("first", "second"):
        (folder / name).mkdir(exist_ok=True)
        sandbox = NamespaceRuntime.create(RuntimeSpec(kind="namespace", env={"MARK": sys.argv[1]}), SandboxContext(
            session_id=name, attempt=1, host=host, directory=folder / name, gateway_url="",
            gateway_socket=folder / "gateway.sock"))
        starting = asyncio.create_task(sandbox.start())
        if name == "first":
            await starting
            await sandbox.exec(f"(setsid sleep 4005.{os.getppid()} &)", seconds=10)
    await asyncio.sleep(moment)
    os.kill(os.getpid(), 9)

asyncio.run(main())
"""


@pytest.mark.deep
async def test_a_service_killed_while_a_sandbox_starts(world: World, folder: Path) -> None:
    """The service is killed at several moments of the start. Neither the new sandbox, nor an older one, nor the zygote
    outlives the service."""
    world.create("namespace")  # skips the test where there are no namespaces
    for moment in (0, 0.001, 0.003, 0.006, 0.01):
        command = [sys.executable, "-c", KILLED_WHILE_STARTING, str(folder), str(moment)]
        killed = await asyncio.create_subprocess_exec(*command)
        assert await killed.wait() == -signal.SIGKILL
    async with asyncio.timeout(20):
        while await asyncio.to_thread(any_of, folder, f"sleep\x004005.{os.getpid()}"):
            """Programs that have lost their connection end by themselves, a moment later."""


def any_of(folder: Path, command: str) -> bool:
    """Return whether a living process has the mark of this folder or has this command line."""
    return bool(marked(f"{folder.name}/")) or lives(command)


@contextlib.contextmanager
def at_most(available: int) -> Iterator[None]:
    """Let this process open only `available` more descriptors."""
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    free = itertools.filterfalse(used.__contains__, itertools.count())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, available, None)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_program_that_is_not_a_server(folder: Path) -> None:
    """The failure contains the output of the program that was started instead, and the program is dead."""
    before = Traces()
    command = ["/bin/sh", "-c", "echo went wrong >&2; exit 1"]
    with pytest.raises(RuntimeFailure) as raised:
        async with asyncio.timeout(START_SECONDS / 2):
            await started(command)
    assert raised.value.log_tail == "went wrong"
    with pytest.raises(RuntimeFailure, match="cannot start"):
        await started([str(folder / "none")])
    # The first bytes of this program's output are read as a length, which is above the maximum of a message.
    noise = ["/bin/sh", "-c", "head -c 100000 /dev/zero | tr '\\0' '\\377'; cat >/dev/null"]
    with pytest.raises(RuntimeFailure):
        await started(noise)
    assert before.left() == (set(), False, set())


async def started(command: list[str]) -> None:
    async with server_process("test", command, b"", ToolServerSetup(env={}, workdir="/")):
        pytest.fail("it is no tool server")
