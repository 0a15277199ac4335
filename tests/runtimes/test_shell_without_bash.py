"""A sandbox without bash: commands and the live shell use its sh, here dash or busybox."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from outrider.sandbox.runtimes.base import Runtime

from .world import World

PROGRAMS = ("cat", "echo", "env", "grep", "head", "ls", "mkdir", "setsid", "sleep")


# .ci/run installs busybox before the deep tests.
@pytest.fixture(params=["dash", pytest.param("busybox", marks=pytest.mark.deep)])
async def bare(request: pytest.FixtureRequest, world: World, folder: Path) -> Runtime:
    """A sandbox whose PATH has a plain sh and a few programs."""
    shell = shutil.which(request.param)
    if shell is None:
        pytest.skip(f"no {request.param} on this machine")
    programs = folder / "bin"
    programs.mkdir()
    (programs / "sh").symlink_to(shell)
    for name in PROGRAMS:
        if program := shutil.which(name):
            (programs / name).symlink_to(program)
    return await world.start("process", env={"PATH": str(programs), "COLOUR": "blue"})


async def test_a_command_goes_to_sh(bare: Runtime) -> None:
    result = await bare.exec("echo $COLOUR; echo ${BASH_VERSION:-none}; exit 7", seconds=10)
    assert (result.exit_code, result.stdout) == (7, b"blue\nnone\n")


async def test_the_shell_keeps_its_state(bare: Runtime) -> None:
    shell = await bare.open_shell()
    assert (await shell.run("mkdir d; cd d; X='a b'; f() { echo \"f $1\"; }", seconds=10)).output == ""
    assert (await shell.run('echo "$X"; f 1', seconds=10)).output == "a b\nf 1\n"
    assert (await shell.run("cat nothing", seconds=10)).exit_code == 1
    assert (await shell.run("echo $?", seconds=10)).output == "1\n"
    assert (await shell.run("exit 4", seconds=10)).exit_code == 4


async def test_bad_syntax_and_long_and_odd_text(bare: Runtime) -> None:
    shell = await bare.open_shell()
    await shell.run("X=kept", seconds=10)
    for bad in ("echo 'open", "if", "for", "echo )"):
        assert (await shell.run(bad, seconds=10)).exit_code not in (0, None)
    assert (await shell.run("echo $X", seconds=10)).output == "kept\n"
    long = "x" * 100_000
    assert (await shell.run(f"echo {long}", seconds=20)).output == long + "\n"
    assert (await shell.run("cat <<'END'\na 'quote' \\ \x1e é\nEND", seconds=10)).output == "a 'quote' \\ \x1e é\n"
    assert (await shell.run("read line; echo $?", seconds=10)).output == "1\n"


@pytest.mark.deep
async def test_a_time_limit_kills_the_foreground_job_only(bare: Runtime) -> None:
    shell = await bare.open_shell()
    await shell.run("X=kept; sleep 3020 & P=$!", seconds=10)
    late = await shell.run("echo before; sleep 30; echo after", seconds=1)
    assert late.timed_out
    assert late.output.splitlines()[0] == "before"
    assert "after" not in late.output
    assert (await shell.run("echo $X", seconds=10)).output == "kept\n"
    assert (await shell.run("kill -0 $P && echo lives", seconds=10)).output == "lives\n"
    await shell.close()


@pytest.mark.deep
async def test_a_time_limit_ends_what_the_shell_itself_does(bare: Runtime, request: pytest.FixtureRequest) -> None:
    """The shell keeps its state. One time in 150, busybox's sh leaves its memory allocator by a jump out of its signal
    handler, and then waits for the allocator's lock for ever. The shell is then started again, and the input's result
    says so."""
    shell = await bare.open_shell()
    for _ in range(3):
        await shell.run("X=kept", seconds=10)
        looped = await shell.run("while :; do :; done", seconds=0.2)
        assert looped.timed_out
        if "started anew: its state is lost" in looped.output:
            assert "busybox" in request.node.name
            assert (await shell.run("echo lost $X", seconds=10)).output == "lost\n"
        else:
            assert (await shell.run("echo $X", seconds=10)).output == "kept\n"
