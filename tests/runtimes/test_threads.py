"""Programs whose first thread has ended while others run. The kernel lists such a process as a zombie, but it is
alive."""

from __future__ import annotations

import asyncio
import io
import os
import platform
import sys
import tarfile
import time
from pathlib import Path

import pytest

from outrider.sandbox.runtimes.base import Runtime
from outrider.sandbox.runtimes.kernel import cgroups
from outrider.sandbox.runtimes.kernel.process_marks import kill_marked, marked

from .world import World, snapshot

EXIT_OF_THREAD = 93 if platform.machine() == "aarch64" else 60
LEADERLESS = f"""
import ctypes, os, threading, time
def write():
    while True:
        with open('grows', 'a') as file:
            file.write('x')
        time.sleep(0.001)
threading.Thread(target=write).start()
with open('pid', 'w') as file:
    file.write(str(os.getpid()))
ctypes.CDLL(None).syscall({EXIT_OF_THREAD}, 0)
"""
BESIDE = "(setsid python3 leaderless.py < /dev/null > /dev/null 2>&1 &); "
BEGUN = "until grep -q '^State:.Z' /proc/$(cat pid)/status; do sleep 0.01; done 2> /dev/null"


@pytest.fixture(params=["process", "namespace"])
async def sandbox(request: pytest.FixtureRequest, world: World) -> Runtime:
    sandbox = await world.start(request.param)
    await sandbox.write("leaderless.py", LEADERLESS.encode())
    return sandbox


def alive(pid: int) -> bool:
    """Return whether a thread of the process still runs. The first thread, which has ended, does not count."""
    try:
        return len(os.listdir(f"/proc/{pid}/task")) > 1
    except OSError:
        return False


async def test_what_is_carried_alone_does_not_change_any_more(sandbox: Runtime, world: World) -> None:
    await sandbox.exec(BESIDE + BEGUN, seconds=20)
    data = await snapshot(sandbox, world.folder, "grows", alone=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        size = archive.getmember("work/grows").size
    assert (await sandbox.exec("sleep 0.1; cat grows", seconds=20)).stdout == b"x" * size


@pytest.mark.deep
@pytest.mark.parametrize("how", ["python3 leaderless.py", f"{BESIDE}{BEGUN}; sleep 60"], ids=["itself", "an orphan"])
async def test_it_ends_with_its_time(sandbox: Runtime, how: str) -> None:
    started = time.monotonic()
    assert (await sandbox.exec(how, seconds=2)).timed_out
    assert time.monotonic() - started < 20
    before, after = (await sandbox.exec("stat -c %s grows; sleep 0.1; stat -c %s grows", seconds=20)).stdout.split()
    assert before == after


async def test_a_shell_that_is_closed_takes_it_along(sandbox: Runtime) -> None:
    shell = await sandbox.open_shell()
    await shell.run(BESIDE + BEGUN, seconds=20)
    await shell.close()
    before, after = (await sandbox.exec("stat -c %s grows; sleep 0.1; stat -c %s grows", seconds=20)).stdout.split()
    assert before == after


@pytest.mark.parametrize("kind", ["process", "process-landlock"])
async def test_it_does_not_outlive_its_sandbox(world: World, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "find", lambda: cgroups.NONE)
    sandbox = await world.start(kind)
    await sandbox.write("leaderless.py", LEADERLESS.encode())
    await sandbox.exec(BESIDE + BEGUN, seconds=20)
    pid = int(await sandbox.read("pid"))
    assert alive(pid)
    await sandbox.stop()
    assert not alive(pid)


async def test_it_is_found_by_its_mark(tmp_path: Path) -> None:
    mark = f"{tmp_path.name}-{os.getpid()}/one"
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LEADERLESS, cwd=tmp_path, env={"OUTRIDER_CALL": f"{mark}:1"}
    )
    try:
        async with asyncio.timeout(20):
            while await asyncio.to_thread(state, program.pid) != "Z":
                """The first thread has not ended yet."""
        assert marked(mark) == {program.pid}
        assert await asyncio.to_thread(kill_marked, mark, seconds=20) == 0
        assert not alive(program.pid)
    finally:
        if program.returncode is None:
            program.kill()
        await program.wait()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
