"""Waits with a time limit: for one event, or for a broadcast that wakes every waiter.

The module is independent of the event's meaning. Invariant: a waiter that took `next()` before `send` never misses the
broadcast.
"""

from __future__ import annotations

import asyncio


class Broadcast:
    """Wakes all waiters at once.

    Take `next()` first, then read the announced state, then wait for the event: a change between the read and the wait
    sets the event that the waiter already holds.
    """

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def send(self) -> None:
        event, self._next = self._next, asyncio.Event()
        event.set()

    def next(self) -> asyncio.Event:
        """Return the event that the next `send` sets. Each event is used once, so a late waiter never sees an old
        event."""
        return self._next


async def wait_for_event(event: asyncio.Event, seconds: float | None) -> None:
    """Return when the event is set, or after `seconds`. None waits without a limit."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
