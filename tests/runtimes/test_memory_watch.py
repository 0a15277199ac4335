"""`memory_mb` without a control group: every way to get memory, in a sandbox of 128 MiB."""

from __future__ import annotations

import mmap
import os
import shutil
from pathlib import Path

import pytest

from outrider.sandbox.runtimes.base import ExecResult, Runtime
from outrider.sandbox.runtimes.guest import memory_watch
from outrider.sandbox.runtimes.guest.processes import read_of_process
from outrider.sandbox.runtimes.kernel import cgroups
from outrider.spec import Resources

from .test_contract import LANDLOCK
from .world import World

MEMORY_MB = 128
SETUP = """
import ctypes, errno, fcntl, mmap, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
MIB = 1 << 20
def failing(call, *args):
    assert call(*args) == -1
    return errno.errorcode[ctypes.get_errno()]
"""
REFUSED = {
    "memfd_create": "print(failing(libc.memfd_create, b'x', 0))",
    "memfd_secret": "print(failing(libc.syscall, 447, 0))",
    "vmsplice": "r, w = os.pipe(); print(failing(libc.vmsplice, w, None, 0, 0))",
    "larger pipes": """
r, w = os.pipe()
try:
    fcntl.fcntl(w, 1031, 1 << 20)
except OSError as error:
    print(errno.errorcode[error.errno])
""",
}
SEGMENTS = """
got = 0
while got < 768:
    if libc.shmget(0, ctypes.c_size_t(4 * MIB), 0o1600) < 0:
        break
    got += 4
print(got)
"""
SHARED_FILES = """
got = 0
try:
    with open('/dev/shm/large', 'wb') as file:
        while got < 768:
            file.write(bytes(MIB))
            file.flush()
            got += 1
except OSError:
    pass
print(got)
"""
PROCESSES = """
def hold():
    area = mmap.mmap(-1, 60 * MIB, flags=KIND | mmap.MAP_ANONYMOUS)
    for at in range(0, len(area), 4096):
        area[at] = 1
    signal.pause()
for _ in range(12):
    if os.fork() == 0:
        hold()
ends = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(10)]
print(set(ends), flush=True)
os.kill(0, signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def no_control_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "find", lambda: cgroups.NONE)


async def a_sandbox(world: World, kind: str = "namespace") -> Runtime:
    return await world.start(kind, resources=Resources(memory_mb=MEMORY_MB))


async def python(sandbox: Runtime, program: str) -> ExecResult:
    return await sandbox.exec(["python3", "-c", SETUP + program], seconds=60)


@pytest.mark.parametrize("kind", ["namespace", LANDLOCK])
@pytest.mark.parametrize("way", REFUSED)
async def test_memory_that_is_no_processs_is_refused(world: World, kind: str, way: str) -> None:
    result = await python(await a_sandbox(world, kind), REFUSED[way])
    assert result.stdout in (b"ENOSYS\n", b"EPERM\n"), result.stderr


async def test_system_vs_shared_memory_has_a_small_part(world: World) -> None:
    result = await python(await a_sandbox(world), SEGMENTS)
    assert 0 <= int(result.stdout) <= MEMORY_MB // 4, result.stderr


async def test_files_of_shared_memory_have_the_bound_of_all_files(world: World) -> None:
    result = await python(await a_sandbox(world), SHARED_FILES)
    assert 0 < int(result.stdout) < MEMORY_MB, result.stderr


@pytest.mark.deep
@pytest.mark.parametrize("mapping", ["mmap.MAP_SHARED", "mmap.MAP_PRIVATE"])
@pytest.mark.parametrize("kind", ["namespace", LANDLOCK])
async def test_many_processes_have_no_more_together(world: World, kind: str, mapping: str) -> None:
    """Of twelve processes with 60 MiB each, ten are killed. The sandbox still works."""
    sandbox = await a_sandbox(world, kind)
    result = await python(sandbox, PROCESSES.replace("KIND", mapping))
    assert result.stdout == b"{-9}\n", (result, result.stderr)
    assert (await sandbox.exec("echo fine", seconds=20)).stdout == b"fine\n"


async def test_what_forks_share_counts_once(world: World) -> None:
    sandbox = await a_sandbox(world)
    program = """
area = bytearray(50 * MIB)
for _ in range(5):
    if os.fork() == 0:
        signal.sigtimedwait([], 1)
        os._exit(0)
while True:
    try:
        assert os.wait()[1] == 0
    except ChildProcessError:
        break
print('fine')
"""
    assert (await python(sandbox, program)).stdout == b"fine\n"


async def test_what_a_program_is_fed_is_no_file_that_it_can_grow(world: World) -> None:
    sandbox = await a_sandbox(world)
    data = os.urandom(3 << 20)
    result = await sandbox.exec("test -p /dev/stdin && cat", stdin=data, seconds=30)
    assert result.stdout == data
    assert (await sandbox.exec("exit 3", stdin=data, seconds=30)).exit_code == 3


async def test_python_shares_memory_between_processes(world: World) -> None:
    program = """
