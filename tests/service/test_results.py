"""Results by cursor: each group is returned exactly once, as soon as it has finished. Groups are in the order in which
they finished."""

from __future__ import annotations

import asyncio

from outrider.schemas import GroupView

from .conftest import MakeWorld
from .world import World


async def follow(world: World, count: int, *, limit: int) -> list[GroupView]:
    """Return the groups that a consumer receives if it requests the next page until it has `count` groups."""
    seen: list[GroupView] = []
    cursor = 0
    while len(seen) < count:
        page = await world.service.results(after=cursor, wait=30, limit=limit, samples=False)
        assert page.cursor >= cursor
        assert len(page.groups) <= limit
        seen += page.groups
        cursor = page.cursor
    return seen


async def test_each_consumer_sees_every_group_once_and_in_order(world: MakeWorld) -> None:
    async with world() as w, asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        consumers = [tasks.create_task(follow(w, 30, limit=limit)) for limit in (1, 4, 100)]
        submitted = [await w.submit("ask", n=1 + number % 3, priority=number % 5) for number in range(29)]
        submitted.append(await w.submit("wait door", n=2))
        await w.service.cancel(submitted[-1].id)
        for consumer in consumers:
            seen = await consumer
            assert sorted(view.id for view in seen) == sorted(view.id for view in submitted)
            assert [view.cursor for view in seen] == list(range(1, 31))
            finished = [view.finished or 0 for view in seen]
            assert finished == sorted(finished)


async def test_waiting_ends_with_its_time_and_keeps_the_cursor(world: MakeWorld) -> None:
    async with world() as w:
        submitted = await w.submit("ask")
        await w.done(submitted.id)
        page = await w.service.results(after=1, wait=0.05, limit=10, samples=False)
        assert (page.groups, page.cursor) == ([], 1)
        assert (await w.service.results(after=0, wait=30, limit=10, samples=True)).groups[0].samples
