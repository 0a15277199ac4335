"""A bell: many wait, one ring wakes them all."""

from __future__ import annotations

import asyncio


class Bell:
    """Take the `next_ring`, look at what it announces, then wait for it (`rung`): so none is missed in between."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def ring(self) -> None:
        rung, self._next = self._next, asyncio.Event()
        rung.set()

    def next_ring(self) -> asyncio.Event:
        """Set by the first `ring` from now on."""
        return self._next


async def rung(ring: asyncio.Event, seconds: float) -> None:
    """Until the ring, at most `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await ring.wait()
    except TimeoutError:
        return
