"""Holds new generations back while an engine is paused, and signals when the generations in flight have ended.

Invariant: `in_flight` counts exactly the generations between entering and leaving.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from outrider.concurrency.events import wait_for_event


class PauseGate:
    """One engine's admission. Closing the gate holds back new generations and leaves those in flight alone."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.closings = 0
        """Number of times that the gate was closed."""
        self._cuts: set[Callable[[], None]] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()

    @asynccontextmanager
    async def passage(self, cut: Callable[[], None] = lambda: None) -> AsyncGenerator[None, None]:
        """Enclose one generation: wait until the gate is open, and count the generation as in flight until the block
        ends. `cut_off` calls `cut`."""
        await self._open.wait()
        self.in_flight += 1
        self._idle.clear()
        self._cuts.add(cut)
        try:
            yield
        finally:
            self._cuts.discard(cut)
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self.closings += self._open.is_set()
        self._open.clear()

    async def drained(self, seconds: float | None = None) -> None:
        """Return once nothing is in flight, or after `seconds` (None: no limit)."""
        await wait_for_event(self._idle, seconds)

    def cut_off(self) -> None:
        """Cut off every generation in flight, as far as its `cut` can."""
        for cut in tuple(self._cuts):
            cut()
