"""The error for a program that could not be started: the missing file, and a remedy."""

from __future__ import annotations

import os
import shlex
import struct
from pathlib import Path

import pytest

from outrider.errors import HarnessError
from outrider.harnesses.base import ProgramExit
from outrider.harnesses.factory import make_harness
from outrider.harnesses.missing_program import _head_on_host
from outrider.lab.fakes.memory_runtime.runtime import MemoryRuntime
from outrider.sandbox.runtimes.base import Runtime, SandboxContext
from outrider.sandbox.runtimes.node_host import Host
from outrider.spec import HarnessSpec, RuntimeSpec
from support.sandboxes import process_sandbox

from .conftest import context


async def failure(sandbox: Runtime, *command: str, **env: str) -> HarnessError:
    spec = HarnessSpec(command=list(command), env=env)
    with pytest.raises(HarnessError) as caught:
        await make_harness(spec).run(context(sandbox, spec))
    return caught.value


def elf(loader: str) -> bytes:
    """Return the beginning of a 64-bit ELF program with this loader."""
    name = loader.encode() + b"\0"
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 2, 62, 1, 0, 64, 0, 0, 64, 56, 1, 0, 0, 0
    )
    return header + struct.pack("<IIQQQQQQ", 3, 4, 120, 0, 0, len(name), len(name), 1) + name


@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        (b"#!/opt/none/bin/python3\n", "is a script for /opt/none/bin/python3, which is not in the sandbox", "mounts"),
        (b"#!/usr/bin/env -S no-such-node --x\n", "is a script for no-such-node, which is not", "prepare step"),
        (b"#!/bin/sh\r\necho hi\r\n", "ends with a carriage return", "Unix line ends"),
        (elf("/lib/ld-musl-none.so.1"), "needs the loader /lib/ld-musl-none.so.1, which is not", "another root"),
    ],
    ids=["interpreter", "env", "line-ends", "loader"],
)
async def test_a_program_that_lacks_what_runs_it(sandbox: Runtime, content: bytes, message: str, hint: str) -> None:
    await sandbox.write("agent", content, executable=True)
    error = await failure(sandbox, "./agent")
    assert message in error.message
    assert error.message.startswith("command exited with code 12")
    assert hint in str(error.hint)


async def test_a_script_whose_interpreter_lacks_what_runs_it(sandbox: Runtime) -> None:
    """The interpreter is a large file."""
    place = f"{sandbox.scratch}/python"
    await sandbox.write(place, elf("/lib/ld-musl-none.so.1") + bytes(1 << 17), executable=True)
    await sandbox.write("agent", f"#!{place} -I\n".encode(), executable=True)
    error = await failure(sandbox, "./agent")
    assert f"{place} needs the loader /lib/ld-musl-none.so.1, which is not in the sandbox" in error.message


async def test_scripts_that_are_each_others_interpreter(sandbox: Runtime) -> None:
    one, two = f"{sandbox.scratch}/one", f"{sandbox.scratch}/two"
    await sandbox.write(one, f"#!{two}\n".encode(), executable=True)
    await sandbox.write(two, f"#!{one}\n".encode(), executable=True)
    assert (await failure(sandbox, one)).message == "command exited with code 126"


async def test_a_library_that_is_missing(sandbox: Runtime) -> None:
    said = "agent: error while loading shared libraries: libx.so.6: cannot open shared object file: No such file"
    error = await failure(sandbox, "bash", "-c", f"echo '{said}' >&2; exit 127")
    assert "it needs the library libx.so.6, which is not in the sandbox" in error.message


async def test_a_program_that_may_not_be_executed(sandbox: Runtime) -> None:
    await sandbox.write("agent", b"#!/bin/sh\n")
    error = await failure(sandbox, "./agent")
    assert "exited with code 126: ./agent is not executable" in error.message
    assert "executable = true" in str(error.hint)


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["no-such-agent", "--x"], "no-such-agent is in no folder of the sandbox's PATH"),
        (["bin/agent"], "bin/agent is not in the sandbox, where it was looked for below the working directory"),
        (["/opt/none/agent"], "/opt/none/agent is not in the sandbox"),
        (["bash", "-c", "true; no-such-agent --x"], "no-such-agent is in no folder of the sandbox's PATH"),
        (["sh", "-c", "/opt/none/agent"], "/opt/none/agent is not in the sandbox"),
        (["env", "no-such-agent"], "no-such-agent is in no folder of the sandbox's PATH"),
    ],
    ids=shlex.join,
)
async def test_a_program_that_is_nowhere(sandbox: Runtime, command: list[str], named: str) -> None:
    error = await failure(sandbox, *command)
    assert f"exited with code 127: {named}" in error.message
    assert "prepare step" in str(error.hint)


