"""Holds new generations back while an engine is paused, and says when those in flight have ended.

It knows no engine. Invariant: `in_flight` counts exactly the generations between entering and leaving.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class PauseGate:
    """One engine's admission. Closing it holds back new generations and touches none in flight."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()

    @asynccontextmanager
    async def passage(self) -> AsyncGenerator[None, None]:
        """One generation: waits until the gate is open, and counts as in flight inside the block."""
        await self._open.wait()
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.clear()

    async def drained(self) -> None:
        """Returns once nothing is in flight."""
        await self._idle.wait()
