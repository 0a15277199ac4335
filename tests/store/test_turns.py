"""What a store promises about turns."""

from __future__ import annotations

import msgspec
import pytest

from outrider.errors import Conflict
from outrider.store.rows import turn_from
from outrider.store.store import Store

from .world import FAILURE, group_row, start, submit, turn


async def test_turns_come_back_by_index_and_attempt(store: Store) -> None:
    await submit(store, group_row())
    assert await store.turns("g.0") == []
    await start(store, "g.0")
    await store.add_turn("g.0", 1, turn(1, text="second"))
    await store.add_turn("g.0", 1, turn(0, text="first"))
    assert await store.turns("g.0") == [turn(0, text="first"), turn(1, text="second")]
    await store.requeue("g.0", 1, FAILURE)
    assert len(await store.turns("g.0")) == 2
    await start(store, "g.0")
    await store.add_turn("g.0", 2, turn(0, text="again"))
    assert await store.turns("g.0") == [turn(0, text="again")]
    assert await store.turns("g.0", 1) == [turn(0, text="first"), turn(1, text="second")]
    assert await store.turns("g.0", 3) == []


async def test_a_turn_index_is_stored_once(store: Store) -> None:
    await submit(store, group_row())
    await start(store, "g.0")
    await store.add_turn("g.0", 1, turn(0, text="first"))
    with pytest.raises(Conflict, match="already has a turn 0"):
        await store.add_turn("g.0", 1, turn(0, text="other"))
    assert await store.turns("g.0") == [turn(0, text="first")]


def test_a_turn_that_an_earlier_version_stored_is_read() -> None:
    """Fields that came later have defaults: what had no lineage has none."""
    later = {"tools", "agent_id", "parent_agent_id", "purpose"}
    fields: dict[str, object] = msgspec.to_builtins(turn(0), builtin_types=(bytes,))
    assert later < fields.keys()
    read = turn_from(msgspec.msgpack.encode({name: value for name, value in fields.items() if name not in later}))
    assert read == turn(0)
    assert (read.tools, read.agent_id, read.purpose) == (b"", None, None)
