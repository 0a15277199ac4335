"""The contract of `Runtime`, on all runtimes. Tests with the fixture `real` need real processes, which the memory
runtime does not have."""

from __future__ import annotations

import asyncio
import io
import tarfile
import time
from collections.abc import Awaitable
from pathlib import Path

import pytest

from outrider.errors import RuntimeFailure
from outrider.sandbox.runtimes.base import MAX_OUTPUT, ListsProcesses, ReportsCommands, Runtime, SandboxProcess
from outrider.sandbox.runtimes.command_feed import CommandRun
from outrider.sandbox.runtimes.kernel.process_marks import mark_of, marked

from .world import IN_CONTAINERS, IN_E2B, POD, World, snapshot

LANDLOCK = pytest.param("process-landlock", marks=pytest.mark.deep)  # the runtime "process" with a filter of paths
ALL = ["process", LANDLOCK, "namespace", "memory", IN_E2B, *IN_CONTAINERS, POD]
REAL = ["process", LANDLOCK, "namespace", IN_E2B, *IN_CONTAINERS, POD]


@pytest.fixture(params=ALL)
async def sandbox(request: pytest.FixtureRequest, world: World) -> Runtime:
    return await world.start(request.param, env={"COLOUR": "blue"})


@pytest.fixture(params=REAL)
async def real(request: pytest.FixtureRequest, world: World) -> Runtime:
    return await world.start(request.param, env={"COLOUR": "blue"})


async def text(sandbox: Runtime, command: str, **options: object) -> str:
    result = await sandbox.exec(command, seconds=10, **options)  # type: ignore[arg-type]  # options of any type
    return result.stdout.decode()


async def alive(sandbox: Runtime, needle: str) -> bool:
    """Return whether a process `sleep NEEDLE` of this sandbox lives, as seen from inside. A sandbox without process ids
    of its own also sees processes of other sandboxes, including those of other workers, but they have other working
    directories."""
    probe = (
        "import glob,os,sys\n"
        "for p in glob.glob('/proc/[0-9]*'):\n"
        "  try: c=open(p+'/cmdline','rb').read().split(b'\\0'); own=os.readlink(p+'/cwd')==os.getcwd()\n"
        "  except OSError: continue\n"
        f"  if own and c[:2]==[b'sleep',b'{needle}']: sys.exit(0)\n"
        "sys.exit(1)"
    )
    return (await sandbox.exec(["python3", "-c", probe], seconds=10)).exit_code == 0


async def test_exit_code_and_streams(sandbox: Runtime) -> None:
    result = await sandbox.exec("echo out; echo err >&2; exit 7", seconds=10)
    assert (result.exit_code, result.stdout, result.stderr) == (7, b"out\n", b"err\n")
    assert not result.timed_out
    assert result.seconds > 0


async def test_a_sequence_is_not_parsed_by_a_shell(sandbox: Runtime) -> None:
    result = await sandbox.exec(["echo", "$COLOUR; exit 3"], seconds=10)
    assert (result.exit_code, result.stdout) == (0, b"$COLOUR; exit 3\n")


async def test_commands_are_announced(sandbox: Runtime) -> None:
    assert isinstance(sandbox, ReportsCommands)
    seen: list[CommandRun] = []
    begun = asyncio.Event()

    def note(run: CommandRun) -> None:
        seen.append(run)
        if run.text == "sleep 60":
            begun.set()

    unsubscribe = sandbox.commands.subscribe(note)
    before = time.time()
    await sandbox.exec(["sh", "-c", "exit 4"], seconds=10)
    shell = await sandbox.open_shell()
    await shell.run("exit 0", seconds=10)
    stuck = asyncio.create_task(sandbox.exec("sleep 60", seconds=60))
    await begun.wait()
    stuck.cancel()
    await asyncio.wait([stuck])
    unsubscribe()
    await sandbox.exec("true", seconds=10)
    assert [(run.number, run.text, run.exit_code, run.end is None) for run in seen] == [
        (1, "sh -c 'exit 4'", None, True),
        (1, "sh -c 'exit 4'", 4, False),
        (2, "exit 0", None, True),
        (2, "exit 0", 0, False),
        (3, "sleep 60", None, True),
        (3, "sleep 60", None, False),
    ]
    times = [run.start for run in seen[::2]] + [run.end for run in seen[1::2]]
    assert all(before <= moment <= time.time() for moment in times if moment is not None)
    assert before <= seen[0].start <= (seen[1].end or 0) <= seen[2].start


