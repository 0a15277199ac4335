"""The folders of dead nodes are removed and their processes are killed. Other processes stay."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outrider.sandbox.node_folder import NodeFolder, remove_tree
from outrider.sandbox.runtimes.kernel import process_marks
from support.node_folders import dead_folder, temporary
from support.skopeo import fake_skopeo

__all__ = ["temporary"]

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """A function that starts a sleeping program with these arguments and this environment. `first` is shell code that
    the program runs before it sleeps. The programs are killed at the end of the test."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*arguments: str, first: str = "", **env: str) -> subprocess.Popen[bytes]:
        command = ["bash", "-c", f"{first} echo ready; exec sleep 600", *arguments]
        program = subprocess.Popen(command, env={"PATH": os.environ["PATH"], **env}, stdout=subprocess.PIPE)
        started.append(program)
        assert program.stdout is not None
        assert program.stdout.readline() == b"ready\n"
        return program

    yield run
    for program in started:
        program.kill()
        program.wait()
        assert program.stdout is not None
        program.stdout.close()


def test_a_start_kills_what_carries_the_mark_of_a_dead_node(temporary: Path, start: Start) -> None:
    dead = dead_folder(temporary, "outrider-dead")
    stuck = start(OUTRIDER_CALL=f"{process_marks.mark_of(dead / 's-1-1')}:0")
    above = start(first="env -i sleep 601 &", OUTRIDER_CALL="outrider-dead/s-2-1:7")
    folder = NodeFolder.make()
    try:
        assert (stuck.wait(10), above.wait(10)) == (-signal.SIGKILL, -signal.SIGKILL)
        assert b"sleep\x00601\x00" not in command_lines()
        assert sorted(os.listdir(temporary)) == [folder.path.name]
    finally:
        folder.remove()


def test_a_name_alone_is_no_reason_to_die(temporary: Path, start: Start) -> None:
    """A process is killed only if its variable OUTRIDER_CALL begins with the dead folder's mark. The processes of a
    living node stay."""
    dead = dead_folder(temporary, "outrider-dead")
    living = NodeFolder.make()
    others = [
        start(str(dead / "gateway.sock")),
        start(HOME=str(dead), OUTRIDER_CALL="outrider-deadly/s-1-1:0"),
        start(NOTE="OUTRIDER_CALL=outrider-dead/s-1-1:0"),
        start(OUTRIDER_CALL=f"{living.path.name}/s-1-1:0"),
    ]
    dead_folder(temporary, "outrider-dead")
    second = NodeFolder.make()
    assert [other.poll() for other in others] == [None] * 4
    second.remove()
    assert others[-1].poll() is None
    living.remove()
    assert others[-1].wait(10) == -signal.SIGKILL
    assert os.listdir(temporary) == []


@pytest.mark.deep
def test_the_keeper_kills_what_is_left_of_a_node_that_was_killed(temporary: Path, start: Start) -> None:
    node = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(temporary)], stdout=subprocess.PIPE, start_new_session=True
    )
    assert node.stdout is not None
    name = Path(node.stdout.readline().decode().strip()).name
    left = start(OUTRIDER_CALL=f"{name}/s-1-1:0")
    node.kill()
    node.communicate()
    assert left.wait(50) == -signal.SIGKILL


PROGRAM = """
import sys, tempfile, time
from outrider.sandbox.node_folder import NodeFolder
tempfile.tempdir = sys.argv[1]
print(NodeFolder.make().path, flush=True)
time.sleep(600)
"""


def test_a_keeper_goes_with_its_node(temporary: Path) -> None:
    folder = NodeFolder.make()
    assert folder.keeper is not None
    assert folder.keeper.poll() is None
    folder.remove()
    assert folder.keeper.returncode is not None


def test_a_folder_without_a_keeper_is_not_left(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        NodeFolder.make()
    assert os.listdir(temporary) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_cannot_be_removed_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "outrider.node"):
        remove_tree(tmp_path / "gone")
        (tmp_path / "file").touch()
        remove_tree(tmp_path / "file")
    assert len(caplog.records) == 1
    assert "not removed" in caplog.text


def command_lines() -> bytes:
    found = b""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                found += Path(f"/proc/{name}/cmdline").read_bytes()
            except OSError:
                continue
    return found


PULLS = """
import asyncio, sys
from outrider.concurrency.chores import Chores, Failures
from outrider.sandbox.host_paths import HostPaths
from outrider.sandbox.node_folder import NodeFolder
from outrider.sandbox.runtimes.node_host import Host
from outrider.sandbox.sandbox import Sandboxes
from outrider.spec import RuntimeSpec

async def main():
    folder = NodeFolder.make().path
    async with Host(folder) as host, Chores(Failures()) as background:
        made = Sandboxes(
            host=host, background=background, paths=HostPaths(), gateway_socket=folder / "s", pull=["registry/"]
        )
        await made.pulls.want(RuntimeSpec(kind="namespace", image="registry/x"), field="task.runtime")

asyncio.run(main())
"""
"""A node that pulls an image for a session."""


@pytest.mark.deep
def test_a_node_that_is_killed_leaves_no_pull(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    asked = fake_skopeo(tmp_path, monkeypatch, seconds=602)
    with subprocess.Popen([sys.executable, "-c", PULLS]) as node:
        assert wait_for(lambda: asked() and b"sleep\x00602\x00" in command_lines())
        node.kill()
    assert wait_for(lambda: b"sleep\x00602\x00" not in command_lines())
    NodeFolder.sweep()
    assert os.listdir(temporary) == []


def wait_for(true: Callable[[], object]) -> bool:
    """Return whether `true` returns a true value within ten seconds."""
    end = time.monotonic() + 60
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(true())
