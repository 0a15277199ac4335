"""What this process, and whatever carries a mark, has on this host."""

from __future__ import annotations

import os
from pathlib import Path


def marked(*marks: str) -> set[int]:
    """Every process, in whichever namespace, with one of the marks in its command line or environment."""
    return {pid for pid in _pids() if any(mark.encode() in _about(pid) for mark in marks)}


def descendants() -> set[int]:
    parents = {pid: int(fields[1]) for pid in _pids() if (fields := _stat(pid))}
    below = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return below - {os.getpid()}


def mounts(folder: Path) -> list[str]:
    """Those that the folder has to do with. Other programs make and remove theirs meanwhile."""
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(folder) in line]


def names(folder: Path) -> list[str]:
    """What is in it, sorted."""
    return sorted(os.listdir(folder))


def identity(pid: int) -> tuple[int, str]:
    """The number and the start time: tells a process from a later one of the same number."""
    fields = _stat(pid)
    return pid, fields[19] if fields else "ended"


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _about(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""  # it has just ended


def _stat(pid: int) -> list[str]:
    """The fields of its stat from the state on; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
