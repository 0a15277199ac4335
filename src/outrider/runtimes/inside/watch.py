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

from outrider.runtimes.inside.loop import Loop
from outrider.runtimes.inside.processes import descendants, processes, send_signal, slurp

if TYPE_CHECKING:
    import signal as _signal
else:
    import _signal  # `signal` would add half again to the start-up time

RATE = 4 << 30
"""Bytes a second that programs may come to have: how soon they can reach the bound."""
SOONEST, LATEST = 0.05, 1.0
SHARE = 20
"""Looking takes one part of so many of the time."""
COUNTED = (b"RssAnon", b"RssShmem", b"VmPTE", b"VmSwap")
DIVIDED = (b"Pss_Anon", b"Pss_Shmem", b"SwapPss")


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
        taken = sizes()
        total = sum(taken.values())
        if total > self.limit:  # perhaps only because what forks share was counted for each of them
            taken = {pid: proportional(pid, size) for pid, size in taken.items()}
            total = sum(taken.values())
        if total > self.limit and self.exceeded:
            kill_largest(taken, total - self.limit)
        self.exceeded = total > self.limit
        wait = SOONEST if self.exceeded else min(LATEST, max(SOONEST, (self.limit - total) / RATE))
        self.loop.at(self, max(wait, SHARE * (time.monotonic() - began)), self.look)


def sizes() -> dict[int, int]:
    """Bytes of memory of each process below this one, by its number."""
    me = posix.getpid()
    below = descendants(processes(), {me}) - {me}
    return {pid: fields_of(slurp(f"/proc/{pid}/status"), COUNTED) for pid in below}


def proportional(pid: int, size: int) -> int:
    """With a page of several processes counted as a part for each; `size` where the process lets nobody see that."""
    told = slurp(f"/proc/{pid}/smaps_rollup")
    page_tables = fields_of(slurp(f"/proc/{pid}/status"), (b"VmPTE",))
    return fields_of(told, DIVIDED) + page_tables if told else size


def fields_of(text: bytes, names: tuple[bytes, ...]) -> int:
    """The sum of some of the lines `Name:  123 kB`, in bytes."""
    lines = (line.partition(b":") for line in text.splitlines())
    return sum(int(value.split()[0]) for name, _, value in lines if name in names) << 10


def kill_largest(taken: dict[int, int], excess: int) -> None:
    for pid in sorted(taken, key=lambda pid: taken[pid], reverse=True):
        if excess <= 0:
            break
        if send_signal(pid, _signal.SIGKILL):
            excess -= taken[pid]
