"""Processes by the mark in their environment: how what a sandbox left is found, and killed for certain.

Everything that runs for a sandbox carries `OUTRIDER_CALL=FOLDER/SANDBOX:CALL` from its first moment on: the folder of
its node, its own directory in there, the call it belongs to. As a program, `python marks.py FOLDER`, this is a node's
keeper: it waits for the end of its standard input, which is the node's death however that came, and kills what the
node had. It knows nothing of isolation. Invariant: a signal goes only to a process that is held by a pidfd from
before its mark is read, never to a number. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

VARIABLE = "OUTRIDER_CALL"
KILL_SECONDS = 10.0
PATIENCE_SECONDS = 3.0
LOOK_SECONDS = 0.1
PAUSE_SECONDS = 0.002
QUIET_LOOKS = 2
"""A process that starts another and ends between two steps of one look at /proc is not missed by the next."""


def mark_of(directory: Path) -> str:
    """The mark of the sandbox whose private directory this is: unique on the host while the directory is there."""
    return f"{directory.parent.name}/{directory.name}"


def kill_marked(mark: str, *, seconds: float = KILL_SECONDS) -> int:
    """SIGKILL every process whose mark begins with `mark`, and all below it, until looks at /proc find none; how many
    are still there after `seconds`. Blocks."""
    deadline = time.monotonic() + seconds
    quiet = 0
    while quiet < QUIET_LOOKS:
        found = marked(mark)
        quiet = 0 if found else quiet + 1
        if found:
            if time.monotonic() > deadline:
                return len(found)
            _kill(mark)
            time.sleep(PAUSE_SECONDS)
    return 0


def marked(mark: str) -> set[int]:
    """The processes alive, but this one, whose mark begins with `mark`, and all below them."""
    needle = f"\0{VARIABLE}={mark}".encode()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    found = {pid for pid in pids if needle in _environ(pid)}
    below: dict[int, set[int]] = {}
    for pid in pids if found else ():
        below.setdefault(_parent(pid), set()).add(pid)
    new = found
    while new := {child for pid in new for child in below.get(pid, ())} - found:
        found |= new
    return found - {os.getpid()}


def _kill(mark: str) -> None:
    """Freeze them first, until none has started another that escaped the look, then kill."""
    held: dict[int, int] = {}
    try:
        while new := marked(mark) - held.keys():
            opened = {pid: held_by for pid in new if (held_by := _hold(pid)) >= 0}
            held |= opened
            _signal(marked(mark) & opened.keys(), held, signal.SIGSTOP)
            if not opened:
                break
        _signal(marked(mark) & held.keys(), held, signal.SIGKILL)
    finally:
        for descriptor in held.values():
            os.close(descriptor)


def _hold(pid: int) -> int:
    """A pidfd; -1 for what is gone."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def _signal(pids: set[int], held: dict[int, int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(held[pid], number)


def _environ(pid: int) -> bytes:
    """What it was started with, each entry after a NUL; empty for what is dead, or not ours to read."""
    found = _bytes(f"/proc/{pid}/environ")
    if not found and _state(pid)[0] in "ZX":
        for thread in _threads(pid):
            found = found or _bytes(f"/proc/{pid}/task/{thread}/environ")
    return b"\0" + found


def _parent(pid: int) -> int:
    """0 for what is gone, and for a zombie, which has nothing below it and cannot be killed again."""
    state, parent = _state(pid)
    return 0 if state in "ZX" and not _threads(pid) else parent


def _state(pid: int) -> tuple[str, int]:
    """As one letter, and the parent. That of a zombie also where only the first thread has ended and others live."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "X", 0
    return state, int(parent)


def _threads(pid: int) -> list[str]:
    """By their numbers; none of what is gone, or has but one."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return threads if len(threads) > 1 else []


def _bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def keep(folder: str, *, patience: float = PATIENCE_SECONDS) -> None:
    """Wait for the end of standard input; then for what carries the folder's mark to end by itself, as it should: a
    tool server takes with it also what cleared its environment. What is left after that is killed."""
    while os.read(0, 4096):
        """Nothing is ever said."""
    deadline = time.monotonic() + patience
    while marked(f"{folder}/") and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    kill_marked(f"{folder}/")


if __name__ == "__main__":
    keep(sys.argv[1])
