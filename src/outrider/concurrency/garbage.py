"""Keeps Python's garbage collector from blocking the event loop while many sessions are live.

A full collection visits every object, which takes 0.3 s with 5,000 live sessions. So Python is configured never to
start a full collection. Every few seconds only the young objects are collected, which is a bounded amount of work. The
survivors are frozen, so that no later collection visits them. Nearly all objects, frozen or not, are freed by their
reference count, because sessions and model calls leave no cycles (tests/service/test_garbage.py).

Cycles of other code, such as a plugin, are freed by full collections in idle moments. To bound the memory, a full
collection does not wait for an idle moment if the process has grown by more than GROWN_MOST and by more than half since
the last one. Invariant: while the process is not idle and does not grow, collections visit only young objects.
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
"""Number of collections of the youngest generation after which the second generation is collected, too. Such a
collection visits at most 25,000 objects. This took 19 ms on a slow machine; four times as many objects took 70 ms."""
NEVER = 1_000_000_000
GROWN_IDLE = 32 << 20
"""If the process has grown by more than this number of bytes since the last full collection, the next full collection
runs in the next idle moment."""
GROWN_MOST = 512 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")


class GarbageKeeper:
    """Collects garbage: call `turn` every EVERY_SECONDS. `idle` returns True if no caller waits for this process now.
    `resident` returns the resident memory of the process in bytes."""

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
    """Collect the garbage of this process in pieces while the block runs. Enter the block after all imports."""
    before = gc.get_threshold()
    # Objects that exist now live as long as the process. No collection runs before the freeze: it would take 100 ms,
    # and would free only the little garbage that imports leave.
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, NEVER)
    try:
        async with Chores(failures) as chores:
            chores.begin("garbage", GarbageKeeper(idle).turn, every=EVERY_SECONDS, at_once=False)
            yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
