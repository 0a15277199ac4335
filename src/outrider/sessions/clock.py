"""A session's own time: a budget that only runs while the session works, never while it waits for a lane or while the
service stands still."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Budget:
    """Seconds left to spend. `async with budget.spend():` raises TimeoutError when they run out inside.

    `stood_still` tells for how many seconds in all the event loop has stood still until now: that is not charged.
    """

    def __init__(self, seconds: float, stood_still: Callable[[], float]) -> None:
        self.remaining = seconds
        self.exhausted = False
        self._stood_still = stood_still

    @asynccontextmanager
    async def spend(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        started, stood = loop.time(), self._stood_still()
        budget = self.remaining

        timer: asyncio.TimerHandle

        def charge() -> None:
            worked = loop.time() - started - (self._stood_still() - stood)
            self.remaining = budget - max(0.0, worked)

        def look() -> None:
            nonlocal timer
            charge()
            if self.remaining <= 0:
                timeout.reschedule(loop.time())
            else:  # the loop stood still meanwhile
                timer = loop.call_later(self.remaining, look)

        timer = loop.call_later(max(0.0, budget), look)
        timeout = asyncio.timeout(None)
        try:
            async with timeout:
                yield
        finally:
            timer.cancel()
            charge()
            self.exhausted = self.exhausted or timeout.expired()


class Stopwatch:
    """Names the stage time is spent in: `lap(name)` books everything since the last lap under `name`."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now
