"""A session's own time: a budget that only runs while the session works, never while it waits for a lane."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Budget:
    """Seconds left to spend. `async with budget.spend():` raises TimeoutError when they run out inside."""

    def __init__(self, seconds: float) -> None:
        self.remaining = seconds
        self.exhausted = False

    @asynccontextmanager
    async def spend(self) -> AsyncIterator[None]:
        started = time.monotonic()
        timeout = asyncio.timeout(max(0.0, self.remaining))
        try:
            async with timeout:
                yield
        finally:
            self.remaining -= time.monotonic() - started
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
