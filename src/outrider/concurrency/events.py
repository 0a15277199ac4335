"""Waiting for something to happen, for a limited time: one event, or a broadcast that wakes every waiter.

It does not know what the event means. Invariant: a broadcast is missed by nobody who took `next()` before it was sent.
"""

from __future__ import annotations

import asyncio


class Broadcast:
    """Wakes every waiter at once.

    Take `next()` first, then look at the state that is announced, then wait for the event: a change between the look
    and the wait sets an event that the waiter already holds.
    """

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def send(self) -> None:
        event, self._next = self._next, asyncio.Event()
        event.set()

    def next(self) -> asyncio.Event:
        """The event that the next `send` sets. Each event is used once, so a late waiter never sees an old one."""
        return self._next


async def wait_for_event(event: asyncio.Event, seconds: float | None) -> None:
    """Return when the event is set, or after `seconds`; None waits without a limit."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
