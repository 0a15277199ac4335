"""Waiting for an event, or for a broadcast to every waiter."""

from __future__ import annotations

import asyncio

from outrider.concurrency.events import Broadcast, wait_for_event


async def test_a_broadcast_between_looking_and_waiting_is_not_missed() -> None:
    broadcast = Broadcast()
    event = broadcast.next()
    broadcast.send()
    async with asyncio.timeout(30):
        await wait_for_event(event, 60)
    await wait_for_event(broadcast.next(), 0)  # an earlier broadcast is not taken for the next one
    assert not broadcast.next().is_set()
