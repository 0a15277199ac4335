"""Finds all processes of a sandbox by a mark in their environment, and kills them.

Every process of a sandbox starts with the variable `OUTRIDER_CALL=FOLDER/SANDBOX:CALL`: the node's folder, the
sandbox's directory in it, and the call that started the process. `python process_marks.py FOLDER` runs this module as a
node's keeper. The keeper waits until the node exits, and then kills the processes of its sandboxes.

Invariant: a signal is sent only through a pidfd that was opened before the mark was read, never to a process id.

Every node starts a keeper, so the module avoids most of the standard library. Importing `pathlib`, `contextlib` and
`signal` would take half of the CPU time of a keeper's start.
"""

from __future__ import annotations

import os
import sys
import time

VARIABLE = "OUTRIDER_CALL"
KILL_SECONDS = 10.0
PATIENCE_SECONDS = 3.0
LOOK_SECONDS = 0.1
PAUSE_SECONDS = 0.002
READ_BYTES = 1 << 16
QUIET_LOOKS = 2
"""`kill_marked` ends when this many scans of /proc in a row have found no marked process. A single scan can miss a
process that starts during the scan and whose parent then exits."""


def mark_of(directory: os.PathLike[str]) -> str:
    """Return the mark of the sandbox with this private directory. No other sandbox on the host has the same mark while
    the directory exists."""
    folder, name = os.path.split(directory)
    return f"{os.path.basename(folder)}/{name}"


def kill_marked(mark: str, *, seconds: float = KILL_SECONDS) -> int:
    """Kill every process whose mark begins with `mark`, and its descendants, until /proc shows none. Returns how many
    processes are left after `seconds`. The call blocks."""
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
    """Return the living processes whose mark begins with `mark`, and their descendants. This process is left out."""
    needle = f"\0{VARIABLE}={mark}".encode()
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    found = set()
    for pid in pids:
        # `environ` is the environment that the process got at its start. The file is empty if the process is dead, and
        # cannot be read if the process belongs to another user.
        environ = _bytes(f"/proc/{pid}/environ")
        if not environ and stat_fields(pid)[0] in "ZX":
            for thread in _threads(pid):
                environ = environ or _bytes(f"/proc/{pid}/task/{thread}/environ")
        if needle in b"\0" + environ:
            found.add(pid)
    below: dict[int, set[int]] = {}
    for pid in pids if found else ():
        state, parent, *_ = stat_fields(pid)
        # The state is that of the first thread. Z and X mean that this thread has ended, but other threads of the
        # process may still run and have children.
        if state not in "ZX" or _threads(pid):
            below.setdefault(int(parent), set()).add(pid)
    new = found
    while new := {child for pid in new for child in below.get(pid, ())} - found:
        found |= new
    return found - {os.getpid()}


def _kill(mark: str) -> None:
    """Kill all marked processes with SIGKILL. They are first stopped with SIGSTOP, because a running process could
    start another one between the scan and the kill."""
    import signal  # imported here, because a keeper needs it only after its node has died

    held: dict[int, int] = {}

    def send(number: signal.Signals, pids: set[int]) -> None:
        for pid in pids & held.keys():
            try:
                signal.pidfd_send_signal(held[pid], number)
            except OSError:  # the process is gone
                continue

    try:
        while new := marked(mark) - held.keys():
            opened: dict[int, int] = {}
            for pid in new:
                try:
                    opened[pid] = os.pidfd_open(pid)
                except OSError:  # the process is gone
                    continue
            held |= opened
            send(signal.SIGSTOP, marked(mark) & opened.keys())
            if not opened:
                break
        send(signal.SIGKILL, marked(mark))
    finally:
        for descriptor in held.values():
            os.close(descriptor)


def stat_fields(pid: int) -> list[str]:
    """Return those fields of /proc/PID/stat that follow the program's name. The first two are the letter of the state,
    and the parent's pid. Returns ["X", "0"] if the process no longer exists. If the first thread of a process has
    ended, the state is Z (zombie), even if other threads live."""
    # The program's name is in parentheses. The program chooses its name, so the name may contain any bytes, even
    # invalid UTF-8.
    return _bytes(f"/proc/{pid}/stat").rpartition(b")")[2].decode().split() or ["X", "0"]


def started(pid: int) -> str:
    """Return the start time of a process, in the kernel's ticks since boot. Returns "" if the process or its first
    thread has ended. Pids are reused. Until the next boot, a pid and a start time together identify one process."""
    fields = stat_fields(pid)
    return "" if fields[0] in "ZX" else fields[19]


def _threads(pid: int) -> list[str]:
    """Return the ids of a process's threads. If the process has only one thread, return no ids."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return threads if len(threads) > 1 else []


def _bytes(path: str) -> bytes:
    """Return the content of a file in /proc, or b"" if it cannot be read. A scan reads hundreds of files, and plain
    system calls take less than half as long as file objects."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        found = b""
        while part := os.read(descriptor, READ_BYTES):
            found += part
        return found
    except OSError:  # the process has just ended
        return b""
    finally:
        os.close(descriptor)


def keep(folder: str, *, patience: float = PATIENCE_SECONDS) -> None:
    """Run as the keeper of a node. `folder` is the name of the node's folder. Waits until standard input is closed,
    which happens when the node exits. Then kills all processes with the folder's mark.

    The processes first get `patience` seconds to exit by themselves. In this time, an exiting tool server also kills
    processes that have cleared their environment, and so have no mark."""
    sys.stdin.buffer.read()
    deadline = time.monotonic() + patience
    while marked(f"{folder}/") and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    kill_marked(f"{folder}/")


if __name__ == "__main__":
    keep(sys.argv[1])
