"""When a group is refused because the queue is full, and after how many seconds its client shall submit again."""

from __future__ import annotations

import msgspec
import pytest

from outrider.errors import QueueFull
from outrider.service.back_pressure import COUNT_SECONDS, LONGEST, BackPressure
from outrider.store.rows import GroupRow
from outrider.store.sqlite import sqlite_store
from outrider.store.store import Store
from store.world import group_row, session_ids, start

MINE, YOURS = {"run": "mine"}, {"run": "yours"}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def group(id: str, n: int, labels: dict[str, str] = MINE, key: str | None = None) -> GroupRow:
    return msgspec.structs.replace(group_row(id, n, key=key), labels=labels)


async def submit(pressure: BackPressure, store: Store, row: GroupRow) -> None:
    await pressure.check(row)
    await store.create_group(row, b"{}", session_ids(row))


async def test_groups_of_any_size_are_accepted_until_the_bound_is_reached() -> None:
    async with sqlite_store(None) as store:
        pressure = BackPressure(store, 10, clock=Clock())
        await submit(pressure, store, group("a", 9))
        await submit(pressure, store, group("b", 40))
        with pytest.raises(QueueFull, match="49 sessions wait") as refused:
            await submit(pressure, store, group("c", 1))
        assert (refused.value.http_status, refused.value.retry_after) == (429, LONGEST)


async def test_a_full_queue_takes_more_once_sessions_have_started() -> None:
    clock = Clock()
    async with sqlite_store(None) as store:
        pressure = BackPressure(store, 4, clock=clock)
        await submit(pressure, store, group("a", 4))
        with pytest.raises(QueueFull):
            await submit(pressure, store, group("b", 1))
        await start(store, "a.0")
        clock.now += COUNT_SECONDS
        await submit(pressure, store, group("b", 1))


async def test_sessions_that_have_started_since_do_not_count() -> None:
    async with sqlite_store(None) as store:
        pressure = BackPressure(store, 2, clock=Clock())
        for number in range(10):
            await submit(pressure, store, group(f"g{number}", 1))
            await start(store, f"g{number}.0")


async def test_a_group_that_was_accepted_is_never_refused() -> None:
    async with sqlite_store(None) as store:
        pressure = BackPressure(store, 1, clock=Clock())
        await submit(pressure, store, group("a", 5, key="k"))
        await pressure.check(group("again", 5, key="k"))
        with pytest.raises(QueueFull):
            await pressure.check(group("other", 5, key="another"))


async def test_a_run_that_fills_the_queue_does_not_keep_the_others_out() -> None:
    clock = Clock()
    async with sqlite_store(None) as store:
        pressure = BackPressure(store, 10, clock=clock)
        await submit(pressure, store, group("a", 10))
        clock.now += COUNT_SECONDS
        with pytest.raises(QueueFull):
            await submit(pressure, store, group("b", 1))
        await submit(pressure, store, group("c", 3, YOURS))
        await submit(pressure, store, group("d", 6, YOURS))
        with pytest.raises(QueueFull):
            await submit(pressure, store, group("e", 1, YOURS))
        clock.now += COUNT_SECONDS
        await submit(pressure, store, group("f", 2, {}))
        for number in range(20):
            with pytest.raises(QueueFull):
                await submit(pressure, store, group(f"h{number}", 1, {"run": f"invented {number}"}))


async def test_nor_does_a_tenant_with_a_run_for_each_group_keep_the_other_tenants_out() -> None:
    clock = Clock()
    async with sqlite_store(None) as store:
        pressure = BackPressure(store, 10, clock=clock)

        async def add(tenant: str, id: str, n: int) -> None:
            clock.now += COUNT_SECONDS
            row = msgspec.structs.replace(group(id, n, {"run": f"invented for {id}"}), tenant=tenant)
            await submit(pressure, store, row)

        await add("many", "m1", 10)
        await add("many", "m2", 10)
        with pytest.raises(QueueFull):
            await add("many", "m3", 1)
        await add("other", "o1", 2)
        await add("other", "o2", 6)
        with pytest.raises(QueueFull):  # it already has its share
            await add("other", "o3", 1)
        await add("third", "t1", 2)
        with pytest.raises(QueueFull, match="30 sessions wait"):
            await add("fourth", "f1", 1)


@pytest.mark.parametrize(("per_second", "seconds"), [(10.0, 1), (0.5, 12), (0.05, 60)])
async def test_the_wait_follows_from_the_rate_of_completion(per_second: float, seconds: float) -> None:
    clock = Clock()
    async with sqlite_store(None) as store:
        pressure = BackPressure(store, 5, clock=clock)
        await submit(pressure, store, group("a", 10))
        for _ in range(int(per_second * 40)):
            clock.now += 1 / per_second
            pressure.note_done()
        with pytest.raises(QueueFull) as refused:
            await pressure.check(group("b", 1))
        assert refused.value.retry_after == seconds


async def test_completions_of_long_ago_do_not_count() -> None:
    clock = Clock()
    async with sqlite_store(None) as store:
        pressure = BackPressure(store, 5, clock=clock)
        await submit(pressure, store, group("a", 10))
        for _ in range(100):
            pressure.note_done()
        clock.now += 61
        with pytest.raises(QueueFull) as refused:
            await pressure.check(group("b", 1))
        assert refused.value.retry_after == LONGEST
