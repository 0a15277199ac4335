"""Refuses new groups while the queue is full, and computes when the client should try again.

A group of any size is accepted if one of these conditions holds:

- The queue is shorter than the limit.
- The queue is shorter than twice the limit, and the group's run has fewer queued sessions than its share. With R runs
  in the queue, the share is the limit divided by R + 1. So one run cannot block all others.
- The queue is shorter than three times the limit, and the group's tenant has fewer queued sessions than its share,
  which is computed in the same way. So one tenant cannot block the others with many runs.

The sessions of a run are in one bucket of the queue (see `store/queue.py`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable

from outrider.errors import QueueFull
from outrider.store.rows import GroupRow, QueueLength
from outrider.store.store import Store

RATE_SECONDS = 60.0
"""The rate of finished sessions is measured over this many seconds."""

SHORTEST, LONGEST = 1.0, 60.0
"""Minimum and maximum of the `Retry-After` header, in seconds, in the reply that refuses a group."""

COUNT_SECONDS = 0.5
"""Minimum seconds between two counts of a full queue. Counting 100,000 sessions takes 12 ms."""


class BackPressure:
    """Refuses groups while the queue is full. Call `await check(group)` before a group is stored, and `note_done`
    whenever a session has ended."""

    def __init__(self, store: Store, bound: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._bound = bound
        self._clock = clock
        self._length: QueueLength | None = None
        self._counted_at = -math.inf
        self._added = 0
        """Number of sessions accepted since the last count. It is not reduced when sessions leave the queue."""
        self._ends: deque[float] = deque(maxlen=10_000)
        self._counting = asyncio.Lock()

    def note_done(self) -> None:
        self._ends.append(self._clock())

    async def check(self, group: GroupRow) -> None:
        """Count the group's sessions as queued, or raise QueueFull. A group whose idempotency key is already stored is
        accepted, because it was accepted before."""
        length = await self._count()
        waiting = length.sessions + self._added
        if waiting >= self._bound:
            key = group.idempotency_key
            known = key is not None and await self._store.has_key(group.tenant, key)
            if not known and not await self._has_small_part(group, length, waiting):
                raise self._refusal(waiting)
        self._added += group.n

    async def _count(self) -> QueueLength:
        async with self._counting:
            known = self._length
            fresh = self._clock() - self._counted_at < COUNT_SECONDS
            # Sessions that were added since the last count may have left the queue already. If the queue seems full
            # only because of these sessions, count again.
            full = known is not None and known.sessions >= self._bound and fresh
            if known is None or (known.sessions + self._added >= self._bound and not full):
                self._added, self._counted_at = 0, self._clock()
                known = self._length = await self._store.queue_length()
            return known

    async def _has_small_part(self, group: GroupRow, length: QueueLength, waiting: int) -> bool:
        part = self._bound // (length.tenants + 1)
        if waiting < 3 * self._bound and await self._store.waiting(group.tenant, most=part) < part:
            return True
        part = self._bound // (length.buckets + 1)
        if waiting >= 2 * self._bound:
            return False
        return await self._store.waiting(group.tenant, group.labels, most=part) < part

    def _refusal(self, waiting: int) -> QueueFull:
        since = self._clock() - RATE_SECONDS
        while self._ends and self._ends[0] < since:
            self._ends.popleft()
        span = max(1.0, self._clock() - self._ends[0]) if self._ends else RATE_SECONDS
        excess = waiting - self._bound + 1
        seconds = excess * span / len(self._ends) if self._ends else LONGEST
        return QueueFull(
            f"{waiting} sessions wait in the queue, and more are not accepted",
            hint="wait as Retry-After says and submit it again; the setting queue.sessions is the bound",
            retry_after=min(LONGEST, max(SHORTEST, math.ceil(seconds))),
        )
