"""Finding and killing the processes of a sandbox by the mark in their environment, so that no process is left.

Every process of a sandbox starts with `OUTRIDER_CALL=FOLDER/SANDBOX:CALL`: the folder of its node, the sandbox's
directory in that folder, and the call. Run as a program, `python process_marks.py FOLDER LOCK SIGN`, this module is a
node's keeper. LOCK and SIGN are descriptors that mark the folder as in use. After the node's exit the keeper kills the
processes of the node's sandboxes. A sandbox that may outlive the node is spared for OUTLIVE_SECONDS, in which the next
node may take over the folder. Invariant: a signal is sent only through a pidfd opened before the mark is read, never to
a process id. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "OUTRIDER_CALL"
KILL_SECONDS = 10.0
PATIENCE_SECONDS = 3.0
LOOK_SECONDS = 0.1
PAUSE_SECONDS = 0.002
RUN_FILE = "run.json"
"""File in a sandbox's folder with the data for the next node to continue the sandbox. The file exists only if the
sandbox may outlive its node."""
OUTLIVE_SECONDS = 60.0
"""Seconds for which a sandbox waits for the next node."""
KEEPER = "keeper.sock"
"""Socket in the folder of a dead node, over which the keeper passes the folder's lock to the next node."""
DONE = b"d"
"""Message with which a node that has removed its folder makes the keeper exit. The keeper also sends this message with
the descriptors, because descriptors cannot be sent without data."""
QUIET_LOOKS = 2
"""Number of consecutive looks at /proc that must find no marked process. A single look can miss a process that is
started between two steps of the look by a parent that then exits."""


def mark_of(directory: Path) -> str:
    """Return the mark of the sandbox with this private directory: unique on the host while the directory exists."""
    return f"{directory.parent.name}/{directory.name}"


def kill_marked(mark: str, *, seconds: float = KILL_SECONDS, spared: Sequence[str] = ()) -> int:
    """SIGKILL every process whose mark begins with `mark` and with none of `spared`, and the descendants of these
    processes, until /proc shows none. Returns the number of processes left after `seconds`. Blocks."""
    deadline = time.monotonic() + seconds
    quiet = 0
    while quiet < QUIET_LOOKS:
        found = marked(mark, spared)
        quiet = 0 if found else quiet + 1
        if found:
            if time.monotonic() > deadline:
                return len(found)
            _kill(mark, spared)
            time.sleep(PAUSE_SECONDS)
    return 0


def marked(mark: str, spared: Sequence[str] = ()) -> set[int]:
    """Return the live processes whose mark begins with `mark` and with none of `spared`, and their descendants. This
    process is left out."""
    needle = f"\0{VARIABLE}={mark}".encode()
    left_out = [f"\0{VARIABLE}={one}".encode() for one in spared]
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    found = set()
    for pid in pids:
        # The environment at the start of the process, empty for a dead process and for another user's process.
        environ = _bytes(f"/proc/{pid}/environ")
        if not environ and _state(pid)[0] in "ZX":
            for thread in _threads(pid):
                environ = environ or _bytes(f"/proc/{pid}/task/{thread}/environ")
        shown = b"\0" + environ
        if needle in shown and not any(one in shown for one in left_out):
            found.add(pid)
    below: dict[int, set[int]] = {}
    for pid in pids if found else ():
        state, parent = _state(pid)
        if state not in "ZX" or _threads(pid):  # else the process is gone, or a zombie, which has no children
            below.setdefault(parent, set()).add(pid)
    new = found
    while new := {child for pid in new for child in below.get(pid, ())} - found:
        found |= new
    return found - {os.getpid()}


def _kill(mark: str, spared: Sequence[str]) -> None:
    """SIGKILL all marked processes, but stop all of them by SIGSTOP first. Otherwise processes that are not yet found
    could start others."""
    held: dict[int, int] = {}
    try:
        while new := marked(mark, spared) - held.keys():
            opened: dict[int, int] = {}
            for pid in new:
                with contextlib.suppress(OSError):  # the process is gone
                    opened[pid] = os.pidfd_open(pid)
            held |= opened
            _signal(marked(mark, spared) & opened.keys(), held, signal.SIGSTOP)
            if not opened:
                break
        _signal(marked(mark, spared) & held.keys(), held, signal.SIGKILL)
    finally:
        for descriptor in held.values():
            os.close(descriptor)


def _signal(pids: set[int], held: dict[int, int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(held[pid], number)


def _state(pid: int) -> tuple[str, int]:
    """Return the state's letter and the parent's pid; ("X", 0) if the process is gone. A process whose first thread has
    ended looks like a zombie, even if other threads live."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "X", 0
    return state, int(parent)


def started(pid: int) -> str:
    """Return the start time of a process, in the kernel's ticks since boot; "" if the process or its first thread has
    ended. Pids are reused, but a pid and a start time together identify one process until the next boot."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _threads(pid: int) -> list[str]:
    """Return the ids of a process's threads; empty for a process that is gone or has only one thread."""
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


def keep(folder: Path, held: Sequence[int], node: socket.socket, *, patience: float = PATIENCE_SECONDS) -> None:
    """Run as the keeper of a node's folder until the folder is removed, or all processes left by the node are killed.

    `held` are the descriptors that mark the folder as in use. `node` is the connection to the node, closed by the
    node's exit. `patience` is the time in seconds that processes have to exit by themselves."""
    mark = f"{folder.name}/"
    heir: socket.socket | None = node
    while heir is not None:
        with heir, contextlib.suppress(OSError):
            if heir.recv(1) == DONE:
                return
        outlived = [path.parent.name for path in folder.glob(f"*/{RUN_FILE}")]
        if not outlived:
            break
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / KEEPER))
            listener.listen(1)
            _end(mark, patience, [f"{mark}{name}:" for name in outlived])
            listener.settimeout(OUTLIVE_SECONDS)
            try:
                heir, _ = listener.accept()
                heir.settimeout(None)
                socket.send_fds(heir, [DONE], held)
            except OSError:  # no node connected in time, or the node was killed at once
                heir = None
            (folder / KEEPER).unlink(missing_ok=True)
    for descriptor in held:
        os.close(descriptor)
    _end(mark, patience)


def _end(mark: str, patience: float, spared: Sequence[str] = ()) -> None:
    """Give the marked processes `patience` seconds to exit, and kill the rest. A tool server that exits by itself also
    kills processes without a mark, which have cleared their environment."""
    deadline = time.monotonic() + patience
    while marked(mark, spared) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    kill_marked(mark, spared=spared)


if __name__ == "__main__":
    keep(Path(sys.argv[1]), [int(sys.argv[2]), int(sys.argv[3])], socket.socket(fileno=0))
