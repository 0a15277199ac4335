"""The SQLite database: a failing write does not affect others, readers do not wait for the writer, and the error for an
unusable file names the cause."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from outrider.errors import Conflict, ServiceError
from outrider.store.database import Body, Connection
from outrider.store.sqlite import MAX_BATCH, SqliteDatabase, sqlite_store

from .world import group_row, result, start, submit, turn


def insert(value: int) -> Body[int]:
    async def body(tx: Connection) -> int:
        return await tx.execute("INSERT INTO numbers VALUES (?)", (value,))

    return body


def insert_and_fail(value: int) -> Body[int]:
    async def body(tx: Connection) -> int:
        await insert(value)(tx)
        raise Conflict(f"no {value}")

    return body


async def numbers(tx: Connection) -> list[int]:
    return [row[0] for row in await tx.fetch("SELECT number FROM numbers ORDER BY number")]


class Held:
    """A write that blocks the writer's thread from `entered` until `release` is called."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._entered = asyncio.Event()
        self._release = threading.Event()

    async def body(self, tx: Connection) -> None:
        self._loop.call_soon_threadsafe(self._entered.set)
        self._release.wait()

    async def entered(self) -> None:
        await self._entered.wait()

    def release(self) -> None:
        self._release.set()


@pytest_asyncio.fixture(params=["memory", "file"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SqliteDatabase]:
    opened = SqliteDatabase(None if request.param == "memory" else tmp_path / "numbers.db")
    await opened.open()
    await opened.write(lambda tx: tx.execute("CREATE TABLE numbers (number INTEGER UNIQUE)"))
    yield opened
    await opened.close()


async def test_a_failing_write_does_not_hurt_its_neighbours(database: SqliteDatabase) -> None:
    held = Held()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(database.write(held.body))
        await held.entered()
        bodies = [insert_and_fail(n) if n % 7 == 3 else insert(n) for n in range(MAX_BATCH + 50)]
        waiting = tasks.create_task(_outcomes(database, bodies))
        await asyncio.sleep(0)  # the writes are in the queue now, behind the held one
        held.release()
    outcomes = waiting.result()
    refused = [n for n, outcome in enumerate(outcomes) if isinstance(outcome, Conflict)]
    assert refused == list(range(3, MAX_BATCH + 50, 7))
    assert await database.read(numbers) == [n for n in range(MAX_BATCH + 50) if n not in refused]


async def _outcomes(database: SqliteDatabase, bodies: list[Body[int]]) -> list[int | BaseException]:
    return await asyncio.gather(*(database.write(body) for body in bodies), return_exceptions=True)


async def test_a_failure_of_the_database_is_a_service_error(database: SqliteDatabase) -> None:
    await database.write(insert(1))
    with pytest.raises(ServiceError, match="the database failed"):
        await database.write(lambda tx: tx.execute("NONSENSE"))
    assert await database.read(numbers) == [1]


async def test_what_the_database_refuses_for_good_is_not_worth_another_try(database: SqliteDatabase) -> None:
    await database.write(insert(1))
    with pytest.raises(sqlite3.IntegrityError):
        await database.write(insert(1))
    assert await database.read(numbers) == [1]


async def test_a_transaction_that_waits_for_something_else_is_refused(database: SqliteDatabase) -> None:
    async def body(tx: Connection) -> None:
        await insert(1)(tx)
        await asyncio.sleep(0)

    with pytest.raises(TypeError, match="awaited something else"):
        await database.write(body)
    assert await database.read(numbers) == []


async def test_a_write_is_seen_by_every_later_read(database: SqliteDatabase) -> None:
    for n in range(50):
        await database.write(insert(n))
        assert len(await database.read(numbers)) == n + 1


async def test_a_cancelled_caller_leaves_the_others_served(database: SqliteDatabase) -> None:
    held = Held()
    async with asyncio.TaskGroup() as tasks:
        holder = tasks.create_task(database.write(held.body))
        await held.entered()
        holder.cancel()
        held.release()
        await database.write(insert(1))
    assert await database.read(numbers) == [1]
    assert holder.cancelled()


async def test_closing_commits_what_was_asked_for_before(tmp_path: Path) -> None:
    database = SqliteDatabase(tmp_path / "numbers.db")
    await database.open()
    await database.write(lambda tx: tx.execute("CREATE TABLE numbers (number INTEGER)"))
    held = Held()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(database.write(held.body))
        await held.entered()
        tasks.create_task(database.write(insert(1)))
        await asyncio.sleep(0)
        closing = tasks.create_task(database.close())
        await asyncio.sleep(0)
        held.release()
    assert closing.done()
    await database.close()
    for call in (database.write(insert(2)), database.read(numbers)):
        with pytest.raises(ServiceError, match="not open"):
            await call
    await database.open()
    assert await database.read(numbers) == [1]
    await database.close()


async def test_readers_do_not_wait_for_the_writer(tmp_path: Path) -> None:
    async with sqlite_store(tmp_path / "outrider.db") as store, asyncio.TaskGroup() as tasks:
        await submit(store, group_row())
        other = sqlite3.connect(tmp_path / "outrider.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        waiting = tasks.create_task(start(store, "g.0"))
        assert len(await store.queued(10)) == 2
        assert not waiting.done()
        other.execute("ROLLBACK")
        other.close()
        assert await waiting == 1


async def test_everything_is_there_after_reopening(tmp_path: Path) -> None:
    async with sqlite_store(tmp_path / "outrider.db") as store:
        await submit(store, group_row(key="k"))
        await start(store, "g.0")
        await store.add_turn("g.0", 1, turn())
        await store.finish("g.0", 1, result("g.0", 1))
        sessions, events = await store.sessions("g"), await store.events(after=0, limit=100)
    async with sqlite_store(tmp_path / "outrider.db") as store:
        assert await store.sessions("g") == sessions
        assert await store.events(after=0, limit=100) == events
        assert await store.turns("g.0") == [turn()]
        await start(store, "g.1")
        assert (await store.events(after=events[-1].cursor, limit=100))[0].cursor > events[-1].cursor
    assert sorted(os.listdir(tmp_path)) == ["outrider.db", "task.key"]


async def test_a_file_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("not a database " * 1000)
    for path, hint in (
        (tmp_path / "text.db", "not an Outrider database"),
        (tmp_path / "missing" / "x.db", "must exist"),
        (tmp_path, "must exist"),
    ):
        with pytest.raises(ServiceError) as caught:
            async with sqlite_store(path):
                pass
        assert hint in str(caught.value.hint)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("outrider-store")]


async def test_many_tasks_share_one_store(tmp_path: Path) -> None:
    groups, size, turns = 20, 8, 3
    async with sqlite_store(tmp_path / "outrider.db") as store:

        async def play(session_id: str) -> bool:
            attempt = await start(store, session_id)
            for index in range(turns):
                await store.add_turn(session_id, attempt, turn(index))
            return await store.finish(session_id, attempt, result(session_id, attempt))

        rows = [group_row(f"g{n}", size) for n in range(groups)]
        await asyncio.gather(*(submit(store, row) for row in rows))
        waiting = await store.queued(1000)
        ends = await asyncio.gather(*(play(row.id) for row in waiting))
        assert ends.count(True) == groups
        done = await store.results(after=0, limit=1000)
        assert [group.cursor for group in done] == list(range(1, groups + 1))
        assert len({group.id for group in done}) == groups
        counted = await asyncio.gather(*(store.turns(row.id) for row in waiting))
        assert {len(found) for found in counted} == {turns}
