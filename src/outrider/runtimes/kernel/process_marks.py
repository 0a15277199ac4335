"""Finding and killing processes by the mark in their environment, so that nothing a sandbox started is left.

Every process of a sandbox starts with `OUTRIDER_CALL=FOLDER/SANDBOX:CALL`: the folder of its node, its own directory in
there, the call it belongs to. Run as a program, `python process_marks.py FOLDER LOCK SIGN`, this is a node's keeper:
when the node has died it kills the node's processes, and keeps those sandboxes for the next node that may outlive this
one. It knows nothing of isolation. Invariant: a signal goes only to a process that is held by a pidfd from before its
mark is read, never to a number. Standard library only.
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
"""In a sandbox's folder: what the next node must know to go on with it, if it may outlive this one."""
OUTLIVE_SECONDS = 60.0
"""How long a sandbox that may outlive its node waits for the next one."""
KEEPER = "keeper.sock"
"""In a node's folder, after its death: where the next node gets the folder's lock from the keeper."""
DONE = b"d"
"""What a node that has removed its folder tells its keeper, so that this ends."""
QUIET_LOOKS = 2
"""A process that starts another and ends between two steps of one look at /proc is not missed by the next."""


def mark_of(directory: Path) -> str:
    """The mark of the sandbox whose private directory this is: unique on the host while the directory is there."""
    return f"{directory.parent.name}/{directory.name}"


def kill_marked(mark: str, *, seconds: float = KILL_SECONDS, spared: Sequence[str] = ()) -> int:
    """SIGKILL every process whose mark begins with `mark`, and with none of `spared`, and all below it, until /proc
    shows none. Returns how many are still there after `seconds`. Blocks."""
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
    """The living processes, without this one, whose mark begins with `mark`, and all below them; but for those whose
    mark begins with one of `spared`."""
    needle = f"\0{VARIABLE}={mark}".encode()
    left_out = [f"\0{VARIABLE}={one}".encode() for one in spared]
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    found = set()
    for pid in pids:
        # The environment it was started with; empty for a dead process, or another user's.
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
        if state not in "ZX" or _threads(pid):  # else it is gone, or a zombie, which has no children
            below.setdefault(parent, set()).add(pid)
    new = found
    while new := {child for pid in new for child in below.get(pid, ())} - found:
        found |= new
    return found - {os.getpid()}


def _kill(mark: str, spared: Sequence[str]) -> None:
    """Stop them all before any is killed: else those not yet seen go on to start others."""
    held: dict[int, int] = {}
    try:
        while new := marked(mark, spared) - held.keys():
            opened: dict[int, int] = {}
            for pid in new:
                with contextlib.suppress(OSError):  # it is gone
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
    """The state's letter, and the parent's number. A process whose first thread has ended looks like a zombie, though
    other threads live."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "X", 0
    return state, int(parent)


def started(pid: int) -> str:
    """When a process was started, in the kernel's ticks; "" when it is dead. With the number it names one process for
    all time, because numbers are used again."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


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


def keep(folder: Path, held: Sequence[int], node: socket.socket, *, patience: float = PATIENCE_SECONDS) -> None:
    """Be the keeper of a node's folder until that is removed, or all is killed that the node left. `held` are the
    descriptors that show that the folder is in use. `node` is the connection to the node, which its death closes."""
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
            except OSError:  # nobody came in time, or it died at once
                heir = None
            (folder / KEEPER).unlink(missing_ok=True)
    for descriptor in held:
        os.close(descriptor)
    _end(mark, patience)


def _end(mark: str, patience: float, spared: Sequence[str] = ()) -> None:
    """Give the marked processes some time to end by themselves, and kill what is left. A tool server that ends by
    itself also kills what has cleared its environment, and its mark."""
    deadline = time.monotonic() + patience
    while marked(mark, spared) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    kill_marked(mark, spared=spared)


if __name__ == "__main__":
    keep(Path(sys.argv[1]), [int(sys.argv[2]), int(sys.argv[3])], socket.socket(fileno=0))