@pytest.mark.parametrize("kind", ["namespace", *IN_CONTAINERS, POD])
async def test_processes_are_listed(world: World, kind: str) -> None:
    sandbox = await world.start(kind)
    assert isinstance(sandbox, ListsProcesses)
    await sandbox.processes()  # the first call starts the watch
    running = asyncio.create_task(sandbox.exec("sleep 1.4; sleep 60 & sleep 0.3; exit 5", seconds=30))
    found: dict[int, SandboxProcess] = {}
    before = time.time()

    def named(command: str) -> SandboxProcess | None:
        return next((process for process in found.values() if process.command == command), None)

    async with asyncio.timeout(20):
        while (last := named("sleep 0.3")) is None or last.end is None or not running.done():
            found |= {process.pid: process for process in await sandbox.processes()}
            await asyncio.sleep(0.05)
        found |= {process.pid: process for process in await sandbox.processes()}
    first, rest = named("sleep 1.4"), named("sleep 60")
    shell = next(process for process in found.values() if process.command.endswith("exit 5"))
    assert first is not None
    assert rest is not None
    assert shell.exit_code == 5
    assert first.parent == last.parent == shell.pid
    assert before - 1 <= shell.start <= first.start + 0.1 <= rest.start + 0.2
    assert 1.2 <= (first.end or 0) - first.start <= 3
    assert rest.end is None
    assert await sandbox.processes() == []  # each change is reported once


LATE = """
import os, sys, time
if os.fork() == 0:
    time.sleep(0.7)
    os.execvp(sys.argv[1], sys.argv[1:])
os.wait()
"""


@pytest.mark.deep
@pytest.mark.parametrize("program", [["sleep", "2"], ["python3", "-c", "import time; time.sleep(2)"]])
async def test_a_process_that_starts_its_program_late_has_the_programs_command_line(
    world: World, program: list[str]
) -> None:
    """On an overloaded machine, a fork is often seen before it has started its program. Both may have the same name."""
    sandbox = await world.start("namespace")
    assert isinstance(sandbox, ListsProcesses)
    await sandbox.processes()
    running = asyncio.create_task(sandbox.exec(["python3", "-c", LATE, *program], seconds=30))
    commands: dict[int, list[str]] = {}
    async with asyncio.timeout(20):
        while not (found := [names for names in commands.values() if names[-1] == " ".join(program)]):
            for process in await sandbox.processes():
                commands.setdefault(process.pid, []).append(process.command)
            await asyncio.sleep(0.05)
    [names] = found
    assert names[0].startswith("python3 -c \nimport os")
    assert (await running).exit_code == 0


FLIPS = """
import os, sys, time
time.sleep(0.06)
if (left := int(sys.argv[1])):
    os.execvp("python3", ["python3", "-c", sys.argv[2], str(left - 1), sys.argv[2]])
"""


@pytest.mark.deep
async def test_a_process_that_starts_programs_all_the_time_does_not_fill_the_timeline(world: World) -> None:
    sandbox = await world.start("namespace")
    assert isinstance(sandbox, ListsProcesses)
    await sandbox.processes()
    running = asyncio.create_task(sandbox.exec(["python3", "-c", FLIPS, "40", FLIPS], seconds=60))
    reports = 0
    while not running.done():
        reports += sum("sys.argv[1]" in process.command for process in await sandbox.processes())
        await asyncio.sleep(0.05)
    assert (await running).exit_code == 0
    assert 2 <= reports <= 15


@pytest.mark.deep
async def test_a_crowd_of_processes_does_not_hold_up_the_tool_server(world: World) -> None:
    sandbox = await world.start("namespace")
    assert isinstance(sandbox, ListsProcesses)
    await sandbox.exec("for i in $(seq 150); do sleep 4 & done", seconds=30)
    began = time.monotonic()
    for _ in range(20):
        assert len(await sandbox.processes()) <= 101
        assert (await sandbox.exec("true", seconds=10)).exit_code == 0
    assert time.monotonic() - began < 4
    await asyncio.sleep(5)
    await sandbox.exec("sleep 0.5", seconds=10)
    assert "sleep 0.5" in [process.command for process in await sandbox.processes()]


async def test_unknown_command_is_127(sandbox: Runtime) -> None:
    by_shell = await sandbox.exec("no-such-program-x", seconds=10)
    direct = await sandbox.exec(["no-such-program-x"], seconds=10)
    assert by_shell.exit_code == direct.exit_code == 127
    assert b"no-such-program-x" in direct.stderr


