"""Keeps Python's garbage collector from holding the event loop while many sessions live.

A full collection looks at every object: 0.3 s with 5,000 live sessions. So none is left to Python. Every few seconds
the young objects are collected, which is a bounded amount of work, and what survives is frozen: no collection looks at
it again. Nearly everything is freed by its reference count, frozen or not; sessions and model calls leave no cycles
(tests/service/test_garbage.py). What cycles others leave, such as a plugin, is freed by full collections in idle
moments; at the latest when the process has grown by GROWN_MOST and by half, so that memory has a bound. It knows no
session. Invariant: while the process is not idle and does not grow, no collection looks at more than young objects.
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
"""New objects after which Python collects them."""
MIDDLE = 4
"""After so many of these collections the second generation is collected, too: 25,000 objects at most. That took 19 ms
on a slow machine, and 70 ms with four times as many."""
NEVER = 1_000_000_000
GROWN_IDLE = 32 << 20
"""Bytes by which the process has grown since the last full collection when an idle moment is used for one."""
GROWN_MOST = 512 << 20
PAGE = os.sysconf("SC_PAGE_SIZE")


class GarbageKeeper:
    """Call `turn` every EVERY_SECONDS. `idle` says whether nobody waits for this process now, `resident` how many bytes
    of memory it has."""

    def __init__(self, idle: Callable[[], bool], resident: Callable[[], int] | None = None) -> None:
        self._idle = idle
        self._resident = resident or resident_bytes
        self._after = self._resident()
        """When all was collected last."""

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
    """Raises OSError."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@asynccontextmanager
async def collected_in_pieces(idle: Callable[[], bool], failures: Failures) -> AsyncIterator[None]:
    """While the block runs, the garbage of this process is collected in pieces. Enter it when all is imported."""
    before = gc.get_threshold()
    # Objects that exist now stay for good. A collection before the freeze would take 100 ms, which the little garbage
    # of importing is not worth.
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, NEVER)
    try:
        async with Chores(failures) as chores:
            chores.begin("garbage", GarbageKeeper(idle).turn, every=EVERY_SECONDS, at_once=False)
            yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
