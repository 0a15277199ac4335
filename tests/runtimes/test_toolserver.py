"""The tool server itself: its memory, its end, and its live shells."""

from __future__ import annotations

import asyncio
import marshal
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import RuntimeFailure
from outrider.sandbox.runtimes.base import MAX_OUTPUT, Runtime
from outrider.sandbox.runtimes.guest import child_reply
from outrider.sandbox.runtimes.guest.command import Capture
from outrider.sandbox.runtimes.guest.connection import Calls
from outrider.sandbox.runtimes.guest.shells.shell import OPEN_SECONDS, Bash, LiveShell
from outrider.sandbox.runtimes.host_process.process import server_process
from outrider.sandbox.runtimes.tool_server.bundle import COMPILING, compiled, program, server_command, shell_program
from outrider.sandbox.runtimes.tool_server.client import ExecDone
from outrider.sandbox.runtimes.tool_server.launch import RunningServer, ToolServerSetup

from .world import World

pytestmark = pytest.mark.timeout(180)

FLOOD = "echo first; head -c {} /dev/zero; echo last"
ROOM = 7 * MAX_OUTPUT
"""Bytes of memory for the kept output, including its copies while it is put together and sent."""


@pytest.fixture(params=["process", "namespace"])
async def sandbox(request: pytest.FixtureRequest, world: World) -> Runtime:
    return await world.start(request.param)


async def peak(sandbox: Runtime) -> int:
    """Return the peak memory of the tool server in bytes. The tool server is the parent of the programs that it
    starts."""
    status = (await sandbox.exec("cat /proc/$PPID/status", seconds=30)).stdout.decode()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return int(fields["VmHWM"].split()[0]) << 10


