"""A runtime reports with `broken_inside` whether the programs in a sandbox have broken the sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.errors import RuntimeFailure
from outrider.sandbox.runtimes.apptainer.command_line import in_groups
from outrider.sandbox.runtimes.base import Runtime, TellsCause
from outrider.sandbox.runtimes.kernel.cgroups import Cgroups, ControlGroup, Hierarchies, find, settings
from outrider.sandbox.runtimes.node_host import Host
from outrider.sandbox.runtimes.tool_server.client import GRACE_SECONDS, LAST_LOOK_SECONDS, ToolPart
from outrider.sandbox.runtimes.tool_server.sandbox import ToolServerSandbox
from outrider.spec import Resources
from support.waiting import until

from .test_leaks import children
from .world import World

HOSTED = ["process", "process-landlock"]
EVERY = [*HOSTED, "namespace"]


async def ends(sandbox: Runtime, command: str) -> RuntimeFailure:
    """Run a command during which the sandbox ends. Returns the failure. A process dies a moment after it got a signal,
    so a command that is meant to find the sandbox dead must not be short."""
    with pytest.raises(RuntimeFailure, match="tool server is gone") as caught:
        await sandbox.exec(command, seconds=20)
    return caught.value


async def blamed(sandbox: Runtime) -> bool:
    assert isinstance(sandbox, TellsCause)
    return await sandbox.broken_inside()


async def hangs(sandbox: Runtime) -> None:
    """Make a call that gets no reply, with the shortest possible wait."""
    assert isinstance(sandbox, ToolServerSandbox)
    args = {"path": "/dev/null", "offset": 0, "size": 1}
    with pytest.raises(RuntimeFailure, match="stuck"):
        await sandbox.server.tools.call("read", args, ToolPart, seconds=-GRACE_SECONDS - LAST_LOOK_SECONDS)


@pytest.mark.parametrize("kind", EVERY)
async def test_what_works_or_was_stopped_was_broken_by_nobody(world: World, kind: str) -> None:
    sandbox = world.create(kind)
    assert not await blamed(sandbox)
    await sandbox.start()
    assert not await blamed(sandbox)
    await sandbox.stop()
    assert not await blamed(sandbox)


@pytest.mark.parametrize("kind", HOSTED)
async def test_a_tool_server_that_is_killed_inside(world: World, kind: str) -> None:
    sandbox = await world.start(kind)
    assert not (await ends(sandbox, "kill -9 $PPID; sleep 60")).inside
    assert await blamed(sandbox)


def below(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


@pytest.mark.parametrize("kind", HOSTED)
async def test_a_tool_server_that_is_stopped_inside(world: World, kind: str) -> None:
    before = children()
    sandbox = await world.start(kind)
    (server,) = children() - before
    async with asyncio.TaskGroup() as group:
        stopping = group.create_task(sandbox.exec("kill -STOP $PPID", seconds=20))
        stopping.add_done_callback(lambda done: done.exception())
        while Path(f"/proc/{server}/stat").read_text().split()[2] != "T":  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0)
        stopping.cancel()
        await hangs(sandbox)
    assert await blamed(sandbox)
    os.kill(server, signal.SIGCONT)


STOPS_FORKS = """
import os, signal, sys, time
while str(os.getppid()) != sys.argv[1]:
    time.sleep(0.01)
open('ready', 'w').close()
while True:
    for pid in set(filter(str.isdigit, os.listdir('/proc'))) - {str(os.getpid())}:
        try:
            state, parent = open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[:2]
            if parent == sys.argv[1] and state != 'T':
                os.kill(int(pid), signal.SIGSTOP)
        except OSError:
            pass
