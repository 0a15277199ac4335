"""Announces changes: a feed calls its subscribers, a broadcast wakes its waiters.

The module does not depend on the kind of change. Invariants: a feed's subscribers get every value published while they
are subscribed, in order; a waiter that took `next()` before `send` never misses the broadcast.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Feed(Generic[T]):
    """Publishes values to subscribers on the same event loop. A `Feed[None]` only announces that something has
    changed."""

    def __init__(self) -> None:
        self._subscribers: list[Callable[[T], None]] = []

    def subscribe(self, receive: Callable[[T], None]) -> Callable[[], None]:
        """Call `receive` with each value from now on. Returns the function that ends the subscription."""
        self._subscribers.append(receive)
        return lambda: self._subscribers.remove(receive)

    def publish(self, value: T) -> None:
        """Call all subscribers, in the order of their subscriptions. A subscriber must neither block nor raise."""
        for receive in tuple(self._subscribers):
            receive(value)


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
        """Return the event that the next `send` sets. Each event is used for one `send`, so a later waiter never gets
        an event that is already set."""
        return self._next


async def wait_for_event(event: asyncio.Event, seconds: float | None) -> None:
    """Return when the event is set, or after `seconds` seconds. With None there is no limit."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
