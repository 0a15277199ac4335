"""A bell: many wait, one ring wakes them all."""

from __future__ import annotations

import asyncio


class Bell:
    """Whoever waits is woken by the next `ring`; a ring that nobody waits for is not remembered."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def ring(self) -> None:
        rung, self._next = self._next, asyncio.Event()
        rung.set()

    async def wait(self, seconds: float) -> None:
        """Until the next ring, at most `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._next.wait()
        except TimeoutError:
            return
