"""Finds processes, mounts and files of a test on this host."""

from __future__ import annotations

import os
from pathlib import Path


def marked(*marks: str) -> set[int]:
    """Return the ids of all processes, in any namespace, with one of the marks in their command line or environment."""
    return {pid for pid in _pids() if any(mark.encode() in _about(pid) for mark in marks)}


def descendants() -> set[int]:
    parents = {pid: int(fields[1]) for pid in _pids() if (fields := _stat(pid))}
    below = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    return below - {os.getpid()}


def mounts(folder: Path) -> list[str]:
    """Return the mounts in which the folder's path occurs. Other programs may change other mounts at any time."""
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(folder) in line]


def names(folder: Path) -> list[str]:
    """Return the sorted names of the folder's entries."""
    return sorted(os.listdir(folder))


def identity(pid: int) -> tuple[int, str]:
    """Return the process's id and start time, which distinguish it from a later process with the same id."""
    fields = _stat(pid)
    return pid, fields[19] if fields else "ended"


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _about(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""  # the process has just ended


def _stat(pid: int) -> list[str]:
    """Return the fields of the process's stat, beginning with the state. Empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
