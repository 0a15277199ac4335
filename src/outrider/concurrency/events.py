"""Announces changes on the event loop: a `Feed` calls its subscribers, and a `Broadcast` wakes waiting tasks.

Invariants: a subscriber of a feed gets, in order, every value published while it is subscribed. A task that called
`next()` before `send` never misses the broadcast.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Feed(Generic[T]):
    """Passes values to subscribers on the same event loop. A `Feed[None]` passes no data: it only announces that
    something has changed."""

    def __init__(self) -> None:
        self._subscribers: list[Callable[[T], None]] = []

    def subscribe(self, receive: Callable[[T], None]) -> Callable[[], None]:
        """Call `receive` with every value published from now on. Returns a function that ends the subscription."""
        self._subscribers.append(receive)
        return lambda: self._subscribers.remove(receive)

    def publish(self, value: T) -> None:
        """Call all subscribers, in the order of their subscriptions. A subscriber must neither block nor raise."""
        for receive in tuple(self._subscribers):
            receive(value)


class Broadcast:
    """Wakes all waiting tasks at once.

    A task first calls `next()`, then reads the state that it waits for, and then awaits the event. If the state changes
    after the read, `send` sets this event, so the task misses no change.
    """

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def send(self) -> None:
        event, self._next = self._next, asyncio.Event()
        event.set()

    def next(self) -> asyncio.Event:
        """Return the event that the next `send` sets. Every `send` uses up its event, so the returned event is not set
        yet."""
        return self._next


async def wait_for_event(event: asyncio.Event, seconds: float | None) -> None:
    """Wait until the event is set, but at most `seconds` seconds. With None, there is no maximum."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
