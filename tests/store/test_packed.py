"""Packed results and turns, for readers that decode many of them outside the store."""

from __future__ import annotations

from outrider.store.rows import result_from, turn_from
from outrider.store.store import Store

from .world import group_row, result, session_ids, start, submit, turn


async def test_the_results_of_done_sessions_are_read_in_parts(store: Store) -> None:
    for name in ("a", "b", "c"):
        group = group_row(name, n=4)
        await submit(store, group)
        for id in session_ids(group)[: 3 if name == "b" else 4]:
            await start(store, id)
            await store.finish(id, 1, result(id, 1))

    async def read(ids: list[str], first: int, count: int) -> list[tuple[str, str]]:
        found = await store.packed_results(ids, first, count)
        return [(each.group_id, result_from(each.packed).session_id) for each in found]

    assert await read(["b", "a"], 0, 10) == [
        *(("a", f"a.{index}") for index in range(4)),
        *(("b", f"b.{index}") for index in range(3)),
    ]
    assert await read(["c"], 1, 2) == [("c", "c.1"), ("c", "c.2")]
    assert await read(["b"], 3, 2) == []
    assert await read(["unknown"], 0, 10) == []
    assert await read([], 0, 10) == []
    [packed] = await store.packed_results(["a"], 2, 1)
    assert result_from(packed.packed) == result("a.2", 1)


async def test_the_first_turns_of_an_attempt_are_read(store: Store) -> None:
    await submit(store, group_row())
    await start(store, "g.0")
    for index in (2, 0, 1):
        await store.add_turn("g.0", 1, turn(index))
    assert [turn_from(packed) for packed in await store.packed_turns("g.0", 1, limit=2)] == [turn(0), turn(1)]
    assert len(await store.packed_turns("g.0", 1, limit=9)) == 3
    assert await store.packed_turns("g.0", 2, limit=9) == []
    assert await store.packed_turns("unknown", 1, limit=9) == []
