"""The index of runs agrees with the store after every change, removal, restart and loss of the index file."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outrider.errors import InvalidField, ServiceError
from outrider.lifecycle import StopReason
from outrider.store.run_index.index import RunIndex
from outrider.store.run_index.lists import SessionFilter, find_sessions
from outrider.store.run_index.queries import Queries
from outrider.store.run_reader import RunReader
from outrider.store.sqlite import SqliteDatabase, sqlite_store
from outrider.store.store import Store
from support.waiting import until

from .world import FAILURE, group_row, result, start, submit, turn


class Asked:
    """`await asked(sql)` returns the rows of a query."""

    def __init__(self, index: RunIndex) -> None:
        self.index = index

    async def __call__(self, sql: str, tenant: str | None = None) -> Any:
        return msgspec.json.decode(await Queries(self.index).run(sql, tenant))["rows"]


@asynccontextmanager
async def an_index(store: Store, folder: Path) -> AsyncIterator[Asked]:
    async with RunIndex(store, folder / "runs.sqlite3") as index:
        yield Asked(index)


async def a_done_group(store: Store, id: str = "g", *, tenant: str = "operator", reward: float = 1.0) -> None:
    row = msgspec.structs.replace(group_row(id), tenant=tenant, labels={"run": "r", "odd": "a'\"b"}, harness="tools")
    await submit(store, row, b'{"task": {"instruction": "do it"}}')
    for index in range(2):
        session = f"{id}.{index}"
        await start(store, session)
        if index:
            await store.requeue(session, 1, FAILURE)
            await start(store, session)
        attempt = 1 + index
        await store.add_turn(session, attempt, turn(0))
        await store.add_turn(session, attempt, turn(0), model="judge")
        error = FAILURE if index else None
        made = result(session, attempt, reward=None if error else reward)
        made = msgspec.structs.replace(made, turns=1, error=error, answer=None if error else "Forty-Two")
        if error:
            made = msgspec.structs.replace(made, stop_reason=StopReason.ERROR)
        await store.finish(session, attempt, made)


async def test_a_query_sees_each_change_at_once(store: Store, tmp_path: Path) -> None:
    async with an_index(store, tmp_path) as ask:
        assert await ask("SELECT * FROM sessions") == []
        await submit(store, group_row("g", 1))
        assert await ask("SELECT id, state, reward, finished FROM sessions") == [["g.0", "queued", None, None]]
        attempt = await start(store, "g.0")
        assert await ask("SELECT state, attempt FROM sessions") == [["initializing", 1]]
        await store.finish("g.0", attempt, result("g.0", attempt, reward=0.5))
        assert await ask("SELECT state, stop_reason, reward FROM sessions") == [["done", "completed", 0.5]]
        assert await ask("SELECT state, done, rewarded, mean_reward FROM groups") == [["done", 1, 1, 0.5]]


async def test_the_data_folder_may_have_a_relative_path(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of the default data folder, `.outrider`, is relative, too."""
    monkeypatch.chdir(tmp_path)
    async with an_index(store, Path(".")) as ask:
        assert await ask("SELECT count(*) FROM sessions") == [[0]]


async def test_views_have_turns_errors_rewards_and_tokens(store: Store, tmp_path: Path) -> None:
    async with an_index(store, tmp_path) as ask:
        await a_done_group(store)
        turns = "SELECT session_id, turn_index, model, kind, prompt_tokens, output_tokens, min_version FROM turns"
        assert await ask(f"{turns} ORDER BY session_id, model") == [
            [f"g.{index}", 0, model, kind, 3, 2, 7]
            for index in (0, 1)
            for model, kind in (("", "main"), ("judge", "frozen"))
        ]
        assert await ask("SELECT session_id, attempt, final, code FROM errors ORDER BY attempt") == [
            ["g.1", 1, 0, "runtime_failure"],
            ["g.1", 2, 1, "runtime_failure"],
        ]
        assert await ask("SELECT session_id, name, value FROM rewards ORDER BY name") == [
            ["g.0", "metrics.steps", 2.0],
            ["g.0", "reward", 1.0],
        ]
        assert await ask("SELECT count(*), sum(tokens) FROM tokens") == [[6, 0]]
        kinds = await ask("SELECT training FROM tokens WHERE session_id = 'g.0' ORDER BY 1")
        assert kinds == [["dropped"], ["masked"], ["trained"]]
        assert await ask("SELECT min_version, max_version FROM sessions") == [[7, 7]] * 2
        assert await ask("SELECT labels->>'run', labels->>'odd' FROM groups") == [["r", "a'\"b"]]
        assert await ask("SELECT length(task) FROM groups") == [[16]]


async def test_removed_groups_vanish(store: Store, tmp_path: Path) -> None:
    async with an_index(store, tmp_path) as ask:
        await a_done_group(store, "a")
        await a_done_group(store, "b")
        assert await ask("SELECT count(*) FROM sessions") == [[4]]
        ask.index.forget(await store.removals.hide(["a"], force=True))
        assert await ask("SELECT DISTINCT group_id FROM sessions") == [["b"]]
        assert await ask("SELECT count(*) FROM turns") == [[4]]
        while await store.removals.erase(100):
            pass
        # The open index is not notified of this removal. The next index detects it by comparing groups with the store.
        await store.removals.hide(["b"], force=True)
    async with an_index(store, tmp_path) as ask:
        for view in ("groups", "sessions", "turns", "errors", "rewards", "tokens"):
            assert await ask(f"SELECT count(*) FROM {view}") == [[0]]


