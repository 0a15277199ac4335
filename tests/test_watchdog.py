"""The watchdog counts how often the event loop stands still, and says where."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from outrider.concurrency.watchdog import STALL, Watchdog


def hold(seconds: float) -> None:
    """Keep the event loop at work."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


async def test_work_that_holds_the_loop_is_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "outrider.concurrency.watchdog"):
        async with Watchdog() as watchdog:
            with watchdog.witness() as seen:
                hold(4 * STALL)
                await asyncio.sleep(0.05)
    assert watchdog.stalls.count >= 1
    assert watchdog.stalls.longest >= 3 * STALL
    assert watchdog.stalls.held >= 4 * STALL
    assert watchdog.stalls.total >= watchdog.stalls.longest
    assert seen.longest >= 3 * STALL
    assert "was blocked" in caplog.text
    assert "hold (" in caplog.text or "in one call" in caplog.text  # on a busy machine nobody may have looked


async def test_a_stall_counts_before_the_timer_has_run() -> None:
    async with Watchdog() as watchdog:
        before = watchdog.stood_still()
        time.sleep(2 * STALL)  # noqa: ASYNC251  # the loop stands still
        assert watchdog.stood_still() - before >= STALL


async def test_what_a_witness_has_not_seen_is_not_counted_for_it() -> None:
    async with Watchdog() as watchdog:
        hold(2 * STALL)
        await asyncio.sleep(0.05)
        with watchdog.witness() as seen:
            pass
    assert (seen.total, seen.longest) == (0, 0)
