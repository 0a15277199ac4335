"""Folders of dead nodes go with all that runs for them, and nothing else does."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outrider.sandbox.node_folder import NodeFolder, remove_tree
from outrider.sandbox.runtimes.kernel import process_marks
from outrider.sandbox.runtimes.node_host import lives
from support.node_folders import dead_folder, temporary

__all__ = ["temporary"]

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """A program that sleeps, or does what it is told to, with this environment; it is ended with the test."""
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
    """Only the mark counts, of this folder and in its place; a living node's processes stay."""
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


def outliving(temporary: Path, start: Start) -> tuple[Path, subprocess.Popen[bytes], subprocess.Popen[bytes]]:
    """The folder of a node that was killed, and what it left: a sandbox that may outlive it, and another one."""
    node = subprocess.Popen([sys.executable, "-c", PROGRAM, str(temporary)], stdout=subprocess.PIPE)
    assert node.stdout is not None
    folder = Path(node.stdout.readline().decode().strip())
    for name in ("s-1-1", "s-2-1"):
        (folder / name).mkdir()
    (folder / "s-1-1" / process_marks.RUN_FILE).touch()
    kept = start(OUTRIDER_CALL=f"{folder.name}/s-1-1:4")
    other = start(OUTRIDER_CALL=f"{folder.name}/s-2-1:4")
    node.kill()
    node.communicate()
    return folder, kept, other


def test_what_may_outlive_a_node_is_kept_for_its_next(temporary: Path, start: Start) -> None:
    path, kept, other = outliving(temporary, start)
    stranger = NodeFolder.make("somebody else")
    assert stranger.path != path
    stranger.remove()
    folder = NodeFolder.make("somebody")
    assert folder.path == path
    assert folder.outlived() == [path / "s-1-1"]
    assert not (path / "s-2-1").exists()
    assert other.wait(10) == -signal.SIGKILL
    assert kept.poll() is None
    # It is this node's now: nobody sweeps it, and nobody else takes it over.
    another = NodeFolder.make("somebody")
    assert another.path != path
    another.remove()
    assert kept.poll() is None
    folder.remove()
    assert kept.wait(10) == -signal.SIGKILL
    assert os.listdir(temporary) == []


def test_a_kept_sandbox_outlives_one_node_after_the_other(temporary: Path, start: Start) -> None:
    path, kept, _ = outliving(temporary, start)
    again = subprocess.Popen([sys.executable, "-c", PROGRAM, str(temporary)], stdout=subprocess.PIPE)
    assert again.stdout is not None
    assert Path(again.stdout.readline().decode().strip()) == path
    again.kill()
    again.communicate()
    folder = NodeFolder.make("somebody")
    assert folder.path == path
    assert kept.poll() is None
    folder.remove()
    assert kept.wait(10) == -signal.SIGKILL


def test_who_may_be_outlived_counts_as_alive(temporary: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """For everybody on the machine, wherever their temporary folder is."""
    path, _, _ = outliving(temporary, start)
    dead = f"outrider-{os.readlink('/proc/self/ns/pid').strip('pid:[]')}-999999-1-{path.name.removeprefix('outrider-')}"
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    assert lives(dead)
    assert not lives(f"{dead}x")
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    NodeFolder.make("somebody").remove()
    deadline = time.monotonic() + 10
    while lives(dead):  # its keeper ends by itself
        assert time.monotonic() < deadline
        time.sleep(0.01)


PROGRAM = """
import sys, tempfile, time
from outrider.sandbox.node_folder import NodeFolder
tempfile.tempdir = sys.argv[1]
print(NodeFolder.make("somebody").path, flush=True)
time.sleep(600)
"""


def test_a_keeper_goes_with_its_node(temporary: Path) -> None:
    folder = NodeFolder.make()
    assert folder.keeper is not None
    assert folder.keeper.process.poll() is None
    folder.remove()
    assert folder.keeper.process.returncode is not None


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
