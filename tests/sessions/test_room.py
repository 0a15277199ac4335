"""Room is never given out twice, and nobody is passed by who asks for less."""

from __future__ import annotations

import asyncio
import random

import pytest

from outrider.errors import RuntimeUnavailable
from outrider.sessions.resources import Amount, Room, asked, left_of
from outrider.spec import Resources


def a_room(cpus: float = 4.0, memory_mb: int = 1000) -> Room:
    return Room(Amount(cpus=cpus, memory_mb=memory_mb))


def cpus(number: float) -> Amount:
    return Amount(cpus=number)


class Line:
    """Takers that note when they are served and leave when they are told."""

    def __init__(self, room: Room, group: asyncio.TaskGroup) -> None:
        self.room = room
        self.served: list[str] = []
        self._group = group
        self._leave: dict[str, asyncio.Event] = {}

    async def comes(self, name: str, amount: Amount, priority: int = 0) -> asyncio.Task[None]:
        self._leave[name] = asyncio.Event()
        task = self._group.create_task(self._take(name, amount, priority))
        await settled()
        return task

    async def leaves(self, name: str) -> None:
        self._leave[name].set()
        await settled()

    async def _take(self, name: str, amount: Amount, priority: int) -> None:
        async with await self.room.take(amount, priority):
            self.served.append(name)
            await self._leave[name].wait()


async def settled() -> None:
    """Every task has gone as far as it can: none takes more than a few steps."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_large_request_is_not_passed_by_small_ones_that_would_fit() -> None:
    async with asyncio.TaskGroup() as group:
        line = Line(a_room(), group)
        await line.comes("first", cpus(3))
        await line.comes("large", cpus(4))
        await line.comes("small", cpus(1))
        assert line.served == ["first"]
        assert line.room.stats().waiting == 2
        await line.leaves("first")
        assert line.served == ["first", "large"]
        await line.leaves("large")
        assert line.served == ["first", "large", "small"]
        await line.leaves("small")
    assert line.room.stats().cpus_set_aside == 0


async def test_priority_goes_before_age() -> None:
    async with asyncio.TaskGroup() as group:
        line = Line(a_room(), group)
        await line.comes("first", cpus(4))
        await line.comes("low", cpus(2))
        await line.comes("high", cpus(3), priority=5)
        await line.leaves("first")
        assert line.served == ["first", "high"]
        await line.leaves("high")
        await line.leaves("low")


async def test_what_asks_for_nothing_waits_for_nobody() -> None:
    async with asyncio.TaskGroup() as group:
        line = Line(a_room(), group)
        await line.comes("all", cpus(4))
        await line.comes("waits", cpus(1))
        await line.comes("nothing", asked(Resources()))
        assert line.served == ["all", "nothing"]
        for name in ("all", "waits", "nothing"):
            await line.leaves(name)
        assert line.room.stats().served == 2


async def test_who_gives_up_lets_those_behind_go_on() -> None:
    async with asyncio.TaskGroup() as group:
        line = Line(a_room(), group)
        await line.comes("first", cpus(3))
        large = await line.comes("large", cpus(4))
        await line.comes("small", cpus(1))
        large.cancel()
        await settled()
        assert line.served == ["first", "small"]
        await line.leaves("first")
        await line.leaves("small")
    assert left_of(line.room.stats()) == line.room.whole


async def test_who_gives_up_as_it_is_served_gives_it_back() -> None:
    async with asyncio.TaskGroup() as group:
        line = Line(a_room(), group)
        held = await line.room.take(cpus(4))
        doomed = await line.comes("doomed", cpus(4))
        held.release()
        doomed.cancel()
        await settled()
        assert line.served == []
    assert left_of(line.room.stats()) == line.room.whole


async def test_both_must_be_there() -> None:
    async with asyncio.TaskGroup() as group:
        line = Line(a_room(), group)
        await line.comes("memory", Amount(memory_mb=800))
        await line.comes("both", Amount(cpus=1, memory_mb=300))
        assert line.served == ["memory"]
        stats = line.room.stats()
        assert (stats.cpus_set_aside, stats.memory_mb_set_aside, stats.waiting) == (0, 800, 1)
        await line.leaves("memory")
        await line.leaves("both")


@pytest.mark.parametrize("amount", [cpus(4.5), Amount(memory_mb=1001)])
async def test_more_than_the_whole_is_never_waited_for(amount: Amount) -> None:
    with pytest.raises(RuntimeUnavailable, match="the node has 4 and 1000"):
        await a_room().take(amount)


async def test_parts_of_a_processor_add_up_exactly() -> None:
    room = a_room(cpus=0.3)
    slots = [await room.take(cpus(0.1)) for _ in range(3)]
    for slot in slots:
        slot.release()
    assert room.stats().cpus_set_aside == 0


async def test_the_sum_never_exceeds_the_whole() -> None:
    room, chance = a_room(), random.Random(7)

    async def taker() -> None:
        amount = Amount(cpus=chance.choice([0, 0.5, 1, 4]), memory_mb=chance.choice([0, 100, 1000]))
        async with await room.take(amount, chance.randrange(3)):
            stats = room.stats()
            assert 0 <= stats.cpus_set_aside <= stats.cpus
            assert 0 <= stats.memory_mb_set_aside <= stats.memory_mb
            for _ in range(chance.randrange(5)):
                await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(taker()) for _ in range(300)]
        for task in chance.sample(tasks, 60):
            await asyncio.sleep(0)
            task.cancel()
    assert left_of(room.stats()) == room.whole
    assert room.stats().waiting == 0


async def test_what_one_can_do_without_is_taken_only_where_nobody_waits() -> None:
    room = a_room()
    first = room.take_now(cpus(3))
    assert first is not None
    assert room.take_now(cpus(2)) is None
    assert room.take_now(asked(Resources())) is not None
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(room.take(cpus(2)))
        await settled()
        assert room.take_now(cpus(1)) is None
        first.release()
        (await waiting).release()
    whole = room.take_now(cpus(4))
    assert whole is not None
    whole.release()
    assert left_of(room.stats()) == room.whole
