"""Teardown runs to its end, and then its caller is cancelled after all."""

from __future__ import annotations

import asyncio

import pytest

from outrider.sessions.shield import run_to_end


async def test_a_cancelled_caller_still_finishes_the_work() -> None:
    begun, go = asyncio.Event(), asyncio.Event()
    done: list[str] = []

    async def work() -> None:
        begun.set()
        await go.wait()
        done.append("work")

    async with asyncio.TaskGroup() as owner:
        async with asyncio.TaskGroup() as callers:
            caller = callers.create_task(run_to_end(owner, work(), name="work"))
            await begun.wait()
            caller.cancel()
            await asyncio.sleep(0)
            caller.cancel()
            await asyncio.sleep(0)
            assert not caller.done()
            go.set()
        assert caller.cancelled()
    assert done == ["work"]


async def test_an_error_of_the_work_reaches_the_caller_and_nobody_else() -> None:
    async def work() -> None:
        raise ValueError("no")

    async with asyncio.TaskGroup() as owner:
        with pytest.raises(ValueError, match="no"):
            await run_to_end(owner, work(), name="work")
        neighbour = owner.create_task(asyncio.sleep(0, "alive"))
    assert neighbour.result() == "alive"
