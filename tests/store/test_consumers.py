"""Named consumers of results in the store, and their positions."""

from __future__ import annotations

import asyncio

import pytest

from outrider.errors import Conflict, NotFound
from outrider.store.consumers import MAX_CONSUMERS
from outrider.store.store import Store

from .conftest import NOW
from .world import group_row, result, submit


async def finished(store: Store, *names: str) -> None:
    for name in names:
        await submit(store, group_row(name, n=1))
        await store.finish(f"{name}.0", 0, result(f"{name}.0", 0))


async def position(store: Store, name: str) -> tuple[int, int]:
    return next((each.cursor, each.lag) for each in await store.consumers.listed() if each.name == name)


async def test_each_consumer_has_a_position_of_its_own(store: Store) -> None:
    await finished(store, *"abc")
    assert await store.consumers.enter("trainer") == (0, True)
    assert await store.consumers.enter("logger", at=2) == (2, True)
    assert [(each.tenant, each.created, each.seen) for each in await store.consumers.listed()] == [(None, NOW, NOW)] * 2
    await store.consumers.acknowledge("trainer", 1)
    assert [(each.name, each.cursor, each.lag) for each in await store.consumers.listed()] == [
        ("logger", 2, 1),
        ("trainer", 1, 2),
    ]
    assert await store.consumers.enter("trainer", at=3) == (1, False)  # `at` has no effect on a known consumer


async def test_a_position_moves_back_only_when_asked_to(store: Store) -> None:
    await finished(store, *"abc")
    await store.consumers.enter("trainer")
    assert (await store.consumers.acknowledge("trainer", 3)).cursor == 3
    assert (await store.consumers.acknowledge("trainer", 1)).cursor == 3
    assert (await store.consumers.acknowledge("trainer", 1, rewind=True)).cursor == 1
    assert (await store.consumers.acknowledge("trainer", 2, rewind=True)).cursor == 2


async def test_of_acknowledgements_that_race_the_furthest_counts(store: Store) -> None:
    await finished(store, *"abcdefgh")
    await store.consumers.enter("trainer")
    await asyncio.gather(*(store.consumers.acknowledge("trainer", cursor) for cursor in (3, 8, 1, 5, 2)))
    assert await position(store, "trainer") == (8, 0)


async def test_nobody_is_beyond_the_newest_result(store: Store) -> None:
    await finished(store, "a")
    await store.consumers.enter("trainer")
    for cursor in (2, (1 << 63) - 1):
        with pytest.raises(Conflict, match="the newest is 1"):
            await store.consumers.acknowledge("trainer", cursor)
        with pytest.raises(Conflict, match="the newest is 1"):
            await store.consumers.enter("new", at=cursor)
    assert [each.name for each in await store.consumers.listed()] == ["trainer"]
    assert await position(store, "trainer") == (0, 1)


async def test_a_consumer_that_is_not_there_is_not_found(store: Store) -> None:
    for ask in (store.consumers.acknowledge("nobody", 0), store.consumers.remove("nobody")):
        with pytest.raises(NotFound, match="no consumer 'nobody'"):
            await ask
    assert await store.consumers.listed() == []


async def test_a_removed_consumer_is_forgotten_with_its_position(store: Store) -> None:
    await finished(store, "a")
    await store.consumers.enter("trainer", at=1)
    await store.consumers.remove("trainer")
    assert (await store.consumers.enter("trainer")).position == 0


async def test_there_is_a_bound_on_consumers(store: Store) -> None:
    await asyncio.gather(*(store.consumers.enter(f"c{number}") for number in range(MAX_CONSUMERS)))
    with pytest.raises(Conflict, match="consumers already"):
        await store.consumers.enter("one more")
    assert (await store.consumers.enter("c0")).position == 0
    assert (await store.consumers.enter("one more", tenant="another")).position == 0