from multiprocessing import Array, Lock, Pool, Process, shared_memory
block, numbers, lock = shared_memory.SharedMemory(create=True, size=1 << 20), Array('i', 1000), Lock()
def work():
    with lock:
        block.buf[0], numbers[0] = 7, 8
child = Process(target=work)
child.start()
child.join()
with Pool(2) as pool:
    print(block.buf[0], numbers[0], sum(pool.map(abs, range(-9, 0))))
block.unlink()
"""
    result = await python(await a_sandbox(world), program)
    assert result.stdout == b"7 8 45\n", result.stderr


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node here")
async def test_node_has_its_workers_and_webassembly(world: World) -> None:
    """V8 reserves address space by the gigabyte, and Node's `fetch` runs WebAssembly."""
    sandbox = await world.start("namespace", resources=Resources(memory_mb=1024))
    program = """
const {Worker} = require('worker_threads');
const memory = new WebAssembly.Memory({initial: 10, maximum: 1000, shared: true});
const worker = new Worker('require("worker_threads").parentPort.postMessage(1)', {eval: true});
worker.on('message', () => fetch('http://127.0.0.1:1').catch(e => console.log(e.cause.code ?? e.cause.message)));
"""
    result = await sandbox.exec(["node", "-e", program], seconds=60)
    assert (result.exit_code, result.stderr) == (0, b""), result.stderr


HIDDEN = {
    "given back": """
area = mmap.mmap(-1, 700 * MIB)
for at in range(0, len(area), 4096):
    area[at] = 1
    if at % (8 * MIB) == 0:
        area.madvise(mmap.MADV_DONTNEED)
print('hidden', flush=True)
signal.pause()
""",
    "inherited": """
area = mmap.mmap(-1, 700 * MIB)
if os.fork() == 0:
    if os.fork() == 0:
        for at in range(0, len(area), 4096):
            area[at] = 1
        os._exit(0)
    os.wait()
    signal.pause()
print(os.waitstatus_to_exitcode(os.wait()[1]))
""",
    "of a thread whose process's first one has ended": """
import threading
def hold():
    area = bytearray(90 * MIB)
    other = mmap.mmap(-1, 90 * MIB)
    for at in range(0, len(other), 4096):
        other[at] = 1
    signal.sigwait([signal.SIGUSR1])
threading.Thread(target=hold).start()
libc.pthread_exit(None)
""",
    "of a process that lets nobody see": """
libc.prctl(4, 0)
area = mmap.mmap(-1, 200 * MIB)
for at in range(0, len(area), 4096):
    area[at] = 1
area.madvise(mmap.MADV_DONTNEED)
signal.pause()
""",
}


@pytest.mark.parametrize("way", HIDDEN)
async def test_memory_that_a_process_does_not_show_counts_too(world: World, way: str) -> None:
    sandbox = await a_sandbox(world)
    result = await python(sandbox, HIDDEN[way])
    assert result.exit_code == 128 + 9 or result.stdout == b"-9\n", (result, result.stderr)
    assert (await sandbox.exec("echo fine", seconds=20)).stdout == b"fine\n"


async def test_address_space_that_is_only_reserved_costs_nothing(world: World) -> None:
    """The program runs for longer than two scans of the watch, after which the watch would kill it."""
    program = """
import time
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
assert libc.mmap(None, 1 << 36, 0, 0x4022, -1, 0) != 2**64 - 1
area = mmap.mmap(-1, 60 * MIB)
area.write(bytes(60 * MIB))
time.sleep(0.5)
print('fine')
"""
    result = await python(await a_sandbox(world), program)
    assert result.stdout == b"fine\n", (result, result.stderr)


def test_sums_of_what_the_kernel_tells() -> None:
    text = b"Name:\tRssAnon: 5 kB\nRssAnon:\t     300 kB\nRssShmem:\t       4 kB\nVmPTE:\t      20 kB\n"
    assert memory_watch.sum_of_fields(text, memory_watch.OWN_FIELDS) == 320 << 10
    assert memory_watch.sum_of_fields(b"", memory_watch.OWN_FIELDS) == 0
    forged = b"Name:\t\rRssAnon:-99999\nRssAnon:\t     300 kB\n"
    assert memory_watch.sum_of_fields(forged, memory_watch.OWN_FIELDS) == 300 << 10


def test_a_mapped_file_may_have_any_name(tmp_path: Path) -> None:
    file = tmp_path / "a\rb"
    file.write_bytes(b"x")
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ):
        memory = memory_watch.ProcessMemory(os.getpid())
        memory.find_areas()
        assert b"\r" in read_of_process(os.getpid(), "maps")
