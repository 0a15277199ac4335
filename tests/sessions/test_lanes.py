"""A lane never gives out more slots than it has, serves by priority, and stays correct if waits are cancelled."""

from __future__ import annotations

import asyncio
import random

from outrider.sessions.lanes import HeldSlot, Lane
from outrider.sessions.priority_semaphore import URGENT as COMES_FIRST
from outrider.sessions.priority_semaphore import PrioritySemaphore


async def test_a_free_slot_is_taken_at_once_and_given_back() -> None:
    lane = Lane("run", 1)
    async with await lane.take():
        assert lane.stats().in_use == 1
    assert lane.stats().in_use == 0
    assert lane.stats().served == 1


async def test_the_highest_priority_is_served_first_and_equals_in_order() -> None:
    lane = Lane("run", 1)
    held = await lane.take()
    served: list[str] = []

    async def wait(name: str, priority: int) -> None:
        async with await lane.take(priority):
            served.append(name)

    async with asyncio.TaskGroup() as group:
        for name, priority in (("low", 0), ("first high", 5), ("second high", 5), ("lowest", -1)):
            group.create_task(wait(name, priority))
        await asyncio.sleep(0)
        assert lane.stats().waiting == 4
        held.release()
    assert served == ["first high", "second high", "low", "lowest"]


async def test_tenants_take_turns_and_the_priority_orders_those_of_one() -> None:
    lane = Lane("run", 3)
    held = [await lane.take(0, "loud") for _ in range(3)]
    served: list[str] = []
    kept = []

    async def wait(name: str, priority: int, tenant: str) -> None:
        kept.append(await lane.take(priority, tenant))
        served.append(name)

    async with asyncio.TaskGroup() as group:
        for name, priority in (("loud", 1000), ("loud too", 1000), ("loudest", 1001)):
            group.create_task(wait(name, priority, "loud"))
        for name, priority in (("new", -1000), ("newest", 0)):
            group.create_task(wait(name, priority, "new"))
        group.create_task(wait("urgent", COMES_FIRST, "loud"))
        await asyncio.sleep(0)
        while held or kept:
            (held or kept).pop(0).release()
            for _ in range(3):
                await asyncio.sleep(0)
    assert served == ["urgent", "newest", "loudest", "new", "loud", "loud too"]
    assert not lane._slots._owners


async def test_no_owner_has_more_than_its_share() -> None:
    line = PrioritySemaphore(10, share=0.5)
    first = await line.take((3,), owner="a")
    waiting = asyncio.ensure_future(line.take((3,), owner="a"))
    small = asyncio.ensure_future(line.take((1,), owner="a"))
    other = await asyncio.wait_for(line.take((5,), owner="b"), 1)
    assert not waiting.done()
    assert not small.done()
    first.release()
    for slot in (other, await waiting, await small):
        slot.release()
    assert (line.taken, line._owners) == ((0,), {})


async def test_releasing_twice_gives_back_one_slot() -> None:
    lane = Lane("run", 2)
    slot = await lane.take()
    await lane.take()
    slot.release()
    slot.release()
    assert lane.stats().in_use == 1


async def test_a_wait_cancelled_after_the_hand_over_passes_the_slot_on() -> None:
    lane = Lane("run", 1)
    held = await lane.take()
    async with asyncio.TaskGroup() as group:
        doomed = group.create_task(lane.take())
        heir = group.create_task(lane.take())
        await asyncio.sleep(0)
        held.release()
        doomed.cancel()
    assert heir.result() is not None
    assert lane.stats().in_use == 1


async def test_a_storm_of_takers_and_cancels_leaves_the_lane_empty_and_never_overfull() -> None:
    lane = Lane("run", 3)
    chance = random.Random(7)
    inside = 0
    most = 0

    async def use() -> None:
        nonlocal inside, most
        async with await lane.take(chance.randrange(3)):
            inside += 1
            most = max(most, inside)
            try:
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                inside -= 1

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(use()) for _ in range(300)]
        for task in chance.sample(tasks, 100):
            await asyncio.sleep(0)
            task.cancel()
    assert most == 3
    stats = lane.stats()
    assert (stats.in_use, stats.waiting) == (0, 0)


async def test_a_session_that_steps_aside_leaves_its_slot_to_others_and_is_the_next_when_it_comes_back() -> None:
    lane = Lane("eval", 1)
    served: list[str] = []
    line_moves = asyncio.Event()

    async def grade(name: str, *, waits: bool) -> None:
        async with HeldSlot(lane, priority=0 if waits else 1000) as place:
            if waits:
                async with place.off_the_clock():
                    await line_moves.wait()
            served.append(name)
            line_moves.set()
            while name == "first" and lane.stats().waiting < 3:  # noqa: ASYNC110  # no event for this
                await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for name, waits in (("waits", True), ("first", False), ("second", False), ("third", False)):
            group.create_task(grade(name, waits=waits))
    assert served == ["first", "waits", "second", "third"]
    assert lane.stats().in_use == 0


async def test_no_slot_is_kept_by_what_is_cancelled_aside_or_comes_back_too_late() -> None:
    lane = Lane("eval", 2)
    back = asyncio.Event()

    async def away(place: HeldSlot) -> None:
        async with place.off_the_clock():
            await back.wait()

    async def session() -> None:
        async with HeldSlot(lane, 0) as place:
            await away(place)

    cancelled = asyncio.ensure_future(session())
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    async with HeldSlot(lane, 0) as place:
        both = asyncio.gather(away(place), away(place))
        await asyncio.sleep(0)
        assert lane.stats().in_use == 0
        back.set()
        await both
        assert lane.stats().in_use == 1
        back.clear()
        strays = asyncio.gather(away(place), away(place))
        await asyncio.sleep(0)
    back.set()
    await strays
    assert lane.stats().in_use == 0
