"""Limits the total memory of a sandbox's programs if no control group does.

The watch scans /proc at intervals. It counts the memory of processes: private pages, shared pages, page tables and
swap. Programs cannot get memory that belongs to no process (see seccomp.py), and files have their own limit.

Invariant: if two scans in a row find the programs above the limit, the largest ones are killed, as the kernel does in a
control group. Memory that is used only between two scans is limited for each process separately, by its rlimits.
"""

from __future__ import annotations

import posix
import time

from outrider.sandbox.runtimes.guest.poll_loop import REST_FACTOR, Loop
from outrider.sandbox.runtimes.guest.processes import (
    SIGKILL,
    descendants,
    processes,
    read_of_process,
    read_or_empty,
    send_signal,
)

RATE = 4 << 30
"""Assumed maximum growth of the programs' memory, in bytes per second. The next scan happens when the programs could
reach the limit at this rate."""
MIN_PAUSE, MAX_PAUSE = 0.05, 1.0
"""Minimum and maximum seconds between two scans."""
OWN_FIELDS = (b"RssAnon", b"VmSwap", b"VmPTE", b"HugetlbPages")
"""Lines of /proc/PID/status whose sum is a process's memory. A page that forks share is counted in full for each
process."""
DIVIDED_FIELDS = (b"Pss_Anon", b"SwapPss", b"Private_Hugetlb", b"Shared_Hugetlb")
"""Lines of /proc/PID/smaps_rollup whose sum is the memory of OWN_FIELDS without page tables. Here, a shared page is
divided among the processes that share it."""
SHARED_AREAS = (b"/dev/zero (deleted)", b"[anon_shmem:")
"""Prefixes of names in /proc/PID/maps that mark shared memory without a file."""


class ProcessMemory:
    """The memory of one process, in bytes. `own` is memory that the process has touched. `mapped` is the size of its
    libraries, reserved address space, and memory shared with other processes. A scan first counts both, because `own`
    does not include shared pages that only another process has touched."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status = read_of_process(pid, "status", b"VmSize")
        self.own = sum_of_fields(self.status, OWN_FIELDS)
        self.mapped = sum_of_fields(self.status, (b"VmSize",)) - sum_of_fields(self.status, (b"VmData", b"VmStk"))
        self.areas: dict[bytes, int] = {}

    def find_areas(self) -> None:
        """Fill `areas`, which maps the inode of each area of shared memory to a number of bytes: from the beginning of
        the area to the last byte that the process has mapped. If the process's maps cannot be read, all its mapped
        memory counts as one area."""
        maps = read_of_process(self.pid, "maps")
        if not maps:
            self.areas = {b"%d" % self.pid: max(0, self.mapped)}
        for line in maps.split(b"\n")[:-1]:
            where, _, offset, _, inode, *name = line.split(None, 5)
            if name and name[0].startswith(SHARED_AREAS):
                start, _, end = where.partition(b"-")
                last = int(offset, 16) + int(end, 16) - int(start, 16)
                self.areas[inode] = max(last, self.areas.get(inode, 0))

    def divide(self) -> None:
        """Divide each page that forks share among these forks, so that the page is counted only once. If the process's
        files cannot be read, such pages still count in full."""
        text = read_or_empty(f"/proc/{self.pid}/smaps_rollup")
        if text:
            self.own = sum_of_fields(text, DIVIDED_FIELDS) + sum_of_fields(self.status, (b"VmPTE",))

    @property
    def all(self) -> int:
        return self.own + sum(self.areas.values())


class MemoryWatch:
    """Scans the sandbox's processes as long as the loop runs. A single scan above the limit kills no process: when a
    process forks to start a program, its memory seems to be twice as large for a moment."""

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
        # Each of these steps makes the count more exact, but takes longer. Most scans need no such step, because the
        # first count is below the limit.
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
    """Return how many bytes of memory all processes use together. Each shared area is counted once."""
    areas: dict[bytes, int] = {}
    for one in found:
        for inode, size in one.areas.items():
            areas[inode] = max(size, areas.get(inode, 0))
    return sum(one.own for one in found) + sum(areas.values())


def kill_largest(found: list[ProcessMemory], excess: int) -> None:
    for one in sorted(found, key=lambda one: one.all, reverse=True):
        if excess <= 0:
            break
        if send_signal(one.pid, SIGKILL):
            excess -= one.all


def sum_of_fields(text: bytes, names: tuple[bytes, ...]) -> int:
    """Return the sum, in bytes, of the lines `Name: 123 kB` whose name is in `names`. The text is split only at
    newlines, because the line with the program's name may contain any other character."""
    lines = (line.partition(b":") for line in text.split(b"\n"))
    return sum(int(value.split()[0]) for name, _, value in lines if name in names) << 10