"""


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["process", "namespace"])
async def test_a_fork_of_the_tool_server_that_is_stopped_inside(
    world: World, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of an agent stops every child of the server, so that no file can be taken out between two steps."""
    monkeypatch.setattr("outrider.sandbox.runtimes.tool_server.archive_download.SAVE_SECONDS", 15 - GRACE_SECONDS)
    sandbox = await world.start(kind)
    await sandbox.write("stops", STOPS_FORKS.encode())
    await sandbox.exec("truncate -s 500M big; setsid python3 stops $PPID > /dev/null 2>&1 &", seconds=30)

    async def ready() -> bool:
        with contextlib.suppress(FileNotFoundError):
            return await sandbox.read("ready") == b""
        return False

    await until(ready)
    with pytest.raises(RuntimeFailure, match="snapshot failed") as failed:
        await sandbox.snapshot(["big"], tmp_path / "archive")
    assert failed.value.inside


@pytest.mark.parametrize("pids", [64, 16])
async def test_a_tool_server_that_a_fork_bomb_leaves_no_time(world: World, pids: int) -> None:
    """A tool server that does not respond is the fault of the sandbox's programs if they have reached the limit of
    processes."""
    if "pids" not in find().folders:
        pytest.skip("this process can set no limits of processes by control groups")
    before = children()
    sandbox = await world.start("namespace", resources=Resources(pids=pids))
    (zygote,) = children() - before
    (first,) = below(zygote)
    forks = "import os, time\nfor _ in range(20):\n  if os.fork() == 0: time.sleep(9); os._exit(0)"
    assert ((await sandbox.exec(["python3", "-c", forks], seconds=20)).exit_code == 0) == (pids == 64)
    os.kill(first, signal.SIGSTOP)
    await hangs(sandbox)
    assert await blamed(sandbox) == (pids == 16)
    os.kill(first, signal.SIGCONT)


@pytest.mark.parametrize("kind", EVERY)
async def test_the_end_of_its_lifetime_is_nobodys_doing(world: World, kind: str) -> None:
    sandbox = await world.start(kind, lifetime_seconds=0.3)
    with pytest.raises(RuntimeFailure, match=r"lifetime|gone") as caught:
        await sandbox.exec("sleep 20", seconds=20)
    assert not caught.value.inside
    assert not await blamed(sandbox)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_nobody_inside_can_end_a_first_process_by_a_signal(world: World, number: int) -> None:
    before = children()
    sandbox = await world.start("namespace")
    (zygote,) = children() - before
    (first,) = below(zygote)
    assert (await sandbox.exec("kill -9 1; kill -STOP 1; kill -9 -1", seconds=20)).exit_code is not None
    os.kill(first, number)
    if number == signal.SIGKILL:
        await ends(sandbox, "sleep 60")
    else:
        await hangs(sandbox)
        os.kill(first, signal.SIGCONT)
    assert not await blamed(sandbox)


async def test_sandboxes_that_end_with_what_they_came_from(world: World) -> None:
    before = children()
    sandboxes = [await world.start("namespace") for _ in range(2)]
    (zygote,) = children() - before
    os.kill(zygote, signal.SIGKILL)
    for sandbox in sandboxes:
        await ends(sandbox, "sleep 60")
        assert not await blamed(sandbox)
    later = await world.start("namespace")
    assert (await later.exec("true", seconds=20)).exit_code == 0
    assert not await blamed(sandboxes[0])


@pytest.mark.parametrize("kind", EVERY)
async def test_what_a_sandbox_refuses_comes_from_inside(world: World, folder: Path, kind: str) -> None:
    sandbox = await world.start(kind)
    await sandbox.exec("mkdir big; truncate -s 3G big/hole; ln -s loop loop", seconds=20)
    with pytest.raises(RuntimeFailure, match="more than 1073741824 bytes") as caught:
        await sandbox.snapshot(["big"], folder / "snapshot", alone=True)
    assert caught.value.inside
    assert not (folder / "snapshot").exists()
    with pytest.raises(RuntimeFailure, match="symbolic links") as caught:
        await sandbox.write("loop", b"x")
    assert caught.value.inside
    await sandbox.write("four", b"1234")
    with pytest.raises(RuntimeFailure, match="larger than 3 bytes") as caught:
        await sandbox.read("four", limit=3)
    assert not caught.value.inside


