"""Turns in the store: their order, their size, and the turns of frozen models."""

from __future__ import annotations

import base64
import random

import msgspec
import pytest

from outrider.errors import Conflict
from outrider.messages import Message, Role
from outrider.store.database import Database
from outrider.store.postgresql import PostgresqlDatabase
from outrider.store.rows import turn_from
from outrider.store.store import Store
from outrider.trajectory import pack_ids, pack_logprobs

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


async def test_a_session_of_100_turns_and_100_000_tokens_takes_less_than_2_mb(empty: Database) -> None:
    """Each turn is stored without the tokens and messages of the turns before it. The text is random, so compression
    cannot make it small."""
    turns, prompt, sampled = 100, 800, 200
    chance = random.Random(20_26)

    def words(tokens: int) -> str:
        return base64.b85encode(chance.randbytes(tokens * 4 * 4 // 5)).decode()  # 4 characters a token

    def ids(tokens: int) -> list[int]:
        return [chance.randrange(150_000) for _ in range(tokens)]

    async with Store(empty) as store:
        await submit(store, group_row())
        await start(store, "g.0")
        before = await _size(empty)
        for index in range(turns):
            added = msgspec.structs.replace(
                turn(index, text=words(sampled)),
                prompt_length=(prompt + sampled) * index + prompt,
                prompt_delta=pack_ids(ids(prompt)),
                output_ids=pack_ids(ids(sampled)),
                logprobs=pack_logprobs([-chance.random() for _ in range(sampled)]),
                messages=(Message(role=Role.TOOL, content=words(prompt)),),
            )
            await store.add_turn("g.0", 1, added)
        assert added.prompt_length + sampled == 100_000
        assert 100_000 * 4 < await _size(empty) - before < 2_000_000


async def _size(database: Database) -> int:
    """Return the size of the database in bytes."""
    sql = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
    if isinstance(database, PostgresqlDatabase):
        sql = "SELECT pg_database_size(current_database())"
    size: int = (await database.read(lambda tx: tx.fetch(sql)))[0][0]
    return size


def test_a_turn_that_an_earlier_version_stored_is_read() -> None:
    """A stored turn without the fields that were added later: these get their defaults."""
    later = {"tools", "agent_id", "parent_agent_id", "purpose"}
    fields: dict[str, object] = msgspec.to_builtins(turn(0), builtin_types=(bytes,))
    assert later < fields.keys()
    read = turn_from(msgspec.msgpack.encode({name: value for name, value in fields.items() if name not in later}))
    assert read == turn(0)
    assert (read.tools, read.agent_id, read.purpose) == (b"", None, None)


async def test_turns_of_frozen_models_are_kept_apart(store: Store) -> None:
    """The turns of each frozen model are counted from 0. They are not read with the policy's turns."""
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
