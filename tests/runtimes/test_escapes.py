"""Attempts to break out of a sandbox. None of them succeeds.

Each program runs in the sandbox with all that an agent has there, and exits with 0 if its attempt succeeds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import socket
import textwrap
import threading
from pathlib import Path

import pytest

from outrider.errors import RuntimeFailure
from outrider.sandbox.runtimes.base import Runtime
from outrider.sandbox.runtimes.guest.isolation import seccomp
from outrider.spec import Mount

from .test_isolation import tiny_root
from .world import ISOLATING, World

DAC_OVERRIDE = 1 << 1
"""A capability that containers keep, because their images have files of other users."""


@pytest.fixture(params=ISOLATING)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


LOOK_SECONDS = 120
"""A time limit for programs. Some of them look at every file that they can see, which takes long if no file is in the
page cache."""

REFUSALS = (
    *("AssertionError", "BlockingIOError", "ConnectionRefusedError", "FileNotFoundError", "IsADirectoryError"),
    *("NotADirectoryError", "OSError", "PermissionError", "ValueError", "ZeroDivisionError", "socket.gaierror"),
)
"""Errors with which a program ends if its attempt is refused. Any other error is a mistake in the program."""


async def succeeds(sandbox: Runtime, program: str) -> bool:
    result = await sandbox.exec(["python3", "-c", textwrap.dedent(program)], seconds=LOOK_SECONDS)
    assert not result.timed_out
    assert result.exit_code in (0, 1), result.stderr.decode()
    if result.exit_code:
        told = result.stderr.decode().strip().splitlines()[-1]
        assert told.split(":")[0] in REFUSALS, f"the program is wrong: {told}"
    return result.exit_code == 0


@pytest.mark.deep
async def test_the_hosts_files(world: World, folder: Path, kind: str) -> None:
    (folder / "secret").write_text("s3cret")
    sandbox = await world.start(kind)
    for path in (folder / "secret", Path.home() / ".bashrc", "/etc/shadow", "/var/lib/dpkg/status"):
        for way in ("{}", "/proc/1/root{}", "/proc/self/root{}", "/../..{}", "/proc/1/cwd/../../../..{}"):
            assert not await succeeds(sandbox, f"open({way.format(path)!r})"), (path, way)
    assert not await succeeds(sandbox, f"import os; assert any({str(folder)!r} in n for n, _, _ in os.walk('/'))")


async def test_open_by_handle_and_old_roots(world: World, kind: str) -> None:
    sandbox = await world.start(kind)
    handle = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        root = os.open('/usr', os.O_RDONLY)
        handle = (ctypes.c_uint * 4)(8, 1, 2, 0)
        assert libc.open_by_handle_at(root, handle, 0) >= 0
    """
    chroot = (
        "import os; os.mkdir('/tmp/c'); f = os.open('/', 0); os.chroot('/tmp/c'); os.fchdir(f); open('../etc/shadow')"
    )
    for program in (handle, chroot):
        assert not await succeeds(sandbox, program)


