"""Keeps Python's garbage collector from blocking the event loop while many sessions are live.

A full collection visits every object, which takes 0.3 s with 5,000 live sessions. So Python is configured never to
start a full collection. Instead, only young objects are collected every few seconds, which is a bounded amount of work.
The survivors are then frozen, so that no later collection visits them. Reference counts still free nearly all objects,
even frozen objects, because sessions and model calls leave no reference cycles (tests/service/test_garbage.py).

Other code, such as a plugin, may leave cycles. A full collection in an idle moment frees these cycles. A full
collection also runs in a busy process that has grown by more than GROWN_MOST and by more than half since the last full
collection. Invariant: while the process is busy and does not grow, collections visit only young objects.
"""

from __future__ import annotations

import gc
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from outrider.concurrency.chores import Chores, Failures

EVERY_SECONDS = 5.0
YOUNG = 5_000
"""Number of new objects after which Python collects the youngest generation."""
MIDDLE = 4
"""After this number of collections of the youngest generation, the second generation is collected, too. That collection
visits at most 25,000 objects, which took 19 ms on a slow machine. With four times as many objects it took 70 ms."""
NEVER = 1_000_000_000
GROWN_IDLE = 32 << 20
"""A full collection runs in the next idle moment if the process has grown by more than this number of bytes since the
last full collection."""
GROWN_MOST = 512 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")


class GarbageKeeper:
    """Collects garbage in `turn`, which must be called every EVERY_SECONDS. `idle` returns True if no caller waits for
    this process. `resident` returns the process's resident memory in bytes."""

    def __init__(self, idle: Callable[[], bool], resident: Callable[[], int] | None = None) -> None:
        self._idle = idle
        self._resident = resident or resident_bytes
        self._after = self._resident()
        """Resident bytes after the last full collection."""

    async def turn(self) -> None:
        grown = self._resident() - self._after
        if grown > max(GROWN_MOST, self._after // 2) or (grown > GROWN_IDLE and self._idle()):
            gc.unfreeze()
            gc.collect()
            self._after = self._resident()
        else:
            gc.collect(1)
        gc.freeze()


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes. Raises OSError."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@asynccontextmanager
async def collected_in_pieces(idle: Callable[[], bool], failures: Failures) -> AsyncIterator[None]:
    """While the block runs, collect the garbage of this process in small steps. Enter the block after all imports."""
    before = gc.get_threshold()
    # Freeze the objects that exist now, because they live as long as the process. A collection before the freeze would
    # take 100 ms, and would free only the little garbage that imports leave.
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, NEVER)
    try:
        async with Chores(failures) as chores:
            chores.begin("garbage", GarbageKeeper(idle).turn, every=EVERY_SECONDS, at_once=False)
            yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
