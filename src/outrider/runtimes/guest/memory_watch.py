"""A bound on the memory of all of a sandbox's programs together, where no control group keeps one.

It looks at /proc now and then and counts what processes have: their own pages, those that they share, their page
tables, and what was swapped out. Memory that belongs to no process is refused them (see seccomp.py), and files have a
bound of their own. Invariant: while the programs have more than the limit, the largest is killed, as the kernel does
with a control group. What comes and goes between two looks is bounded for each process alone, by its rlimits.
"""

from __future__ import annotations

import posix
import time
from typing import TYPE_CHECKING

from outrider.runtimes.guest.poll_loop import Loop
from outrider.runtimes.guest.processes import descendants, processes, read_or_empty, send_signal, threads

if TYPE_CHECKING:
    import signal as _signal
else:
    import _signal  # `signal` would add half again to the start-up time

RATE = 4 << 30
"""Bytes a second by which programs may grow: says how soon they can reach the limit, and so when to look again."""
MIN_PAUSE, MAX_PAUSE = 0.05, 1.0
"""Bounds of the seconds between two looks."""
REST_FACTOR = 20
"""A pause is at least 20 times as long as the look before it: reading the maps of many processes takes long."""
OWN_FIELDS = (b"RssAnon", b"VmSwap", b"VmPTE", b"HugetlbPages")
"""Lines of /proc/PID/status that add up to a process's memory, pages that it shares with forks in full."""
DIVIDED_FIELDS = (b"Pss_Anon", b"SwapPss", b"Private_Hugetlb", b"Shared_Hugetlb")
"""Lines of /proc/PID/smaps_rollup that do so with shared pages divided among the processes that share them."""
SHARED_AREAS = (b"/dev/zero (deleted)", b"[anon_shmem:")
"""What /proc/PID/maps calls memory that several processes share and that is no file."""


class ProcessMemory:
    """What one process has: `own` bytes, and `mapped` bytes beside them: libraries, address space that is only
    reserved, and memory shared with others. Shared pages may exist that this process has not touched yet, so its own
    counters do not show them."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status = status_of(pid)
        self.own = sum_of_fields(self.status, OWN_FIELDS)
        self.mapped = sum_of_fields(self.status, (b"VmSize",)) - sum_of_fields(self.status, (b"VmData", b"VmStk"))
        self.areas: dict[bytes, int] = {}

    def find_areas(self) -> None:
        """Find shared memory by inode, each area up to the last byte that is mapped. A process whose maps nobody may
        read is counted as if all that it maps were such memory."""
        maps = read_of_process(self.pid, "maps")
        if not maps:
            self.areas = {b"%d" % self.pid: max(0, self.mapped)}
        for line in maps.splitlines():
            where, _, offset, _, inode, *name = line.split(None, 5)
            if name and name[0].startswith(SHARED_AREAS):
                start, _, end = where.partition(b"-")
                last = int(offset, 16) + int(end, 16) - int(start, 16)
                self.areas[inode] = max(last, self.areas.get(inode, 0))

    def divide(self) -> None:
        """Count a page that forks share as a fraction for each; in full, where the process may not be looked into."""
        text = read_or_empty(f"/proc/{self.pid}/smaps_rollup")
        if text:
            self.own = sum_of_fields(text, DIVIDED_FIELDS) + sum_of_fields(self.status, (b"VmPTE",))

    @property
    def all(self) -> int:
        return self.own + sum(self.areas.values())


class MemoryWatch:
    """Looks as long as the loop runs. It kills only after two looks in a row: while a process forks to start a program,
    all of its memory seems to be there twice."""

    def __init__(self, loop: Loop, limit: int) -> None:
        self.loop = loop
        self.limit = limit
        self.exceeded = False
        self.look()

    def look(self) -> None:
        began = time.monotonic()
        me = posix.getpid()
        found = [ProcessMemory(pid) for pid in descendants(processes(), {me}) - {me}]
        total = sum(one.own + max(0, one.mapped) for one in found)
        # Each step is more exact than what is known by then, and costs more: mostly none is needed.
        for refine in (ProcessMemory.find_areas, ProcessMemory.divide):
            if total > self.limit:
                for one in found:
                    refine(one)
                total = total_memory(found)
        if total > self.limit and self.exceeded:
            kill_largest(found, total - self.limit)
        self.exceeded = total > self.limit
        wait = MIN_PAUSE if self.exceeded else min(MAX_PAUSE, max(MIN_PAUSE, (self.limit - total) / RATE))
        self.loop.at(self, max(wait, REST_FACTOR * (time.monotonic() - began)), self.look)


def total_memory(found: list[ProcessMemory]) -> int:
    """Bytes of all processes, each shared area counted once."""
    areas: dict[bytes, int] = {}
    for one in found:
        for inode, size in one.areas.items():
            areas[inode] = max(size, areas.get(inode, 0))
    return sum(one.own for one in found) + sum(areas.values())


def kill_largest(found: list[ProcessMemory], excess: int) -> None:
    for one in sorted(found, key=lambda one: one.all, reverse=True):
        if excess <= 0:
            break
        if send_signal(one.pid, _signal.SIGKILL):
            excess -= one.all


def status_of(pid: int) -> bytes:
    return read_of_process(pid, "status", b"VmSize")


def read_of_process(pid: int, name: str, needed: bytes = b"") -> bytes:
    """A file of /proc/PID. Where the process's first thread has ended, its file is empty or lacks `needed`, and that of
    another thread is read."""
    text = read_or_empty(f"/proc/{pid}/{name}")
    for thread in () if text and needed in text else threads(pid):
        text = read_or_empty(f"/proc/{pid}/task/{thread}/{name}")
        if text and needed in text:
            break
    return text


def sum_of_fields(text: bytes, names: tuple[bytes, ...]) -> int:
    """The sum of some of the lines `Name:  123 kB`, in bytes."""
    lines = (line.partition(b":") for line in text.splitlines())
    return sum(int(value.split()[0]) for name, _, value in lines if name in names) << 10