async def test_environment(sandbox: Runtime) -> None:
    assert await text(sandbox, "echo $COLOUR $SIZE", env={"SIZE": "big"}) == "blue big\n"
    assert await text(sandbox, "echo $COLOUR", env={"COLOUR": "red"}) == "red\n"


async def test_working_directory(sandbox: Runtime) -> None:
    await sandbox.exec("mkdir -p a/b", seconds=10)
    await sandbox.exec("echo here > mark", cwd="a/b", seconds=10)
    assert await sandbox.read("a/b/mark") == b"here\n"
    assert await sandbox.read("/work/a/b/mark") == b"here\n"
    assert await text(sandbox, "cat mark", cwd="/work/a/b") == "here\n"
    assert (await sandbox.exec("true", cwd="missing", seconds=10)).exit_code == 127


async def test_stdin_reaches_the_command_and_ends(sandbox: Runtime) -> None:
    data = bytes(range(256)) * 1000
    assert (await sandbox.exec("cat", stdin=data, seconds=10)).stdout == data
    assert (await sandbox.exec("cat", seconds=10)).stdout == b""


async def test_time_limit(sandbox: Runtime) -> None:
    result = await sandbox.exec("sleep 30", seconds=0.1)
    assert result.timed_out
    assert result.exit_code is None
    assert result.seconds < 30
    assert await text(sandbox, "echo fine") == "fine\n"


async def test_cancelled_exec_leaves_the_sandbox_usable(sandbox: Runtime) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await sandbox.exec("sleep 30", seconds=60)
    assert await text(sandbox, "echo fine") == "fine\n"


async def test_many_calls_at_once(sandbox: Runtime) -> None:
    async with asyncio.TaskGroup() as group:
        slow = group.create_task(sandbox.exec("sleep 0.2; echo slow", seconds=10))
        quick = [group.create_task(sandbox.exec(f"echo {n}", seconds=10)) for n in range(8)]
    assert [task.result().stdout for task in quick] == [b"%d\n" % n for n in range(8)]
    assert slow.result().stdout == b"slow\n"


async def test_missing_file_reads_like_cat_says(sandbox: Runtime) -> None:
    result = await sandbox.exec("cat x", seconds=10)
    assert (result.exit_code, result.stderr) == (1, b"cat: x: No such file or directory\n")


async def test_write_makes_folders_and_replaces(sandbox: Runtime) -> None:
    data = bytes(range(256))
    await sandbox.write("new/folder/file", b"longer than what follows" * 100)
    await sandbox.write("new/folder/file", data)
    assert await sandbox.read("new/folder/file") == data
    await sandbox.write("empty", b"")
    assert await sandbox.read("empty") == b""
    await sandbox.write("..notes", b"here")  # this path does not lead upwards
    assert (await sandbox.exec("cat ..notes", seconds=10)).stdout == b"here"


async def test_read_says_what_is_wrong(sandbox: Runtime) -> None:
    await sandbox.write("folder/file", b"12345")
    with pytest.raises(FileNotFoundError):
        await sandbox.read("missing")
    with pytest.raises(FileNotFoundError):
        await sandbox.read("folder/file/missing")
    with pytest.raises(IsADirectoryError):
        await sandbox.read("folder")
    assert await sandbox.read("folder/file", limit=5) == b"12345"
    with pytest.raises(RuntimeFailure, match="larger"):
        await sandbox.read("folder/file", limit=4)


async def test_writing_over_a_folder_fails(sandbox: Runtime) -> None:
    await sandbox.write("folder/file", b"")
    with pytest.raises(RuntimeFailure):
        await sandbox.write("folder", b"")


async def test_upload_of_a_file_and_of_a_tree(sandbox: Runtime, tmp_path: Path) -> None:
    (tmp_path / "tree/deep").mkdir(parents=True)
    (tmp_path / "tree/deep/data").write_bytes(b"\0\xff")
    (tmp_path / "tree/link").symlink_to("deep/data")
    await sandbox.upload(tmp_path / "tree/deep/data", "one")
    await sandbox.upload(tmp_path / "tree", "all")
    assert await sandbox.read("one") == b"\0\xff"
    assert await sandbox.read("all/deep/data") == b"\0\xff"
    assert await sandbox.read("all/link") == b"\0\xff"


