"""Teardown runs to its end, and then its caller is cancelled after all."""

from __future__ import annotations

import asyncio

import pytest

from outrider.shield import shielded


async def test_a_cancelled_caller_still_finishes_the_work() -> None:
    begun, go = asyncio.Event(), asyncio.Event()
    done: list[str] = []

    async def work() -> None:
        begun.set()
        await go.wait()
        done.append("work")

    async with asyncio.TaskGroup() as callers:
        caller = callers.create_task(shielded(work))
        await begun.wait()
        caller.cancel()
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()
        go.set()
    assert caller.cancelled()
    assert done == ["work"]


async def test_the_outcome_reaches_the_caller_as_it_is() -> None:
    async def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await shielded(fails)
    assert await shielded(lambda: asyncio.sleep(0, "done")) == "done"


async def test_a_cancelled_caller_is_cancelled_though_the_work_failed() -> None:
    begun = asyncio.Event()

    async def fails() -> None:
        begun.set()
        await asyncio.sleep(0)
        raise ValueError("no")

    async with asyncio.TaskGroup() as callers:
        caller = callers.create_task(shielded(fails))
        await begun.wait()
        caller.cancel()
    assert caller.cancelled()