@pytest.mark.parametrize("size", [1 << 26, pytest.param(1 << 30, marks=pytest.mark.deep)], ids=["64 MiB", "1 GiB"])
async def test_much_output_takes_no_more_memory_than_is_kept(sandbox: Runtime, size: int) -> None:
    before = await peak(sandbox)
    out = (await sandbox.exec(FLOOD.format(size), seconds=120)).stdout
    assert (out[:6], out[-5:]) == (b"first\n", b"last\n")
    assert b"\n[... %d bytes cut ...]\n" % (size + 11 - MAX_OUTPUT) in out
    assert await peak(sandbox) - before < ROOM
    shell = await sandbox.open_shell()
    shown = (await shell.run(FLOOD.format(size // 2), seconds=120)).output
    assert (shown[:6], shown[-5:]) == ("first\n", "last\n")
    assert f"[... {size // 2 + 11 - MAX_OUTPUT} bytes cut ...]" in shown
    assert await peak(sandbox) - before < ROOM
    assert (await shell.run("echo fine", seconds=30)).output == "fine\n"


@pytest.mark.deep
async def test_a_flood_ends_at_its_time_limit(sandbox: Runtime) -> None:
    for kind, text in (("bash", "cat /dev/zero"), ("python", "while True: print('x' * 1000)")):
        shell = await sandbox.open_shell(kind)  # type: ignore[arg-type]  # one of the literals
        late = await shell.run(text, seconds=0.5)
        assert late.timed_out
        assert len(late.output) < MAX_OUTPUT + 10_000
        assert (await shell.run("1" if kind == "python" else "echo 1", seconds=30)).output == "1\n"


async def test_binary_output(sandbox: Runtime) -> None:
    every = bytes(range(256))
    await sandbox.write("every", every)
    result = await sandbox.exec("cat every; cat every >&2", seconds=30)
    assert (result.stdout, result.stderr) == (every, every)


def a_server(bytecode: bytes, folder: Path, lifetime: float = 0) -> AbstractAsyncContextManager[RunningServer]:
    setup = ToolServerSetup(env={"PATH": os.defpath}, workdir=str(folder), subreaper=True, lifetime=lifetime)
    return server_process("test", server_command(sys.executable), bytecode, setup)


def dead(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


@pytest.mark.deep
async def test_a_server_ends_itself_and_all_it_started_after_its_lifetime(tmp_path: Path) -> None:
    bytecode = await asyncio.to_thread(compiled, (sys.executable,))
    async with a_server(bytecode, tmp_path, lifetime=2) as server:
        args: dict[str, Any] = {
            "argv": [],
            "script": "echo $$ > pid; setsid sleep 3030 & echo $! > child; wait",
            "env": {},
        }
        args |= {"name": "", "cwd": str(tmp_path), "stdin": b"", "ms": 60_000, "cap": 1000, "merged": False}
        with pytest.raises(RuntimeFailure, match="end of its lifetime"):
            await server.tools.call("exec", args, ExecDone)
        async with asyncio.timeout(30):
            while server.tools.loss is None:  # noqa: ASYNC110  # the connection ends when the server dies
                await asyncio.sleep(0.01)
        assert all(dead((tmp_path / name).read_text().strip()) for name in ("pid", "child"))


@pytest.mark.deep
async def test_what_a_server_cannot_kill_the_host_kills(tmp_path: Path) -> None:
    harmless = program().replace("SIGKILL", "SIGCONT")
    bytecode = marshal.dumps(compile(harmless, "toolserver", "exec", dont_inherit=True))
    async with a_server(bytecode, tmp_path) as server:
        args: dict[str, Any] = {"argv": [], "script": "setsid sleep 3031 > /dev/null 2>&1 & echo $! > pid", "env": {}}
        args |= {"name": "", "cwd": str(tmp_path), "stdin": b"", "ms": 60_000, "cap": 1000, "merged": False}
        await server.tools.call("exec", args, ExecDone)
    assert dead((tmp_path / "pid").read_text().strip())


async def test_a_program_that_is_being_compiled_holds_up_nothing_else(world: World) -> None:
    sandbox = await world.start("process")
    shell_program.cache_clear()
    with COMPILING:
        async with asyncio.TaskGroup() as group:
            opening = group.create_task(sandbox.open_shell("python"))
            assert (await sandbox.exec("echo meanwhile", seconds=30)).stdout == b"meanwhile\n"
            assert not opening.done()
            COMPILING.release()
            shell = await opening
            await asyncio.to_thread(COMPILING.acquire)
    assert (await shell.run("1 + 1", seconds=30)).output == "2\n"


async def test_without_a_python_there_is_no_live_one(world: World) -> None:
    sandbox = await world.start("process", env={"PATH": "/nowhere"})
    shell = await sandbox.open_shell("python")  # the interpreter that runs the server
    assert (await shell.run("1 + 1", seconds=30)).output == "2\n"


@pytest.mark.deep
async def test_an_interpreter_that_is_started_anew_keeps_the_output(sandbox: Runtime) -> None:
    shell = await sandbox.open_shell("python")
    stubborn = "import time\nwhile True:\n  try: time.sleep(9)\n  except BaseException: pass"
    late = await shell.run(f"print('first')\n{stubborn}", seconds=0.5)
    assert late.timed_out
    assert late.output.startswith("first\n")
    assert "state is lost" in late.output
    assert (await shell.run("print('x' * 5000); 1 + 1", seconds=30)).output == "x" * 5000 + "\n2\n"


@pytest.mark.deep
@pytest.mark.parametrize("when", ["at once", "when it is ready"])
async def test_an_interpreter_that_sends_nonsense_is_not_started_for_ever(
    world: World, tmp_path: Path, when: str
) -> None:
    """An agent may have replaced `python3`. The host must neither wait for it nor blame the sandbox."""
    # Both frames arrive in one read, so that no input runs when the second one is read.
    ready = "\\0\\0\\0\\14\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0" if when != "at once" else ""
    starts = tmp_path / "starts"
    (tmp_path / "python3").write_text(f"#!/bin/sh\necho x >> {starts}\nprintf '{ready}aaaaaaaa' >&4\nexec sleep 60\n")
    (tmp_path / "python3").chmod(0o755)
    sandbox = await world.start("process", env={"PATH": f"{tmp_path}:{os.defpath}"})
    async with asyncio.timeout(60):
        shell = await sandbox.open_shell("python")
    if when == "at once":  # the interpreter that runs the server takes its place
        assert (await shell.run("1 + 1", seconds=30)).output == "2\n"
    else:
        with pytest.raises(RuntimeFailure, match="the shell is gone"):
            await shell.run("1 + 1", seconds=30)
    assert starts.read_text() == "x\n"
    assert (await sandbox.exec("true", seconds=10)).exit_code == 0


async def test_a_folder_that_cannot_be_made_holds_up_nothing(sandbox: Runtime, tmp_path: Path) -> None:
    """In /proc, the kernel refuses a new folder with the error that also a missing parent folder has."""
    (tmp_path / "file").touch()
    async with asyncio.timeout(60):
        with pytest.raises(RuntimeFailure, match="No such file") as refused:
            await sandbox.write("/proc/none/x/file", b"")
        assert refused.value.inside
        with pytest.raises(RuntimeFailure, match="No such file") as refused:
            await sandbox.upload(tmp_path, "/proc/none/x")
        assert refused.value.inside
        assert (await sandbox.exec("true", seconds=10)).exit_code == 0


async def test_names_that_are_not_utf_8_reach_the_sandbox(sandbox: Runtime, tmp_path: Path) -> None:
    """An agent may give a file any name. The names that are found have surrogate escapes, and evaluators pass them
    on."""
    made = await sandbox.exec("mkdir $'d\\xff' && echo x > $'d\\xff/file' && printf '%s' d*", seconds=10)
    name = made.stdout.decode("utf-8", "surrogateescape")
    assert name == "d\udcff"
    assert await sandbox.glob("d*/*") == await sandbox.glob(f"{name}/*") == [f"{name}/file"]
    await sandbox.snapshot([name], tmp_path / "archive")
    assert (await sandbox.exec(["rm", "-r", name], seconds=10)).exit_code == 0
    await sandbox.restore(tmp_path / "archive", [name])
    assert await sandbox.read(f"{name}/file") == b"x\n"
    await sandbox.write(f"{name}/other", b"y")
    assert (await sandbox.exec(["cat", "other"], cwd=name, seconds=10)).stdout == b"y"
    with pytest.raises(RuntimeFailure, match="cannot send"):
        await sandbox.read("\ud800")  # no bytes are written so


async def test_programs_ignore_no_signal_that_the_service_ignores(world: World) -> None:
    """`nohup` ignores SIGHUP, and a shell without job control SIGQUIT in the background."""
    signals = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    before = [signal.signal(number, signal.SIG_IGN) for number in signals]
    try:
        sandboxes = [await world.start(kind) for kind in ("process", "namespace")]
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
    for sandbox in sandboxes:
        ended = [(await sandbox.exec(["sh", "-c", f"kill -{number:d} $$"], seconds=10)).exit_code for number in signals]
        assert ended == [128 + number for number in signals]


async def test_an_archive_that_is_barely_too_large_is_not_cut_off(
    sandbox: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is below the limit, and its archive above."""
    monkeypatch.setattr("outrider.sandbox.runtimes.tool_server.sandbox.MAX_SNAPSHOT", 101_000)
    await sandbox.write("file", b"x" * 100_000)
    for _ in range(10):  # the child that packs the file may end before or after its pipe is read
        with pytest.raises(RuntimeFailure, match="the maximum taken out of a sandbox") as refused:
            await sandbox.snapshot(["file"], tmp_path / "archive")
        assert refused.value.inside
        assert not (tmp_path / "archive").exists()


TRACED = "import ctypes, os; ctypes.CDLL(None).ptrace(0, 0, 0, 0); os.kill(os.getpid(), 1); print('goes on')"


async def test_a_program_that_is_stopped_for_its_parent_has_not_ended(sandbox: Runtime) -> None:
    """After PTRACE_TRACEME, each signal stops the program until its parent, the tool server, continues it."""
    result = await sandbox.exec(
        ["python3", "-c", f"open('pid', 'w').write(str(__import__('os').getpid())); {TRACED}"], seconds=20
    )
    assert result.exit_code == 128 + 9
    assert (await sandbox.exec("test -e /proc/$(cat pid)", seconds=10)).exit_code == 1


class StillLoop:
    """A loop in which nothing happens by itself. It is also the connection of its calls."""

    def __init__(self) -> None:
        self.timers: dict[object, tuple[float, Callable[[], object]]] = {}
        self.exits: dict[int, object] = {}
        self.sent: list[object] = []
        self.outgoing = b""

    def at(self, key: object, seconds: float, action: Callable[[], object]) -> None:
        self.timers[key] = (seconds, action)

    def watch(self, *words: object) -> None: ...
    def unwatch(self, *words: object) -> None: ...
    def send(self, message: object) -> None:
        self.sent.append(message)


def test_a_child_that_has_ended_is_neither_believed_beyond_its_limit_nor_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(child_reply, "send_signal", lambda pid, number: killed.append(pid))
    loop = StillLoop()
    calls = Calls(loop, loop)  # type: ignore[arg-type]  # stands for both
    reply = child_reply.ChildReply(calls, 1, lambda fd: os.write(fd, b"too much"), limit=4, failed="it failed")
    os.waitpid(reply.pid, 0)
    reply._exited(0)
    reply.cancel()
    reply._ready(0)
    reply._ready(0)
    too_large = "the result has more than 4 bytes, the maximum taken out of a sandbox"
    assert loop.sent == [[1, "error", {"code": "failed", "text": too_large}]]
    assert killed == []  # another process may have its id by now


def test_an_interpreter_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "python3").write_text("#!/bin/sh\necho loading; exec /bin/sleep 1000\n")
    (tmp_path / "python3").chmod(0o755)
    loop = StillLoop()
    calls = Calls(loop, loop)  # type: ignore[arg-type]  # as much of both as a shell uses
    calls.base_env = {"PATH": str(tmp_path)}
    shell = LiveShell(calls, 7, {"kind": "ipython", "cwd": "/", "program": "", "fallback": []})
    pid = shell.pid
    while not shell.capture.head:
        shell.drain()
    seconds, give_up = loop.timers[shell]
    assert (seconds, loop.sent) == (OPEN_SECONDS, [])
    give_up()
    assert loop.sent == [[7, "ok", {"shell": None, "why": b"loading\n[not ready after 25 seconds]"}]]
    assert (shell.dead, shell.descriptors, loop.timers, loop.exits) == (True, set(), {}, {})
    assert os.waitpid(pid, 0)[1] == 9


class Listening:
    """The part of a shell that its program uses, in the shell's third input."""

    def __init__(self) -> None:
        self.sequence, self.call = 3, 1
        self.capture, self.codes = Capture(1 << 20), list[int | None]()

    def finish(self, code: int | None) -> None:
        self.codes.append(code)


ODD = st.lists(
    st.sampled_from([b"\x1e", b"\x1etok.", b"\x1etok.3:", b"\x1etok.3:x\x1e", b"\x1etok.2:1\x1e", b"text" * 9])
)


@given(ODD, st.integers(1, 50), st.booleans())
def test_whatever_looks_like_the_end_of_an_input_the_real_one_is_found(odd: list[bytes], step: int, far: bool) -> None:
    """An input can read its own end mark, and print half of it."""
    shell = Listening()
    bash = Bash(shell)  # type: ignore[arg-type]  # as much of a shell as it uses
    bash.token, bash.begun = b"tok", True
    out = b"".join(odd) + b"." * (100 if far else 0)
    whole = out + b"\x1etok.3:17\x1e"
    for at in range(0, len(whole), step):
        bash.take(whole[at : at + step])
        assert len(bash.pending) < 64 + step
    if not out.endswith(b"\x1etok.3:"):
        assert (shell.codes, shell.capture.take()) == ([17], out)
