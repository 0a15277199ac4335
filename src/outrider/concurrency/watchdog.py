"""Sees when the event loop stands still: counts it, and logs where.

All sessions share one event loop, so whatever holds it stops them all. A timer that is late shows that it was held, or
that the process got no processor; a thread looks at what the loop was doing meanwhile. It knows nothing of sessions.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from outrider.schemas import StallStats

log = logging.getLogger("outrider.concurrency.watchdog")

PERIOD = 0.01
STALL = 0.05
"""Seconds. What is shorter is the ordinary work of many sessions."""
LOG_SECONDS = 10.0
"""At most one line in so long."""
FRAMES = 4


class Witness:
    """What was seen of stalls since it was made: their seconds in all, and the longest."""

    def __init__(self) -> None:
        self.total = 0.0
        self.longest = 0.0


class Watchdog:
    """`async with Watchdog() as watchdog` on the event loop that is watched; `stalls` is what it has seen."""

    def __init__(self) -> None:
        self.stalls = StallStats()
        self._seen = 0.0
        self._worked = 0.0
        self._loop_thread = 0
        self._where = ""
        self._logged = -LOG_SECONDS
        self._witnesses: set[Witness] = set()
        self._ended = threading.Event()
        self._timer: asyncio.TimerHandle | None = None

    def stood_still(self) -> float:
        """For how many seconds in all the loop has stood still until now: a stall that has just ended counts, though
        the timer has not run since."""
        now = time.monotonic() - self._seen - PERIOD
        return self.stalls.total + (now if now >= STALL else 0.0)

    @contextmanager
    def witness(self) -> Iterator[Witness]:
        witness = Witness()
        self._witnesses.add(witness)
        try:
            yield witness
        finally:
            self._witnesses.discard(witness)

    async def __aenter__(self) -> Self:
        self._loop_thread = threading.get_ident()
        self._seen, self._worked = time.monotonic(), time.thread_time()
        self._look_later()
        self._sampler = threading.Thread(target=self._sample, name="outrider-watchdog", daemon=True)
        self._sampler.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._ended.set()
        await asyncio.to_thread(self._sampler.join)

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(PERIOD, self._look)

    def _look(self) -> None:
        now, worked = time.monotonic(), time.thread_time()
        stood, held = now - self._seen - PERIOD, worked - self._worked
        self._seen, self._worked = now, worked
        if stood >= STALL:
            self._count(now, stood, held)
        self._where = ""
        self._look_later()

    def _count(self, now: float, stood: float, held: float) -> None:
        seen = self.stalls
        self.stalls = StallStats(
            count=seen.count + 1,
            total=seen.total + stood,
            longest=max(seen.longest, stood),
            held=max(seen.held, held),
        )
        for witness in self._witnesses:
            witness.total += stood
            witness.longest = max(witness.longest, stood)
        if now - self._logged >= LOG_SECONDS:
            self._logged = now
            where = self._where or "in one call"
            log.warning("the event loop stood still for %.2f s, %.2f s of them at work: %s", stood, held, where)

    def _sample(self) -> None:
        """Note what the loop does once it has stood still for STALL."""
        while not self._ended.wait(STALL / 2):
            if not self._where and time.monotonic() - self._seen >= STALL:
                frame = sys._current_frames().get(self._loop_thread)
                stack = traceback.extract_stack(frame)[-FRAMES:] if frame is not None else []
                self._where = " < ".join(f"{one.name} ({one.filename}:{one.lineno})" for one in reversed(stack))
