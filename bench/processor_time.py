"""The processor time of a benchmark and all its descendants, and the list of descendants, read from proc(5).

A process counts with its own time and with the time of the children that it has waited for. So all descendants of the
benchmark are read, not only its children: sandboxes are children of the zygote, and the time of a running command is
found only at the command's own process. Processes that are killed because the first process of their sandbox was killed
are no longer counted: the kernel reaps them itself and adds their time to no other process. A benchmark therefore
closes its shells, or reads the time, before it stops a sandbox.
"""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """Return the processor seconds of this process, of its descendants, and of the processes that any of them has
    waited for. Seconds of a process that ends during the call may be missed."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    ticks = sum(ticks_of(pid) for pid in descendants_of(os.getpid()))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + ticks / TICKS


def descendants_of(pid: int) -> list[int]:
    found = children_of(pid)
    for child in found:  # the list grows during the loop
        found += children_of(child)
    return found


def children_of(pid: int) -> list[int]:
    """Return the children of all threads of a process (a child belongs to the thread that started it); none if the
    process has ended."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, of_process(pid, f"task/{thread}/children").split())
    return found


def ticks_of(pid: int) -> int:
    """Return the processor time of a process and of the children that it has waited for, in clock ticks: fields utime,
    stime, cutime and cstime. A process that has ended counts 0, because its parent's time then includes its time."""
    return sum(map(int, of_process(pid, "stat").rpartition(")")[2].split()[11:15]))


def of_process(pid: int, name: str) -> str:
    """Return the content of a process's file in /proc; empty if the process has just ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
