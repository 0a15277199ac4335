"""Owners take turns: an owner with many requests does not delay the other owners."""

from __future__ import annotations

import asyncio
import random

from outrider.concurrency.turns import Turns


async def test_each_owner_is_served_before_any_is_served_twice() -> None:
    turns, served = Turns(1), list[str]()

    async def work(owner: str) -> None:
        async with turns.take(owner):
            served.append(owner)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        for owner in ("greedy",) * 5 + ("one",) * 2 + ("two",):
            tasks.create_task(work(owner))
    assert served == ["greedy", "greedy", "one", "two", "greedy", "one", "greedy", "greedy"]


async def test_an_owner_with_many_parts_has_no_more_turns_than_one_with_few() -> None:
    turns, served = Turns(1), list[str]()

    async def work(owner: str, part: str) -> None:
        async with turns.take(owner, part):
            served.append(owner + part)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks:
        for owner, part in ("a1", "a1", "a1", "a2", "a3", "b1", "b1"):
            tasks.create_task(work(owner, part))
    assert served == ["a1", "a1", "b1", "a2", "b1", "a3", "a1"]


async def test_a_cancelled_request_costs_its_owner_no_turn() -> None:
    turns, served = Turns(1), list[str]()

    async def work(owner: str, part: str) -> None:
        async with turns.take(owner, part):
            served.append(owner + part)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tasks, turns.take("x"):
        waiting = [tasks.create_task(work(owner, part)) for owner, part in ("a1", "a1", "a2", "b1")]
        await asyncio.sleep(0)
        waiting[0].cancel()
    assert served == ["a1", "b1", "a2"]


async def test_slots_are_neither_lost_nor_given_twice() -> None:
    """Requests are cancelled before their turn, in their turn, and at the moment when it comes."""
    draw = random.Random(0)
    turns, inside = Turns(3), 0

    async def work(owner: str) -> None:
        nonlocal inside
        async with turns.take(owner):
            inside += 1
            assert inside <= 3
            try:
                for _ in range(draw.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                inside -= 1

    tasks = [asyncio.ensure_future(work(draw.choice("abc"))) for _ in range(300)]
    while any(not task.done() for task in tasks):
        draw.choice(tasks).cancel()
        await asyncio.sleep(0)
    assert {type(error) for error in await asyncio.gather(*tasks, return_exceptions=True)} == {
        asyncio.CancelledError,
        type(None),
    }
    async with turns.take("a"), turns.take("b"), turns.take("c"):
        fourth = asyncio.ensure_future(work("d"))
        await asyncio.sleep(0)
        assert not fourth.done()
        inside = 0
    await fourth