@pytest.mark.parametrize("loss", ["deleted", "damaged", "other version", "none"])
async def test_a_lost_file_is_made_again(store: Store, tmp_path: Path, loss: str) -> None:
    rows = "SELECT * FROM sessions JOIN errors ON session_id = id ORDER BY id, errors.attempt"
    async with an_index(store, tmp_path) as ask:
        await a_done_group(store)
        before = await ask(rows), await ask("SELECT * FROM turns ORDER BY 1, 3, 6")
    path = tmp_path / "runs.sqlite3"
    match loss:
        case "deleted":
            path.unlink()
        case "damaged":
            path.write_bytes(b"no database" * 1000)
        case "other version":
            with closing(sqlite3.connect(path)) as db, db:
                db.execute("PRAGMA user_version=1")
    await submit(store, group_row("later", 1))
    async with an_index(store, tmp_path) as ask:
        assert (await ask(rows), await ask("SELECT * FROM turns ORDER BY 1, 3, 6")) == before
        assert await ask("SELECT count(*) FROM groups") == [[2]]


async def test_the_file_of_another_store_is_not_used(tmp_path: Path) -> None:
    for name, group in (("one", "g"), ("two", "h")):
        async with sqlite_store(tmp_path / name) as store:
            await a_done_group(store, group)
            if name == "two":
                await a_done_group(store, "i")
            async with an_index(store, tmp_path) as ask:
                assert await ask("SELECT id FROM groups ORDER BY id") == ([["g"]] if name == "one" else [["h"], ["i"]])


async def test_a_file_that_is_removed_while_it_is_open_is_made_again(store: Store, tmp_path: Path) -> None:
    async with an_index(store, tmp_path) as ask:
        await a_done_group(store, "a")
        assert await ask("SELECT count(*) FROM sessions") == [[2]]
        (tmp_path / "runs.sqlite3").unlink()
        assert await ask("SELECT count(*) FROM sessions") == [[2]]
        (tmp_path / "runs.sqlite3").unlink()
        await a_done_group(store, "b")
        assert await ask("SELECT count(*) FROM sessions") == [[4]]
        assert await ask("SELECT count(*) FROM turns") == [[8]]
        find = partial(find_sessions, wanted=SessionFilter(), tenant=None, after=None, limit=9)
        assert await ask.index.read(find) == ["b.0", "b.1", "a.0", "a.1"]


async def test_a_failure_of_the_store_is_made_up_for(tmp_path: Path) -> None:
    """A read of the store that fails while the file is opened must not skip the check of the file."""
    async with sqlite_store(tmp_path / "store") as store:
        await a_done_group(store)
        async with an_index(store, tmp_path) as ask:
            await ask("SELECT 1")
        await store.removals.hide(["g"], force=True)
        async with an_index(store, tmp_path) as ask:
            reader, broken = store.runs, RunReader(SqliteDatabase(None))  # never opened
            store.runs = broken
            with pytest.raises(ServiceError, match="not open"):
                await ask("SELECT 1")
            store.runs = reader
            assert await ask("SELECT count(*) FROM sessions") == [[0]]


@pytest.mark.deep
async def test_a_tenant_sees_its_own_rows(store: Store, tmp_path: Path) -> None:
    async with an_index(store, tmp_path) as ask:
        await a_done_group(store, "a", tenant="alice")
        await a_done_group(store, "b", tenant="bob")
        for view in ("groups", "sessions", "turns", "errors", "rewards", "tokens"):
            rows = [await ask(f"SELECT count(*) FROM {view}", tenant) for tenant in ("alice", "bob", None, "nobody")]
            assert rows[0] == rows[1] != [[0]]
            assert rows[2] == [[2 * rows[0][0][0]]]
            assert rows[3] == [[0]]
        assert await ask("SELECT id FROM sessions ORDER BY id", "alice") == [["a.0"], ["a.1"]]


async def test_a_wrong_query_is_refused_by_its_field(store: Store, tmp_path: Path) -> None:
    async with an_index(store, tmp_path) as ask:
        with pytest.raises(InvalidField, match="no such column: missing") as refused:
            await ask("SELECT missing FROM sessions")
        assert (refused.value.field, refused.value.http_status) == ("sql", 422)


async def test_the_reads_of_one_tenant_do_not_queue_up_before_those_of_another(tmp_path: Path) -> None:
    """Also not if the tenant breaks its requests off, and so begins many reads that nobody waits for."""
    began: list[str] = []
    go_on = threading.Event()

    def slow(_: sqlite3.Connection) -> None:
        began.append("alice")
        go_on.wait(10)

    def quick(_: sqlite3.Connection) -> None:
        began.append("bob")

    async with sqlite_store(None) as store, an_index(store, tmp_path) as asked, asyncio.timeout(60):
        await asked.index.catch_up()
        reads = [asyncio.create_task(asked.index.read(slow, tenant="alice")) for _ in range(6)]
        await until(lambda: began)
        for read in reads[:3]:
            read.cancel()
        await asyncio.sleep(0)
        reads.append(asyncio.create_task(asked.index.read(quick, tenant="bob")))
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(*reads, return_exceptions=True)
    assert began == ["alice", "bob", "alice", "alice", "alice"]
