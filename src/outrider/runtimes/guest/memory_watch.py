"""How much memory the sandbox's programs have together, where no control group bounds it: looked at now and then.

It counts what processes have: their own pages, those that they share, their page tables, what was swapped out. Memory
that belongs to no process is refused them (see seccomp.py), and files have their own bound. Invariant: while they have
more than they may, the largest is killed, as the kernel does with a control group. What comes and goes between two
looks is bounded for each process alone, by its rlimits.
"""

from __future__ import annotations

import posix
import time
from typing import TYPE_CHECKING

from outrider.runtimes.guest.poll_loop import Loop
from outrider.runtimes.guest.processes import descendants, processes, send_signal, slurp, threads

if TYPE_CHECKING:
    import signal as _signal
else:
    import _signal  # `signal` would add half again to the start-up time

RATE = 4 << 30
"""Bytes a second that programs may come to have: how soon they can reach the bound."""
SOONEST, LATEST = 0.05, 1.0
SHARE = 20
"""Looking takes one part of so many of the time."""
OWN = (b"RssAnon", b"VmSwap", b"VmPTE", b"HugetlbPages")
DIVIDED = (b"Pss_Anon", b"SwapPss", b"Private_Hugetlb", b"Shared_Hugetlb")
SHARED_AREAS = (b"/dev/zero (deleted)", b"[anon_shmem:")
"""What the kernel calls memory that several processes map and that is no file."""


class Taken:
    """What one process has: `own` bytes, and `apart` that are mapped beside them: libraries, address space that is only
    reserved, and memory shared with others, which may be there although this process does not see it in its place."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status = status_of(pid)
        self.own = sum_of(self.status, OWN)
        self.apart = sum_of(self.status, (b"VmSize",)) - sum_of(self.status, (b"VmData", b"VmStk"))
        self.areas: dict[bytes, int] = {}

    def find_areas(self) -> None:
        """By their inodes, each up to the last byte that is mapped. A process that lets nobody see may have as much as
        is apart."""
        maps = first_of(self.pid, "maps")
        if not maps:
            self.areas = {b"%d" % self.pid: max(0, self.apart)}
        for line in maps.splitlines():
            where, _, offset, _, inode, *name = line.split(None, 5)
            if name and name[0].startswith(SHARED_AREAS):
                start, _, end = where.partition(b"-")
                last = int(offset, 16) + int(end, 16) - int(start, 16)
                self.areas[inode] = max(last, self.areas.get(inode, 0))

    def divide(self) -> None:
        """Pages that forks share count as a part for each; all of them where the process lets nobody see that."""
        told = slurp(f"/proc/{self.pid}/smaps_rollup")
        if told:
            self.own = sum_of(told, DIVIDED) + sum_of(self.status, (b"VmPTE",))

    @property
    def all(self) -> int:
        return self.own + sum(self.areas.values())


class Watch:
    """Looks as long as the loop runs. Only what two looks in a row find is acted upon: a process that is just starting
    another seems to be there twice."""

    def __init__(self, loop: Loop, limit: int) -> None:
        self.loop = loop
        self.limit = limit
        self.exceeded = False
        self.look()

    def look(self) -> None:
        began = time.monotonic()
        me = posix.getpid()
        found = [Taken(pid) for pid in descendants(processes(), {me}) - {me}]
        total = sum(one.own + max(0, one.apart) for one in found)
        for closer in (Taken.find_areas, Taken.divide):  # each costs more than what is known by now
            if total > self.limit:
                for one in found:
                    closer(one)
                total = total_of(found)
        if total > self.limit and self.exceeded:
            kill_largest(found, total - self.limit)
        self.exceeded = total > self.limit
        wait = SOONEST if self.exceeded else min(LATEST, max(SOONEST, (self.limit - total) / RATE))
        self.loop.at(self, max(wait, SHARE * (time.monotonic() - began)), self.look)


def total_of(found: list[Taken]) -> int:
    """With each shared area once."""
    areas: dict[bytes, int] = {}
    for one in found:
        for inode, size in one.areas.items():
            areas[inode] = max(size, areas.get(inode, 0))
    return sum(one.own for one in found) + sum(areas.values())


def kill_largest(found: list[Taken], excess: int) -> None:
    for one in sorted(found, key=lambda one: one.all, reverse=True):
        if excess <= 0:
            break
        if send_signal(one.pid, _signal.SIGKILL):
            excess -= one.all


def status_of(pid: int) -> bytes:
    return first_of(pid, "status", b"VmSize")


def first_of(pid: int, name: str, needed: bytes = b"") -> bytes:
    """Of a process or, where its first thread has ended and tells nothing any more, of another thread."""
    told = slurp(f"/proc/{pid}/{name}")
    for thread in () if told and needed in told else threads(pid):
        told = slurp(f"/proc/{pid}/task/{thread}/{name}")
        if told and needed in told:
            break
    return told


def sum_of(text: bytes, names: tuple[bytes, ...]) -> int:
    """The sum of some of the lines `Name:  123 kB`, in bytes."""
    lines = (line.partition(b":") for line in text.splitlines())
    return sum(int(value.split()[0]) for name, _, value in lines if name in names) << 10
