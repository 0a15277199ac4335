"""The limits of a sandbox, which the kernel enforces. Most of the tests run on every runtime that isolates."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from pathlib import Path

import pytest

from outrider.sandbox.runtimes.apptainer.runtime import OWN_PROCESSES
from outrider.sandbox.runtimes.base import ExecResult, Runtime
from outrider.sandbox.runtimes.kernel import cgroups
from outrider.sandbox.runtimes.limits import COUNTED_BY_NAMESPACE, kernel_version
from outrider.spec import Resources

from . import engines
from .world import CONTAINERS, ISOLATING, World

HOG = "x = bytearray(1 << 20)\nwhile True: x += bytes(1 << 20)"
BOMB = "f() { f | f & }; f; sleep 20"
SPINNERS = """
import os, time
BEGIN = time.time() + 4
for _ in range(200):
    if os.fork() == 0:
        os.setsid()
        time.sleep(max(0, BEGIN - time.time()))
        while True: pass
"""
SPIN = "import time; t = time.time() + 1.5\nwhile time.time() < t: pass\nprint(time.process_time())"


@pytest.fixture(params=ISOLATING)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def python(sandbox: Runtime, program: str) -> ExecResult:
    return await sandbox.exec(["python3", "-c", program], seconds=30)


def needs(kind: str, controller: str) -> None:
    if kind in CONTAINERS:
        engines.needs_limits(kind)
    elif controller not in cgroups.find().folders:
        pytest.skip(f"{kind}: this process can set no {controller} limits by control groups")


async def test_memory(world: World, kind: str) -> None:
    needs(kind, "memory")
    sandbox = await world.start(kind, resources=Resources(memory_mb=64))
    result = await python(sandbox, HOG)
    assert result.exit_code == 128 + 9
    assert (await sandbox.exec("echo fine", seconds=10)).stdout == b"fine\n"


async def test_files_take_a_part_of_the_memory(world: World) -> None:
    sandbox = await world.start("namespace", resources=Resources(memory_mb=64))
    result = await sandbox.exec("head -c 200000000 /dev/zero > /work/large", seconds=30)
    assert b"No space left" in result.stderr
    assert (await sandbox.exec("rm /work/large; echo fine", seconds=10)).stdout == b"fine\n"


async def test_processes(world: World, kind: str) -> None:
    if os.geteuid() == 0 or kind in CONTAINERS:  # otherwise the kernel counts the user's processes
        needs(kind, "pids")
    sandbox = await world.start(kind, resources=Resources(pids=32))
    program = "import os, time\nn = 0\ntry:\n  while os.fork(): n += 1\n  time.sleep(9)\nexcept OSError: print(n)"
    forked = int((await python(sandbox, program)).stdout)
    assert 8 < forked < 32 + (OWN_PROCESSES if kind == "apptainer" else 0)


@pytest.mark.deep
async def test_a_fork_bomb_ends_with_its_time(world: World, kind: str) -> None:
    if os.geteuid() == 0 or kind in CONTAINERS:  # otherwise the kernel counts the user's processes
        needs(kind, "pids")
    sandbox = await world.start(kind, resources=Resources(pids=64))
    result = await sandbox.exec(BOMB, seconds=1)
    assert result.timed_out
    assert (await sandbox.exec("echo fine", seconds=20)).stdout == b"fine\n"
    started = time.monotonic()
    await sandbox.exec(BOMB.replace("sleep 20", "true"), seconds=5)
    await sandbox.stop()
    assert time.monotonic() - started < 60


@pytest.mark.deep
async def test_a_fork_bomb_that_fills_its_own_gaps_is_killed_at_once(world: World) -> None:
    """Each killed process makes room for another one: killing one by one took 8 s."""
    needs("namespace", "pids")
    sandbox = await world.start("namespace", resources=Resources(pids=200))
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n"
    bombs = [await sandbox.exec(["python3", "-c", bomb], seconds=1) for _ in range(4)]
    assert all(done.timed_out for done in bombs)
    assert min(done.seconds for done in bombs) < 5  # on a busy machine, some take longer


@pytest.mark.deep
async def test_a_sandbox_whose_first_process_has_to_wait_for_all_others_is_stopped_in_time(world: World) -> None:
    needs("namespace", "cpu")
    sandbox = await world.start("namespace", resources=Resources(cpus=0.1, pids=1000))
    assert (await sandbox.exec(["python3", "-c", SPINNERS], seconds=30)).exit_code == 0
    await asyncio.sleep(5)
    started = time.monotonic()
    await sandbox.stop()
    assert time.monotonic() - started < 10  # with a tenth of a processor they would take a minute


@pytest.mark.deep
async def test_cpu(world: World, kind: str) -> None:
    needs(kind, "cpu")
    sandbox = await world.start(kind, resources=Resources(cpus=0.2))
    assert float((await python(sandbox, SPIN)).stdout) < 0.8


async def test_a_full_disk_is_an_error_inside_and_nothing_more(world: World, kind: str) -> None:
    sandbox = await world.start(kind, resources=Resources(disk_mb=16))
    for folder in ("/work", "/tmp", "/root", "/var/tmp"):
        result = await sandbox.exec(f"head -c 40000000 /dev/zero > {folder}/large", seconds=30)
        if kind == "namespace":
            assert (result.exit_code, b"No space left" in result.stderr) == (1, True), folder
        assert result.exit_code not in (0, None), folder
        size = int((await sandbox.exec(["stat", "-c", "%s", f"{folder}/large"], seconds=10)).stdout)
        assert size <= 16 << 20, folder
        await sandbox.exec(["rm", f"{folder}/large"], seconds=10)
    await sandbox.write("/work/small", b"x" * 1000)
    assert len(await sandbox.read("/work/small")) == 1000


async def test_files_are_counted_too(world: World) -> None:
    sandbox = await world.start("namespace", resources=Resources(disk_mb=16))
    result = await python(sandbox, "for n in range(100_000): open(f'/work/{n}', 'w').close()")
    assert b"No space left" in result.stderr


async def test_without_control_groups_each_process_is_bound(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "find", lambda: cgroups.NONE)
    sandbox = await world.start("namespace", resources=Resources(memory_mb=256))
    result = await python(sandbox, HOG)
    assert (result.exit_code, b"MemoryError" in result.stderr) == (1, True)


TIMERS = """
import ctypes
libc, made = ctypes.CDLL(None, use_errno=True), 0
while made < 200_000 and libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())) == 0:
    made += 1
