"""Sandboxes that are confined by Landlock, on a kernel that has Landlock: they reach no private files, other
processes or other sockets of the host, and ordinary programs work in them."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web

from outrider.errors import RuntimeFailure
from outrider.sandbox.runtimes.base import Runtime
from outrider.sandbox.runtimes.guest.isolation import landlock
from outrider.sandbox.runtimes.host_process.landlock import LandlockRuntime

from .world import World

MPTCP = 262
FASTOPEN = 0x20000000
IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
SENDMMSG = """
import ctypes, socket, struct
P, s, data = ctypes.c_void_p, socket.socket(), ctypes.create_string_buffer(b'GET', 3)
to = ctypes.create_string_buffer(struct.pack('=H', 2) + struct.pack('!H', {to}[1]) + socket.inet_aton('127.0.0.1'), 16)
part = ctypes.create_string_buffer(struct.pack('PN', ctypes.addressof(data), 3))
message = struct.pack('PIxxxxPNPNiIxxxx', ctypes.addressof(to), 16, ctypes.addressof(part), 1, 0, 0, 0, 0)
assert ctypes.CDLL(None).sendmmsg(s.fileno(), ctypes.create_string_buffer(message), 1, {flags}) == 1
"""


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


@pytest.mark.skipif(landlock.version() < landlock.NETWORK_SINCE, reason="this kernel's Landlock knows no TCP")
async def test_no_other_way_leads_to_a_port(sandbox: Runtime) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        to = other.getsockname()
        plain = "import socket; s = socket.socket(); "
        for program in (
            f"import socket; socket.socket(socket.AF_INET, socket.SOCK_STREAM, {MPTCP}).connect({to!r})",
            f"{plain} s.sendto(b'GET', {FASTOPEN}, {to!r})",
            f"{plain} s.sendmsg([b'GET'], [], {FASTOPEN}, {to!r})",
            SENDMMSG.format(to=to, flags=FASTOPEN),
            f"{plain} s.setsockopt(socket.IPPROTO_TCP, 30, 1); s.connect({to!r}); s.send(b'GET')",
        ):
            assert not await succeeds(sandbox, program), program


async def test_a_pair_of_sockets_sends_to_no_other(sandbox: Runtime, folder: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        path = str(folder / "other.sock")
        other.bind(path)
        other.setblocking(False)
        for kind in ("SOCK_DGRAM", "SOCK_RAW", "SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK"):
            program = f"import socket; socket.socketpair(socket.AF_UNIX, socket.{kind})[0].sendto(b'forged', {path!r})"
            assert not await succeeds(sandbox, program), kind
        with pytest.raises(BlockingIOError):
            other.recv(10)
    assert await succeeds(sandbox, "import socket as s; a, b = s.socketpair(s.AF_UNIX, s.SOCK_SEQPACKET); a.send(b'x')")


async def test_processes_of_the_host_keep_their_limits_and_their_turn(sandbox: Runtime) -> None:
    machine = os.uname().machine
    other = await asyncio.create_subprocess_exec("sleep", "60", start_new_session=True)
    pid = other.pid
    before = turn_of(pid)
    try:
        for program in (
            f"import resource; resource.prlimit({pid}, resource.RLIMIT_CPU, (5, 5))",
            f"import os; os.sched_setscheduler({pid}, os.SCHED_IDLE, os.sched_param(0))",
            f"import os; os.sched_setparam({pid}, os.sched_param(0))",
            f"import os; os.sched_setaffinity({pid}, [min(os.sched_getaffinity(0))])",
            f"import os; os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
            f"import os; os.setpriority(os.PRIO_PGRP, {os.getpgid(pid)}, 19)",
            f"import ctypes; assert ctypes.CDLL(None).syscall({IOPRIO_SET[machine]}, 1, {pid}, 3 << 13) == 0",
        ):
            assert not await succeeds(sandbox, program), program
        assert turn_of(pid) == before
    finally:
        other.kill()
        await other.wait()


def turn_of(pid: int) -> tuple[object, ...]:
    limits = resource.prlimit(pid, resource.RLIMIT_CPU)
    return limits, os.sched_getscheduler(pid), os.sched_getaffinity(pid), os.getpriority(os.PRIO_PROCESS, pid)


async def test_nothing_is_left_in_the_kernel(sandbox: Runtime) -> None:
    """The sandbox cannot make kernel objects that belong to no process, because they would outlive `stop`."""
    for call, undo in (
        ("shmget(0x0DDB0DE, 4096, 0o1600)", "shmctl(found, 0, None)"),
        ("semget(0x0DDB0DE, 1, 0o1600)", "semctl(found, 0, 0)"),
        ("msgget(0x0DDB0DE, 0o1600)", "msgctl(found, 0, None)"),
        ("mq_open(b'/outrider-x', 0o102, 0o600, None)", "mq_unlink(b'/outrider-x')"),
    ):
        program = f"import ctypes; libc = ctypes.CDLL(None); found = libc.{call}; assert found >= 0; libc.{undo}"
        assert not await succeeds(sandbox, program), call


async def test_ordinary_work_goes_on(world: World) -> None:
    async def hello(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    async with world.gateway(hello):
        sandbox = await world.start("process-landlock")
        for command in (
            "nice -n 3 true && renice -n 19 -g 0 && nice -n 1 true",
            "ulimit -n 50 && test $(ulimit -n) = 50",
            "! command -v taskset || taskset -c 0 true",
            "! command -v prlimit || { prlimit --pid $$ --nofile && prlimit --nofile=40 true; }",
            "! command -v git || { git init -q r && cd r && echo x > x && git add x && git -c user.name=a "
            "-c user.email=a@example.org commit -qm x && git log --oneline; }",
            f"! command -v curl || test $(curl -sS {sandbox.endpoint}) = hello",
        ):
            result = await sandbox.exec(command, seconds=20)
            assert result.exit_code == 0, (command, result.stderr)
        for program in (
            f"import urllib.request as u; assert u.urlopen({sandbox.endpoint!r}).read() == b'hello'",
            "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))",
            "import os; os.sched_setaffinity(0, os.sched_getaffinity(0)); os.nice(1)",
            "import multiprocessing as m; a, b = m.Pipe(); m.Process(target=a.send, args=[1]).start(); assert b.recv()",
            "import asyncio; asyncio.run(asyncio.sleep(0))",
            "import os; os.openpty()",
        ):
            assert await succeeds(sandbox, program), program
        shell = await sandbox.open_shell()
        assert (await shell.run("test -t 1 && echo yes", seconds=10)).output == "yes\n"


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
        "import sys; from outrider.sandbox.runtimes.guest.isolation.landlock import enter; "
        "enter(sys.argv[1:]); open('/etc/shadow')"
    )
    if not landlock.version():
        pytest.skip("this kernel has no Landlock")
    command = [sys.executable, "-c", program, "0", f"read={tmp_path}/none", f"read={sys.base_prefix}", "read=/usr"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert "PermissionError" in done.stderr
