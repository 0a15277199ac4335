"""What a fence of Landlock keeps in, on a kernel that has it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web

from outrider.errors import RuntimeFailure
from outrider.runtimes.base import Runtime
from outrider.runtimes.inside import landlock
from outrider.runtimes.landlock import LandlockRuntime

from .world import World


@pytest.fixture
async def sandbox(world: World) -> Runtime:
    return await world.start("process-landlock")


async def succeeds(sandbox: Runtime, program: str) -> bool:
    result = await sandbox.exec(["python3", "-c", program], seconds=20)
    assert result.exit_code in (0, 1), result.stderr.decode()
    return result.exit_code == 0


async def test_writes_stay_in_its_own_directory(sandbox: Runtime, folder: Path) -> None:
    for path in (
        folder / "x",
        "/tmp/outrider-x",
        "/etc/x",
        "/usr/x",
        "/proc/sys/kernel/core_pattern",
        Path.home() / "x",
    ):
        assert not await succeeds(sandbox, f"open({str(path)!r}, 'a').write('x')"), path
    assert await succeeds(sandbox, "open('x', 'w').write('x')")
    assert await succeeds(sandbox, "import tempfile; tempfile.TemporaryFile().write(b'x')")


async def test_what_is_private_is_not_read(sandbox: Runtime, folder: Path) -> None:
    (folder / "secret").write_text("s3cret")
    for path in (
        folder / "secret",
        "/etc/shadow",
        "/root/.bashrc",
        "/var/lib/dpkg/status",
        f"/proc/{os.getpid()}/environ",
    ):
        assert not await succeeds(sandbox, f"open({str(path)!r}).read(1) or 1 / 0"), path
    assert not await succeeds(sandbox, f"import os; os.listdir({str(folder)!r})")


async def test_other_processes_are_neither_signalled_nor_traced(sandbox: Runtime) -> None:
    pid = os.getpid()
    assert not await succeeds(sandbox, f"import ctypes; assert ctypes.CDLL(None).ptrace(0x4206, {pid}, 0, 0) == 0")
    await sandbox.exec(["python3", "-c", "import os; os.kill(0, 9)"], seconds=10)
    assert (await sandbox.exec("echo alive", seconds=10)).stdout == b"alive\n"


@pytest.mark.skipif(landlock.version() < landlock.SCOPES_SINCE, reason="this kernel's Landlock has no scopes")
async def test_a_signal_to_all_ends_the_sandbox_alone(sandbox: Runtime) -> None:
    assert not await succeeds(sandbox, f"import os; os.kill({os.getpid()}, 0)")
    with pytest.raises(RuntimeFailure, match="gone"):
        await sandbox.exec(["python3", "-c", "import os; os.kill(-1, 9)"], seconds=10)


async def test_sockets_of_other_programs_are_not_reached(sandbox: Runtime, folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        other.bind(str(folder / "s0/other.sock"))
        other.listen()
        datagrams.bind(("127.0.0.1", 0))
        port = datagrams.getsockname()[1]
        for program in (
            f"import socket; socket.socket(socket.AF_UNIX).connect({str(folder / 's0/other.sock')!r})",
            f"import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
            "import socket; socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)",
            "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
        ):
            assert not await succeeds(sandbox, program), program
    assert await succeeds(sandbox, "import socket; a, b = socket.socketpair(); a.send(b'x'); assert b.recv(1)")
    assert await succeeds(sandbox, "import socket; socket.create_server(('127.0.0.1', 0))")


async def test_only_the_gateway_is_reached(world: World) -> None:
    async def hello(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    async with world.gateway(hello):
        sandbox = await world.start("process-landlock")
        ask = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read())"
        result = await sandbox.exec(["python3", "-c", ask, sandbox.endpoint], seconds=20)
        assert result.stdout == b"b'hello'\n"
        if landlock.version() >= landlock.NETWORK_SINCE:
            with socket.create_server(("127.0.0.1", 0)) as other:
                port = other.getsockname()[1]
                program = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
                assert not await succeeds(sandbox, program)


async def test_it_has_no_privileges(sandbox: Runtime) -> None:
    status = (await sandbox.exec("cat /proc/self/status", seconds=10)).stdout.decode()
    fields = dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)
    assert (fields["NoNewPrivs"], fields["Seccomp"], int(fields["CapEff"], 16)) == ("1", "2", 0)
    assert (await sandbox.exec("unshare -r true", seconds=10)).exit_code != 0


def test_a_kernel_without_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "version", lambda: 0)
    found = LandlockRuntime.available()
    assert not found.ok
    assert "has none" in found.detail


def test_missing_paths_are_passed_over(tmp_path: Path) -> None:
    program = (
        "import sys; from outrider.runtimes.inside import landlock; landlock.enter(sys.argv[1:]); open('/etc/shadow')"
    )
    command = [sys.executable, "-c", program, "0", f"read={tmp_path}/none", f"read={sys.base_prefix}", "read=/usr"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if landlock.version():
        assert "PermissionError" in done.stderr
