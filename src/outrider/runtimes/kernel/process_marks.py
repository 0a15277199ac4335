"""Finding and killing processes by the mark in their environment, so that nothing a sandbox started is left.

Every process of a sandbox starts with `OUTRIDER_CALL=FOLDER/SANDBOX:CALL`: the folder of its node, its own directory in
there, the call it belongs to. Run as a program, `python process_marks.py FOLDER`, this is a node's keeper: it waits
for the end of its standard input, which comes with the node's death, and kills the node's processes. It knows nothing
of isolation. Invariant: a signal goes only to a process that is held by a pidfd from before its mark is read, never to
a number. Standard library only.
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
    """SIGKILL every process whose mark begins with `mark`, and all below it, until /proc shows none. Returns how many
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
    """The living processes, without this one, whose mark begins with `mark`, and all below them."""
    needle = f"\0{VARIABLE}={mark}".encode()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    found = set()
    for pid in pids:
        # The environment it was started with; empty for a dead process, or another user's.
        environ = _bytes(f"/proc/{pid}/environ")
        if not environ and _state(pid)[0] in "ZX":
            for thread in _threads(pid):
                environ = environ or _bytes(f"/proc/{pid}/task/{thread}/environ")
        if needle in b"\0" + environ:
            found.add(pid)
    below: dict[int, set[int]] = {}
    for pid in pids if found else ():
        state, parent = _state(pid)
        if state not in "ZX" or _threads(pid):  # else it is gone, or a zombie, which has no children
            below.setdefault(parent, set()).add(pid)
    new = found
    while new := {child for pid in new for child in below.get(pid, ())} - found:
        found |= new
    return found - {os.getpid()}


def _kill(mark: str) -> None:
    """Stop them all before any is killed: else those not yet seen go on to start others."""
    held: dict[int, int] = {}
    try:
        while new := marked(mark) - held.keys():
            opened: dict[int, int] = {}
            for pid in new:
                with contextlib.suppress(OSError):  # it is gone
                    opened[pid] = os.pidfd_open(pid)
            held |= opened
            _signal(marked(mark) & opened.keys(), held, signal.SIGSTOP)
            if not opened:
                break
        _signal(marked(mark) & held.keys(), held, signal.SIGKILL)
    finally:
        for descriptor in held.values():
            os.close(descriptor)


def _signal(pids: set[int], held: dict[int, int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(held[pid], number)


def _state(pid: int) -> tuple[str, int]:
    """The state's letter, and the parent's number. A process whose first thread has ended looks like a zombie, though
    other threads live."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "X", 0
    return state, int(parent)


def _threads(pid: int) -> list[str]:
    """The numbers of its threads; none for a process that is gone, or has only one."""
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
    """Wait for the end of standard input, then `patience` seconds for the marked processes to end by themselves, and
    kill what is left. A tool server that ends by itself also kills what has cleared its environment, and its mark."""
    while os.read(0, 4096):
        """Nobody writes to it."""
    deadline = time.monotonic() + patience
    while marked(f"{folder}/") and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    kill_marked(f"{folder}/")


if __name__ == "__main__":
    keep(sys.argv[1])