async def test_a_file_in_the_path_is_no_folder(sandbox: Runtime) -> None:
    error = await failure(sandbox, "no-such-agent", PATH="/etc/passwd:/usr/bin:/bin")
    assert "no-such-agent is in no folder of the sandbox's PATH" in error.message


async def test_an_exit_code_of_the_programs_own_is_not_explained(sandbox: Runtime) -> None:
    for code in (126, 127):
        error = await failure(sandbox, "bash", "-c", f"echo mine; exit {code}")
        assert error.message == f"command exited with code {code}"
        assert "log tail" in str(error.hint)


async def test_the_path_of_the_sandbox_is_searched(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/tool").write_text("#!/bin/sh\nexit 127\n")
    (tmp_path / "bin/tool").chmod(0o755)
    async with process_sandbox(tmp_path, env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}) as sandbox:
        assert (await failure(sandbox, "tool")).message == "command exited with code 127"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder of the host that contains a virtual environment and a plain folder, each with a program."""
    for name in ("env/bin/agent", "tools/bin/agent"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "env/pyvenv.cfg").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("program", "lines"),
    [
        ("env/bin/agent", 'venv = "@/env" below [harness]'),
        ("tools/bin/agent", 'mounts = [{source = "@/tools"}] below [runtime]'),
    ],
)
async def test_a_program_that_only_the_host_has_is_said_how_to_show(
    elsewhere: Path, program: str, lines: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Host(elsewhere) as host:
        place = SandboxContext(
            session_id="s", attempt=1, directory=elsewhere, host=host, gateway_url="", gateway_socket=elsewhere / "x"
        )
        sandbox = MemoryRuntime.create(RuntimeSpec(kind="memory"), place)
        await sandbox.start()
        monkeypatch.setenv("PATH", str((elsewhere / program).parent))
        for name in (str(elsewhere / program), "agent"):
            error = await failure(sandbox, name)
            assert str(elsewhere / program) in error.message
            assert "not in the sandbox; on the host" in error.message or "in no folder" in error.message
            assert lines.replace("@", str(elsewhere)) in str(error.hint)
            assert "--allow-path" in str(error.hint)
        error = await failure(sandbox, "/usr/bin/ldd")
        assert "whose root is not the host's" in error.message
        await sandbox.stop()


async def test_the_host_is_not_looked_at_for_a_path_that_a_task_chooses(elsewhere: Path) -> None:
    """The error is the same whether or not the host has the file."""
    async with Host(elsewhere) as host:
        place = SandboxContext(
            session_id="s", attempt=1, directory=elsewhere, host=host, gateway_url="", gateway_socket=elsewhere / "x"
        )
        sandbox = MemoryRuntime.create(RuntimeSpec(kind="memory"), place)
        await sandbox.start()
        said = set()
        for name in (f"{elsewhere}/tools/bin/agent", f"{elsewhere}/tools/bin/other"):
            error = await failure(sandbox, name)
            said.add(f"{error.message} {error.hint}".replace(name, "NAME"))
        assert len(said) == 1
        await sandbox.stop()


async def test_of_the_host_only_installed_programs_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    for folder in (tmp_path, tmp_path / "home"):
        (folder / "file").write_text("#!/secret")
        os.mkfifo(folder / "pipe")
    (tmp_path / "home/link").symlink_to(tmp_path / "file")
    assert _head_on_host(str(tmp_path / "home/file")) == b"#!/secret"
    for name in ("file", "pipe", "home/pipe", "home/link", "home/../file", "home/none"):
        assert _head_on_host(str(tmp_path / name)) == b""


@pytest.mark.parametrize(
    "script",
    [
        r"printf 'sh: 1: a\000b: not found\n' >&2; exit 127",
        r"printf '#!/bin/a\000b\n' >agent; chmod +x agent; printf 'sh: 1: ./agent: not found\n' >&2; exit 127",
    ],
    ids=["complaint", "interpreter"],
)
async def test_a_name_with_nul_is_an_unknown_cause(sandbox: Runtime, script: str) -> None:
    """The agent chooses the name. The session must still be graded, as after any exit code."""
    error = await failure(sandbox, "sh", "-c", script)
    assert isinstance(error, ProgramExit)
    assert error.message == "command exited with code 127"