async def test_the_hosts_environment_and_the_tool_servers(
    world: World, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOST_SECRET", "s3cret")
    sandbox = await world.start(kind)
    program = """
        import glob, os
        seen = ''
        for path in glob.glob('/proc/[0-9]*/*') + glob.glob('/proc/[0-9]*/fd/*'):
            try: seen += os.read(os.open(path, os.O_NONBLOCK), 100_000).decode(errors='replace')
            except OSError: pass
        assert 's3cret'[:] in seen.replace("'s3cret'[:]", '') or %r[::-1] in seen
    """
    folder = world.folder if kind == "namespace" else "no-such-folder"  # elsewhere the mounts show their sources
    assert not await succeeds(sandbox, program % str(folder)[::-1])
    assert (await sandbox.exec("cat /proc/1/environ", seconds=10)).stdout == b""


async def test_other_sessions(world: World, kind: str) -> None:
    one, two = await world.start(kind), await world.start(kind)
    await one.write("/work/mine", b"s3cret")
    await one.exec("(setsid sleep 6001 &)", seconds=10)
    listen = (
        "import socket, time; s = socket.socket(socket.AF_UNIX); s.bind('\\0mine'); s.listen(); print(1, flush=True)"
    )
    server = await one.open_shell("python")
    assert (await server.run(listen, seconds=20)).output == "1\n"
    assert (await server.run("t = socket.create_server(('127.0.0.1', 7001))", seconds=20)).exit_code == 0
    assert not await succeeds(two, "import socket; socket.socket(socket.AF_UNIX).connect('\\0mine')")
    assert not await succeeds(two, "import socket; socket.create_connection(('127.0.0.1', 7001), 2)")
    assert not await succeeds(two, "open('/work/mine')")
    search = "import glob; assert any('1006'[::-1] in open(p).read() for p in glob.glob('/proc/[0-9]*/cmdline'))"
    assert not await succeeds(two, search)


async def test_the_hosts_network_and_abstract_sockets(world: World, kind: str) -> None:
    sandbox = await world.start(kind)
    with socket.create_server(("127.0.0.1", 0)) as control, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0outrider-{os.getpid()}")
        abstract.listen()
        port = control.getsockname()[1]
        for program in (
            f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
            f"import socket; socket.socket(socket.AF_UNIX).connect('\\0outrider-{os.getpid()}')",
            "import socket; socket.create_connection(('192.0.2.1', 80), 2)",
            "import socket; socket.getaddrinfo('example.org', 80)",
            "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
            "import socket; socket.socket(socket.AF_VSOCK).connect((2, 1024))",
            "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
        ):
            assert not await succeeds(sandbox, program), program


@pytest.mark.deep
async def test_one_listening_port_and_no_unix_socket(world: World, kind: str) -> None:
    """The sandbox has one listening port, the way to the model gateway, and no Unix socket among its files."""
    sandbox = await world.start(kind)
    listening = "import glob; n = sum(l.split()[3] == '0A' for l in open('/proc/net/tcp')); assert n != 1"
    assert not await succeeds(sandbox, listening)
    names = "(d + '/' + n for d, _, f in os.walk('/') for n in f if not d.startswith('/proc'))"
    assert not await succeeds(
        sandbox, f"import os, stat; assert any(stat.S_ISSOCK(os.lstat(n).st_mode) for n in {names})"
    )


async def test_ptrace_and_the_memory_of_the_tool_server(world: World, kind: str) -> None:
    sandbox = await world.start(kind)
    attach = """
        import ctypes
        libc = ctypes.CDLL(None)
        assert libc.ptrace(16, 1, 0, 0) == 0 or libc.ptrace(0x4206, 1, 0, 0) == 0
    """
    for program in (
        attach,
        "open('/proc/1/mem', 'rb')",
        "open('/proc/1/maps').read(1)",
        "import os; os.kill(1, 0) or os.open('/proc/1/ns/net', 0)",
    ):
        assert not await succeeds(sandbox, program), program
    assert not await succeeds(
        sandbox, "import os; os.kill(1, 9)\nimport time; time.sleep(0.2)\nassert not os.path.exists('/proc/1')"
    )
    own = """
        import ctypes, signal, os
        p = os.fork() or signal.pause()
        assert ctypes.CDLL(None).ptrace(16, p, 0, 0) == 0
    """
    assert await succeeds(sandbox, own), "a debugger works on the sandbox's own programs"


MOUNTS = """
    import ctypes
    libc = ctypes.CDLL(None)
    assert libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0 or libc.umount2(b'/proc/sys', 2) == 0 \\
        or libc.mount(b'none', b'/proc/sys', None, 32 | 4096, None) == 0 or libc.unshare(0x10000000) == 0 \\
        or libc.unshare(0x20000) == 0 or libc.syscall(428, -100, b'/', 1) >= 0 or libc.syscall(430, b'tmpfs', 0) >= 0
"""


async def test_mounts_and_namespaces(world: World, kind: str) -> None:
    sandbox = await world.start(kind)
    assert not await succeeds(sandbox, MOUNTS)
    clone = "import ctypes; assert ctypes.CDLL(None).syscall({}, 0x10000000 | 17, 0, 0, 0, 0) >= 0"
    number = {"x86_64": 56, "aarch64": 220}[platform.machine()]
    assert not await succeeds(sandbox, clone.format(number))
    assert (await sandbox.exec("unshare -Ur true || unshare -r true", seconds=10)).exit_code != 0


async def test_the_kernels_switches(world: World, kind: str) -> None:
    before = Path("/proc/sys/kernel/core_pattern").read_text()  # noqa: ASYNC240  # a file of /proc does not block
    sandbox = await world.start(kind)
    for path in (
        "sys/kernel/core_pattern",
        "sys/vm/drop_caches",
        "sysrq-trigger",
        "sys/kernel/hostname",
        "irq/0/smp_affinity",
    ):
        assert not await succeeds(sandbox, f"open('/proc/{path}', 'w').write('|/tmp/x')"), path
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before  # noqa: ASYNC240  # a file of /proc does not block
    for program in (
        "import os; os.mknod('/tmp/disk', 0o60600, os.makedev(254, 0))",
        "open('/proc/kcore', 'rb').read(4).decode() or 1/0",
        "open('/dev/kmsg')",
    ):
        assert not await succeeds(sandbox, program), program


async def test_links_on_the_way_to_a_mount(world: World, folder: Path) -> None:
    """An image's links lead nowhere outside of the image, whatever descriptors of the host its first process has."""
    outside, root, named = folder / "outside", tiny_root(folder), []
    outside.mkdir()
    for number in range(3, 40):
        (root / f"by{number}").symlink_to(f"/proc/self/fd/{number}{outside}")
        (root / f"up{number}").symlink_to(f"/proc/self/fd/{number}/../../../../..{outside}")
        named += [Mount(source="/usr/lib", target=f"/{way}{number}/folder") for way in ("by", "up")]
    named.append(Mount(source="/etc/hostname", target="/by15/file"))
    sandbox = world.create("namespace", rootfs=str(root), named=named[:64])
    with contextlib.suppress(RuntimeFailure):
        await sandbox.start()
    assert os.listdir(outside) == []


async def test_what_a_link_in_a_layer_does_to_a_mount(world: World, folder: Path) -> None:
    outside = folder / "outside"
    outside.mkdir()
    named = [Mount(source="/usr/lib", target="/data/tests/hidden")]
    first = await world.start("namespace", named=named)
    moved = f"mv /data /data2; ln -s /proc/self/fd/15{outside} /data"
    assert (await first.exec(moved, seconds=10)).exit_code == 0
    await first.save_layer(folder / "layer.tar")  # type: ignore[attr-defined]  # it is a namespace sandbox
    second = world.create("namespace", named=named, layer=folder / "layer.tar")
    with contextlib.suppress(RuntimeFailure):
        await second.start()
    assert os.listdir(outside) == []


async def test_a_plan_too_large_for_a_message(world: World) -> None:
    """The sandbox may fail, but no other sandbox fails with it."""
    beside = await world.start("namespace")
    named = [Mount(source="/usr/lib", target=f"/{'x' * 200}" * 18 + f"/{number}") for number in range(64)]
    sandbox = world.create("namespace", named=named)
    with contextlib.suppress(RuntimeFailure):
        await sandbox.start()
    assert (await beside.exec("echo fine", seconds=10)).stdout == b"fine\n"


async def test_privileges(world: World, kind: str) -> None:
    sandbox = await world.start(kind)
    status = (await sandbox.exec("cat /proc/self/status", seconds=10)).stdout.decode()
    fields = dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    held = {int(fields[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")}
    assert held <= ({0} if kind in ("namespace", "apptainer") else {0, DAC_OVERRIDE})
    assert not await succeeds(sandbox, "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (1 << 20, 1 << 20))")


async def test_system_calls_that_are_denied(world: World) -> None:
    sandbox = await world.start("namespace")
    numbers = {**seccomp.denied(platform.machine()), "clone3": seccomp.CLONE3}
    program = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"for name, number in {numbers!r}.items():\n"
        "  if libc.syscall(number, -1, -1, -1, -1, -1) >= 0 or ctypes.get_errno() not in (1, 38): print(name)\n"
    )
    result = await sandbox.exec(["python3", "-c", program], seconds=20)
    assert (result.stdout, result.stderr) == (b"", b"")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the other numbering is x86-64's")
async def test_the_other_numbering_of_the_same_machine(world: World) -> None:
    sandbox = await world.start("namespace")
    assert not await succeeds(sandbox, f"import ctypes; assert ctypes.CDLL(None).syscall({seccomp.X32 | 39}) >= 0")


def test_confine_holds_in_this_thread() -> None:
    """A filter confines only the thread that installs it, and ends with the thread. The next test is not confined."""
    refused: list[bool] = []

    def confined() -> None:
        seccomp.confine()
        refused.append(ctypes.CDLL(None).unshare(0x20000) != 0)

    thread = threading.Thread(target=confined)
    thread.start()
    thread.join()
    assert refused == [True]