async def test_upload_refuses_links_that_leave(sandbox: Runtime, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/up").symlink_to("../secret")
    (tmp_path / "itself").symlink_to("secret")
    for source in ("tree", "itself", "missing"):
        with pytest.raises(RuntimeFailure, match="cannot upload"):
            await sandbox.upload(tmp_path / source, "x")


async def test_snapshot(sandbox: Runtime, tmp_path: Path) -> None:
    await sandbox.write("out/a.bin", b"\1\2")
    await sandbox.write("out/sub/b.txt", b"b")
    paths = ["out", "/work/out/a.bin", "not-there", "out/../out/sub"]
    with tarfile.open(fileobj=io.BytesIO(await snapshot(sandbox, tmp_path, *paths))) as archive:
        files = {m.name: archive.extractfile(m).read() for m in archive if m.isreg()}
    assert files == {"work/out/a.bin": b"\1\2", "work/out/sub/b.txt": b"b"}


async def test_shell_keeps_its_state(sandbox: Runtime) -> None:
    shell = await sandbox.open_shell()
    assert (await shell.run("mkdir d; cd d; export X='a b'; Y=2", seconds=10)).exit_code == 0
    result = await shell.run('echo "$X" $Y; pwd', seconds=10)
    assert result.output.splitlines()[0] == "a b 2"
    assert result.output.splitlines()[1].endswith("/work/d")
    failed = await shell.run("cat nothing", seconds=10)
    assert (failed.exit_code, failed.output) == (1, "cat: nothing: No such file or directory\n")
    assert (await shell.run("echo $?", seconds=10)).output == "1\n"
    await shell.close()
    with pytest.raises(RuntimeFailure):
        await shell.run("true", seconds=10)


async def test_shell_survives_bad_syntax_and_time_limits(sandbox: Runtime) -> None:
    shell = await sandbox.open_shell()
    await shell.run("X=kept", seconds=10)
    assert (await shell.run("echo 'open", seconds=10)).exit_code == 2
    late = await shell.run("echo before; sleep 30; echo after", seconds=1)
    assert late.timed_out
    assert late.exit_code is None
    assert late.output.splitlines()[0] == "before"
    assert "after" not in late.output
    assert (await shell.run("echo $X", seconds=10)).output == "kept\n"


async def test_inputs_given_at_once_run_one_after_another(sandbox: Runtime) -> None:
    shell = await sandbox.open_shell()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(shell.run(f"sleep 0.01; echo {n}", seconds=10)) for n in range(3)]
    assert [task.result().output for task in tasks] == ["0\n", "1\n", "2\n"]


async def test_shell_that_exits_is_gone(sandbox: Runtime) -> None:
    shell = await sandbox.open_shell()
    assert (await shell.run("exit 4", seconds=10)).exit_code == 4
    with pytest.raises(RuntimeFailure):
        await shell.run("true", seconds=10)


async def test_stop_twice_and_calls_afterwards(sandbox: Runtime) -> None:
    shell = await sandbox.open_shell()
    await sandbox.stop()
    await sandbox.stop()
    for call in (sandbox.exec("true", seconds=1), sandbox.read("x"), shell.run("true", seconds=1), sandbox.start()):
        with pytest.raises(RuntimeFailure):
            await call


async def test_stop_while_a_command_runs(sandbox: Runtime) -> None:
    async def run() -> None:
        with pytest.raises(RuntimeFailure):
            await sandbox.exec("sleep 30", seconds=60)

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(run())
        await sandbox.exec("true", seconds=10)
        await sandbox.stop()


@pytest.mark.parametrize("kind", ALL)
async def test_stop_without_start(world: World, kind: str) -> None:
    runtime = world.create(kind)
    await runtime.stop()
    with pytest.raises(RuntimeFailure):
        await runtime.start()


@pytest.mark.parametrize("kind", REAL)
async def test_stop_survives_cancellation(world: World, kind: str) -> None:
    runtime = await world.start(kind)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(runtime.stop())
        await asyncio.sleep(0)
        task.cancel()
    with pytest.raises(RuntimeFailure):
        await runtime.exec("true", seconds=1)


@pytest.mark.parametrize("kind", REAL)
async def test_stop_while_it_starts(world: World, kind: str) -> None:
    for pause in (0, 0.001, 0.005, 0.05, 0.2):
        runtime = world.create(kind)
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            started = group.create_task(outcome(runtime.start()))
            await asyncio.sleep(pause)
            await runtime.stop()
        assert started.result() in ("done", "RuntimeFailure")
        with pytest.raises(RuntimeFailure):
            await runtime.exec("true", seconds=1)
        assert not marked(f"{mark_of(world.folder / f's{len(world.made) - 1}')}:")