async def starve(entrances: tuple[str, ...]) -> None:
    command = in_groups(entrances, ["tail", "/dev/zero"])
    assert await (await asyncio.create_subprocess_exec(*command)).wait() == -signal.SIGKILL


async def test_whose_memory_ran_out(tmp_path: Path) -> None:
    """One group exceeds its own limit. The other is below a group without free memory, as on a host without free
    memory."""
    found = find()
    if "memory" not in found.folders:
        pytest.skip("this process can set no memory limits by control groups")
    around = found.folders["memory"] / f"outrider-test-{os.getpid()}"
    async with Cgroups(Host(tmp_path), hierarchies=found) as groups:
        small = groups.make("small", Resources(memory_mb=64))
        assert not small.ran_out()
        assert not small.starved()
        await starve(small.entrances)
        assert small.ran_out()
        assert not small.starved()
        await small.remove()
    groups = Cgroups(Host(around), hierarchies=Hierarchies(found.version, {"memory": around}))
    around.mkdir()
    try:
        for file, value in settings(found.version, Resources(memory_mb=64))["memory"].items():
            if (around / file).exists():
                (around / file).write_text(value)
        if found.version == 2:
            (around / "cgroup.subtree_control").write_text("+memory")
        async with groups:
            within = groups.make("within", Resources(memory_mb=512))
            await starve(within.entrances)
            assert within.starved()
            assert not within.ran_out()
            await within.remove()
    finally:
        around.rmdir()


V1 = {"memory.oom_control": "under_oom 0\noom_kill 1\n", "memory.limit_in_bytes": f"{64 << 20}\n"}


@pytest.mark.parametrize(
    ("files", "own"),
    [
        ({"memory.events": "low 0\noom 0\noom_kill 1\noom_group_kill 0\n"}, False),
        ({"memory.events": "low 0\noom 7\noom_kill 1\n"}, True),
        (V1 | {"memory.max_usage_in_bytes": f"{62 << 20}\n"}, False),
        (V1 | {"memory.max_usage_in_bytes": f"{64 << 20}\n"}, True),
    ],
)
def test_what_either_version_counts(tmp_path: Path, files: dict[str, str], own: bool) -> None:
    group = ControlGroup((tmp_path,))
    assert (group.ran_out(), group.starved()) == (False, False)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert (group.ran_out(), group.starved()) == (own, not own)


@pytest.mark.parametrize("kind", EVERY)
async def test_what_is_killed_while_the_host_starves_has_failed(world: World, kind: str, tmp_path: Path) -> None:
    sandbox = await world.start(kind)
    assert isinstance(sandbox, ToolServerSandbox)
    assert (await sandbox.exec("kill -9 $$", seconds=20)).exit_code == 137
    (tmp_path / "memory.events").write_text("oom 0\noom_kill 1\n")
    sandbox._server = replace(sandbox.server, group=ControlGroup((tmp_path,)))
    assert (await sandbox.exec("kill -15 $$; exit 3", seconds=20)).exit_code == 143
    with pytest.raises(RuntimeFailure, match="the host has run out of memory") as caught:
        await sandbox.exec("kill -9 $$", seconds=20)
    assert not caught.value.inside


@pytest.mark.parametrize("kind", EVERY)
async def test_a_neighbour_that_runs_out_of_its_memory_excuses_nobody(world: World, kind: str) -> None:
    if "memory" not in find().folders:
        pytest.skip("this process can set no memory limits by control groups")
    sandbox = await world.start(kind)
    neighbour = await world.start(kind, resources=Resources(memory_mb=64))
    assert isinstance(neighbour, ToolServerSandbox)
    # Rarely, the kernel kills the tool server, too: it chooses another process before the memory of the first is free.
    with contextlib.suppress(RuntimeFailure):
        assert (await neighbour.exec("tail /dev/zero", seconds=20)).exit_code == 137
    assert neighbour.server.group is not None
    assert neighbour.server.group.ran_out()
    assert (await sandbox.exec("kill -9 $$", seconds=20)).exit_code == 137