print(made, flush=True)
"""
QUEUES = """
import ctypes, os
libc, made = ctypes.CDLL(None, use_errno=True), 0
while made < 1000 and libc.syscall(NUMBER, b"q%d" % made, os.O_CREAT | os.O_RDWR, 0o600, None) >= 0:
    made += 1
print(made, flush=True)
""".replace("NUMBER", "240" if os.uname().machine == "x86_64" else "180")
WATCHES = """
import ctypes, os
libc, made = ctypes.CDLL(None, use_errno=True), 0
fd = libc.inotify_init1(0)
for number in range(MOST):
    os.mkdir(f"d{number}")
    if libc.inotify_add_watch(fd, b"d%d" % number, 2) < 0:
        break
    made += 1
print(made, flush=True)
"""


MAX_WATCHES = int(Path("/proc/sys/fs/inotify/max_user_watches").read_text())


@pytest.mark.parametrize("name", ["timers", "queues", "watches"])
async def test_what_the_kernel_gives_a_user_is_not_used_up_by_one_sandbox(world: World, name: str) -> None:
    if kernel_version() < COUNTED_BY_NAMESPACE:
        pytest.skip("this Linux counts these for the whole user alone")
    own = {
        "timers": resource.getrlimit(resource.RLIMIT_SIGPENDING)[0],
        "queues": resource.getrlimit(resource.RLIMIT_MSGQUEUE)[0] // 81_920,
        "watches": MAX_WATCHES,
    }[name]
    if own == resource.RLIM_INFINITY or own > 200_000:
        pytest.skip(f"this user has {own} {name} in all: too many to use up in a test")
    program = {"timers": TIMERS, "queues": QUEUES, "watches": WATCHES.replace("MOST", str(own))}[name]
    greedy, neighbour = await world.start("namespace"), await world.start("namespace")
    shell = await greedy.open_shell("python")
    first = await shell.run(f"exec({program!r})", seconds=60)
    second = await python(neighbour, program)
    counts = [int(first.output), int(second.stdout)]
    assert 0 < counts[0] == counts[1] <= max(own // 8, 1024 if name == "watches" else 64)