async def outcome(work: Awaitable[None]) -> str:
    """Return how the work ended: the name of its error, or `done`."""
    try:
        await work
    except RuntimeFailure as error:
        return type(error).__name__
    return "done"


# Tests that need real processes.


async def test_signals(real: Runtime) -> None:
    assert (await real.exec("kill -TERM $$", seconds=10)).exit_code == 128 + 15
    assert (await real.exec(["sleep", "x"], seconds=10)).exit_code == 1


async def test_clean_environment(real: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_SECRET", "s3cret")
    assert "s3cret" not in await text(real, "env; cat /proc/self/environ")


async def test_limit_kills_all_descendants(real: Runtime) -> None:
    command = "sleep 3001 & setsid sleep 3001 & (setsid sleep 3001 &); (nohup setsid sleep 3001 & ) ; sleep 3001"
    result = await real.exec(f"echo begun; {command}", seconds=1)
    assert result.timed_out
    assert result.stdout == b"begun\n"
    assert not await alive(real, "3001")


async def test_cancel_kills_all_descendants(real: Runtime) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await real.exec("(setsid sleep 3002 &); sleep 3002", seconds=60)
    assert not await alive(real, "3002")


async def test_background_child_does_not_hang_the_call(real: Runtime) -> None:
    result = await real.exec("sleep 3003 & until grep -q sleep /proc/$!/comm; do :; done; echo done", seconds=20)
    assert (result.exit_code, result.stdout) == (0, b"done\n")
    assert not result.timed_out
    assert await alive(real, "3003")


@pytest.mark.parametrize("size", [1 << 24, pytest.param(1 << 30, marks=pytest.mark.deep)], ids=["16 MiB", "1 GiB"])
async def test_much_output_is_cut_in_the_middle(real: Runtime, size: int) -> None:
    out = (await real.exec(f"echo first; head -c {size} /dev/zero; echo last", seconds=120)).stdout
    assert (out[:6], out[-5:]) == (b"first\n", b"last\n")
    assert b"\n[... %d bytes cut ...]\n" % (size + 11 - MAX_OUTPUT) in out
    assert len(out) < MAX_OUTPUT + 100


async def test_large_files_travel_in_pieces(real: Runtime) -> None:
    data = bytes(range(251)) * 40_000
    await real.write("large", data)
    assert await real.read("large", limit=len(data)) == data
    await real.write("run", b"#!/bin/sh\necho ran\n", executable=True)
    assert await text(real, "./run") == "ran\n"


async def test_devices_and_pipes_are_neither_read_nor_written(real: Runtime) -> None:
    await real.exec("mkfifo pipe; (sleep 30; exec cat) < pipe > /dev/null 2>&1 &", seconds=10)
    for path in ("pipe", "/dev/zero"):
        with pytest.raises(RuntimeFailure, match="regular"):
            await real.read(path)
        with pytest.raises(RuntimeFailure, match="regular"):
            await real.write(path, b"")


async def test_links_lead_writes_to_the_sandboxs_own_files_only(real: Runtime) -> None:
    await real.exec("ln -s /proc/self me; ln -s /proc/self/comm name; ln -s later ahead", seconds=10)
    for path in ("name", "me/comm", "me/fd/2", "/proc/self/comm"):
        with pytest.raises(RuntimeFailure):
            await real.write(path, b"changed")
    await real.write("ahead", b"1")
    await real.write("ahead", b"2")
    assert await real.read("later", follow=False) == b"2"


async def test_links_lead_to_the_sandboxs_own_files_only(real: Runtime, tmp_path: Path) -> None:
    """The tool server resolves these links, and for the tool server `/proc/self` is its own process."""
    await real.write("out/log", b"mine")
    links = {"me": "/proc/self", "fds": "/proc/self/fd", "sys": "/sys", "alias": "out", "out/l": "log"}
    make = "; ".join(f"ln -s {aim} {name}" for name, aim in links.items())
    assert (await real.exec(f"{make}; mkfifo out/pipe", seconds=10)).exit_code == 0
    descriptors = [f"fds/{number}" for number in range(12)]
    kernels = ["me/maps", "me/environ", "me/mem", "/proc/self/maps", "/proc/meminfo", "sys/kernel/notes"]
    for path in (*kernels, *descriptors):
        for follow in (True, False):
            with pytest.raises((RuntimeFailure, OSError)):
                await real.read(path, follow=follow)
    for path in ("alias/log", "me/cwd/out/log", "out/log"):
        assert await real.read(path, follow=False) == b"mine"
    assert await real.read("out/l") == b"mine"
    for path in ("out/l", "alias/pipe"):
        with pytest.raises((RuntimeFailure, OSError)):
            await real.read(path, follow=False)
    archived = await snapshot(real, tmp_path, "me/fd", "me/maps", "alias/log")
    with tarfile.open(fileobj=io.BytesIO(archived)) as archive:
        assert [member.name for member in archive] == ["work/alias/log"]


async def test_shell_limit_kills_the_foreground_job_only(real: Runtime) -> None:
    shell = await real.open_shell()
    await shell.run("sleep 3004 &", seconds=10)
    late = await shell.run("bash -c 'setsid sleep 3005 & sleep 3005; wait'", seconds=0.3)
    assert late.timed_out
    assert await alive(real, "3004")
    assert not await alive(real, "3005")
    assert (await shell.run("while :; do :; done", seconds=0.2)).timed_out
    assert (await shell.run("echo fine", seconds=10)).output == "fine\n"
    await shell.close()
    assert not await alive(real, "3004")


async def test_shell_that_ignores_interrupts_is_started_anew(real: Runtime) -> None:
    shell = await real.open_shell()
    await shell.run("X=lost; trap '' INT", seconds=10)
    late = await shell.run("while :; do sleep 1; done", seconds=0.1)
    assert late.timed_out
    assert "state is lost" in late.output
    assert (await shell.run("echo .$X.", seconds=10)).output == "..\n"


async def test_shell_takes_long_and_binary_text(real: Runtime) -> None:
    shell = await real.open_shell()
    long = "x" * 100_000
    assert (await shell.run(f"echo {long}", seconds=20)).output == long + "\n"
    assert (await shell.run("cat <<'END'\na 'quote' \\ \x1e é\nEND", seconds=10)).output == "a 'quote' \\ \x1e é\n"
    assert (await shell.run("printf '\\377'", seconds=10)).output == "\ufffd"
    assert (await shell.run("read line; echo $?", seconds=10)).output == "1\n"


async def test_python_shell(real: Runtime) -> None:
    shell = await real.open_shell("python")
    assert (await shell.run("x = 20\nprint('hi')\nx + 1", seconds=10)).output == "hi\n21\n"
    failed = await shell.run("def f():\n    return 1 / 0\nf()", seconds=10)
    assert failed.exit_code == 1
    assert "ZeroDivisionError" in failed.output
    assert (await shell.run("while True: pass", seconds=0.3)).timed_out
    assert (await shell.run("x", seconds=10)).output == "20\n"
    assert (await shell.run("if", seconds=10)).exit_code == 1


async def test_python_shell_interrupts_children_and_can_exit(real: Runtime) -> None:
    shell = await real.open_shell("python")
    late = await shell.run("import subprocess\nsubprocess.run(['sleep', '3006'])", seconds=0.5)
    assert late.timed_out
    assert "KeyboardInterrupt" in late.output
    assert not await alive(real, "3006")
    assert (await shell.run("exit(3)", seconds=10)).exit_code == 3
    assert (await shell.run("import sys; print('e', file=sys.stderr); print('o')", seconds=10)).output == "e\no\n"


async def test_cancelled_shell_input_is_interrupted(real: Runtime) -> None:
    shell = await real.open_shell()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await shell.run("sleep 3007", seconds=60)
    assert not await alive(real, "3007")
    assert (await shell.run("echo fine", seconds=10)).output == "fine\n"


async def test_snapshot_keeps_links_and_leaves_out_sockets(real: Runtime, tmp_path: Path) -> None:
    make = "import socket; s = socket.socket(socket.AF_UNIX); s.bind('d/sock')"
    await real.exec(["bash", "-c", f'mkdir d; ln -s /etc/passwd d/link; python3 -c "{make}"'], seconds=10)
    with tarfile.open(fileobj=io.BytesIO(await snapshot(real, tmp_path, "d"))) as archive:
        assert {m.name: m.type for m in archive} == {"work/d": tarfile.DIRTYPE, "work/d/link": tarfile.SYMTYPE}


@pytest.mark.deep
async def test_a_sandbox_ends_by_itself_at_its_age(world: World) -> None:
    kinds = ("process", "process-landlock", "namespace")
    sandboxes = [await world.start(kind, lifetime_seconds=2) for kind in kinds]
    for sandbox in sandboxes:
        with pytest.raises(RuntimeFailure, match=r"lifetime|gone"):
            await sandbox.exec("sleep 3008", seconds=30)
