"""Teardown runs to its end, and only then is its caller cancelled."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from outrider.concurrency.cancellation import opened_in_thread, shielded
from support.threads import cancelled_late


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


async def test_work_that_takes_longer_than_its_grace_is_cancelled_after_its_caller() -> None:
    begun = asyncio.Event()
    ended: list[str] = []

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("work")

    async with asyncio.TaskGroup() as callers:
        caller = callers.create_task(shielded(work, grace=0.05))
        await begun.wait()
        caller.cancel()
        await asyncio.sleep(0)
        assert ended == []
    assert caller.cancelled()
    assert ended == ["work"]


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


async def test_a_timeout_inside_the_work_ends_the_work_only() -> None:
    async def work() -> str:
        try:
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        except TimeoutError:
            return "timed out"
        return "unreachable"

    assert await shielded(work) == "timed out"


async def test_a_cancel_in_the_loop_pass_in_which_the_work_ends_still_counts() -> None:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[str] = loop.create_future()

    async with asyncio.TaskGroup() as callers:
        caller = callers.create_task(shielded(lambda: future))
        await asyncio.sleep(0)
        future.set_result("done")
        caller.cancel()
    assert caller.cancelled()


async def test_what_a_failed_work_held_goes_at_once() -> None:
    """The objects are freed at once, without the garbage collector, because the body of a refused request has
    megabytes."""

    class Body:
        """An object to which only the frame of the failed work refers."""

    seen: list[weakref.ref[Body]] = []

    async def fails() -> None:
        body = Body()
        seen.append(weakref.ref(body))
        raise ValueError("no")

    gc.disable()
    try:
        try:
            await shielded(fails)
        except ValueError:
            assert seen[0]() is not None
        assert seen[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("moment", ["making", "use", "ending", "none"])
async def test_what_was_opened_is_ended_whenever_the_caller_is_cancelled(moment: str) -> None:
    told: list[str] = []

    def make() -> int:
        told.append("made")
        return 7

    async def use() -> None:
        async with opened_in_thread(make, lambda made: told.append(f"ended {made}")) as made:
            told.append(f"used {made}")
            if moment == "use":
                await asyncio.Event().wait()

    if moment in ("making", "ending"):
        assert await cancelled_late(use(), number=1 if moment == "making" else 2)
    elif moment == "use":
        async with asyncio.TaskGroup() as group:
            task = group.create_task(use())
            while len(told) < 2:  # noqa: ASYNC110  # a thread appends to the list
                await asyncio.sleep(0)
            task.cancel()
    else:
        await use()
    assert told == ["made", *(["used 7"] if moment != "making" else []), "ended 7"]


async def test_what_could_not_be_opened_is_not_ended() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        async with opened_in_thread(lambda: int("x"), lambda _: pytest.fail("there is nothing to end")):
            pass
