"""A budget runs only while it is spent and reports whether it ran out; a cutoff ends its own block."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

import pytest

from outrider.sessions.clock import LOOK_AGAIN, Budget, Cutoff, PausableTimeout, Stopwatch
from support.clock import pass_time, stop_time


def never() -> float:
    """A clock of stalls for an event loop that never stalls."""
    return 0.0


async def test_only_time_inside_the_block_is_charged() -> None:
    budget = Budget(1000.0, never)
    async with budget.spend():
        await asyncio.sleep(0)
    spent = 1000.0 - budget.remaining
    await asyncio.sleep(0.02)
    assert 1000.0 - budget.remaining == spent
    assert not budget.exhausted


async def test_an_empty_budget_ends_the_block() -> None:
    budget = Budget(0.01, never)
    with pytest.raises(TimeoutError):
        async with budget.spend():
            await asyncio.Event().wait()
    assert budget.exhausted


async def test_time_in_which_the_service_stood_still_is_not_charged() -> None:
    stood = 0.0
    budget = Budget(0.2, lambda: stood)
    async with budget.spend():
        time.sleep(0.3)  # noqa: ASYNC251  # blocks the event loop
        stood = 0.3
        await asyncio.sleep(0)
    assert 0 < budget.remaining <= 0.2
    with pytest.raises(TimeoutError):
        async with budget.spend():
            await asyncio.Event().wait()
    assert budget.exhausted


async def test_somebody_elses_timeout_is_not_the_budgets() -> None:
    budget = Budget(1000.0, never)
    with pytest.raises(TimeoutError):
        async with budget.spend():
            raise TimeoutError
    assert not budget.exhausted


async def test_a_cutoff_ends_its_block_and_nothing_before_or_after_it() -> None:
    cutoff = Cutoff()
    cutoff.cut()
    async with cutoff.block():
        await asyncio.sleep(0)
    cutoff.cut()
    async with cutoff.block():
        await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(cutoff.cut)
    with pytest.raises(TimeoutError):
        async with cutoff.block():
            await asyncio.Event().wait()


async def test_a_second_cut_of_a_block_does_nothing() -> None:
    """A block may be cut twice: first because a turn could not be stored, then because a call that is still running
    reaches a limit."""
    cutoff = Cutoff()

    async def cut_twice() -> None:
        async with cutoff.block():
            cutoff.cut()
            try:
                await asyncio.Event().wait()
            finally:
                cutoff.cut()

    with pytest.raises(TimeoutError):
        await cut_twice()


def test_a_stopwatch_books_everything_between_laps() -> None:
    watch = Stopwatch()
    watch.lap("init")
    watch.lap("run")
    watch.lap("init")
    assert set(watch.seconds) == {"init", "run"}
    assert all(seconds >= 0 for seconds in watch.seconds.values())


async def test_a_clock_that_stands_still_is_not_looked_at_all_the_time() -> None:
    """While a policy is paused, which may take minutes, a budget with almost nothing left reads its clock only every
    LOOK_AGAIN seconds."""
    loop = asyncio.get_running_loop()
    began, looks = loop.time(), 0

    def since_then() -> float:
        nonlocal looks
        looks += 1
        return loop.time() - began

    budget = Budget(0.001, since_then)
    async with budget.spend():
        await asyncio.sleep(0.2)
    assert not budget.exhausted
    assert looks <= (loop.time() - began) / LOOK_AGAIN + 4


async def test_a_paused_timeout_goes_on_after_an_exception() -> None:
    stop_time()
    timeout = PausableTimeout(1.0)

    async def work() -> None:
        async with timeout.block:
            with suppress(ValueError), timeout.paused():
                await pass_time(5.0)
                raise ValueError
            await pass_time(0.9)
            assert not timeout.block.expired()
            await pass_time(0.2)

    with pytest.raises(TimeoutError):
        await work()


async def test_a_timeout_is_paused_until_the_last_of_its_pauses_ends() -> None:
    stop_time()
    timeout = PausableTimeout(1.0)

    async def work() -> None:
        async with timeout.block:
            longer, shorter = timeout.paused(), timeout.paused()
            await pass_time(0.5)
            for pause in (shorter, longer):
                pause.__enter__()
            for pause in (shorter, longer):
                await pass_time(5.0)
                pause.__exit__(None, None, None)
            await pass_time(0.4)
            assert not timeout.block.expired()
            await pass_time(0.2)

    with pytest.raises(TimeoutError):
        await work()


async def test_a_pause_may_outlast_its_timeout() -> None:
    timeout = PausableTimeout(1.0)
    async with timeout.block:
        pause = timeout.paused()
        pause.__enter__()
    pause.__exit__(None, None, None)
    with timeout.paused():
        await asyncio.sleep(0)
    assert not timeout.block.expired()
