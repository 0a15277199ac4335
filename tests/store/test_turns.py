"""What a store promises about turns."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from outrider.errors import Conflict
from outrider.store.migrations import MIGRATIONS
from outrider.store.rows import turn_from
from outrider.store.sqlite import SqliteDatabase, sqlite_store
from outrider.store.store import Store
from outrider.trajectory import SessionResult

from .world import FAILURE, group_row, put_old, result, start, submit, turn


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


async def test_turns_of_frozen_models_are_kept_apart(store: Store) -> None:
    """Each model's count from 0; the policy's are not touched by them, nor read with them."""
    await submit(store, group_row())
    await start(store, "g.0")
    await store.add_turn("g.0", 1, turn(0, text="policy"))
    await store.add_turn("g.0", 1, turn(1, text="second"), model="judge")
    await store.add_turn("g.0", 1, turn(0, text="first"), model="judge")
    await store.add_turn("g.0", 1, turn(0, text="user"), model="user")
    with pytest.raises(Conflict, match="already has a turn 0"):
        await store.add_turn("g.0", 1, turn(0, text="other"), model="judge")
    assert await store.turns("g.0") == [turn(0, text="policy")]
    assert await store.frozen_turns("g.0") == {
        "judge": [turn(0, text="first"), turn(1, text="second")],
        "user": [turn(0, text="user")],
    }
    await store.requeue("g.0", 1, FAILURE)
    with pytest.raises(Conflict):
        await store.add_turn("g.0", 1, turn(2), model="judge")
    await start(store, "g.0")
    assert await store.frozen_turns("g.0") == {}
    assert len((await store.frozen_turns("g.0", 1))["judge"]) == 2


async def test_a_database_from_before_frozen_models_is_opened(tmp_path: Path) -> None:
    """Its results, too, which say nothing of such models."""
    path = tmp_path / "outrider.db"
    database = SqliteDatabase(path)
    async with Store(database, migrations=MIGRATIONS[:4]):
        await put_old(database, [turn(0)])
    async with sqlite_store(path) as store:
        assert await store.turns("g.0") == [turn(0)]
        assert await store.frozen_turns("g.0") == {}
        await store.add_turn("g.0", 1, turn(0), model="judge")
        assert await store.frozen_turns("g.0") == {"judge": [turn(0)]}
    fields: dict[str, object] = msgspec.to_builtins(result("g.0", 1))
    assert fields.pop("frozen") == {}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=SessionResult) == result("g.0", 1)
