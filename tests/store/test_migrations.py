"""How a database comes to the newest schema, and when it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.errors import ServiceError
from outrider.lifecycle import StopReason
from outrider.store.migrations import MIGRATIONS
from outrider.store.sqlite import SqliteDatabase, sqlite_store
from outrider.store.store import Store

from .world import group_row, put_old, submit

NEXT = (*MIGRATIONS, ("ALTER TABLE groups ADD COLUMN colour TEXT", "CREATE TABLE extra (data {blob})"))
CURRENT = list(range(1, len(MIGRATIONS) + 1))
BROKEN = (*MIGRATIONS, ("CREATE TABLE extra (data {blob})", "ALTER TABLE nowhere ADD COLUMN colour TEXT"))


async def versions(path: Path) -> list[int]:
    database = SqliteDatabase(path)
    await database.open()
    try:
        found = await database.read(lambda tx: tx.fetch("SELECT version FROM migrations ORDER BY version"))
        return [row[0] for row in found]
    finally:
        await database.close()


async def test_each_step_is_taken_once_and_recorded(tmp_path: Path) -> None:
    path = tmp_path / "outrider.db"
    for _ in range(2):
        async with sqlite_store(path):
            pass
        assert await versions(path) == CURRENT


async def test_an_older_database_is_brought_up_to_date_with_its_content(tmp_path: Path) -> None:
    path = tmp_path / "outrider.db"
    async with sqlite_store(path) as store:
        await submit(store, group_row())
    async with Store(SqliteDatabase(path), migrations=NEXT) as store:
        assert await store.group("g") == group_row()
    assert await versions(path) == [*CURRENT, len(CURRENT) + 1]


async def test_sessions_of_groups_that_were_being_cancelled_are_to_end(tmp_path: Path) -> None:
    path = tmp_path / "outrider.db"
    database = SqliteDatabase(path)
    async with Store(database, migrations=MIGRATIONS[:5]):
        await put_old(database, [])
        await database.write(lambda tx: tx.execute("UPDATE groups SET cancelled = 1"))
    async with sqlite_store(path) as store:
        assert [(row.id, row.ending) for row in await store.to_end()] == [("g.0", StopReason.CANCELLED)]


async def test_a_failing_step_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "outrider.db"
    async with sqlite_store(path) as store:
        await submit(store, group_row())
    with pytest.raises(ServiceError, match="nowhere"):
        async with Store(SqliteDatabase(path), migrations=BROKEN):
            pass
    assert await versions(path) == CURRENT
    async with Store(SqliteDatabase(path), migrations=NEXT) as store:
        assert await store.group("g") == group_row()


async def test_a_newer_database_is_refused_with_advice(tmp_path: Path) -> None:
    path = tmp_path / "outrider.db"
    async with Store(SqliteDatabase(path), migrations=NEXT):
        pass
    store = sqlite_store(path)
    with pytest.raises(ServiceError, match=f"version {len(CURRENT) + 1},") as caught:
        async with store:
            pass
    assert "upgrade" in str(caught.value.hint)
    with pytest.raises(ServiceError, match="not open"):
        await store.groups()
