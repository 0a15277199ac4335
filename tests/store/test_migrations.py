"""Migrations of a database to the newest schema, and databases that are refused."""

from __future__ import annotations

import pytest

from outrider.errors import ServiceError
from outrider.store.database import Database
from outrider.store.migrations import FIRST, MIGRATIONS
from outrider.store.store import Store

from .conftest import NOW
from .world import group_row, session_ids, submit

NEXT = (*MIGRATIONS, ("ALTER TABLE groups ADD COLUMN colour TEXT", "CREATE TABLE extra (data {blob})"))
CURRENT = list(range(FIRST, FIRST + len(MIGRATIONS)))
BROKEN = (*MIGRATIONS, ("CREATE TABLE extra (data {blob})", "ALTER TABLE nowhere ADD COLUMN colour TEXT"))


async def versions(database: Database) -> list[int]:
    await database.open()
    try:
        found = await database.read(lambda tx: tx.fetch("SELECT version FROM migrations ORDER BY version"))
        return [row[0] for row in found]
    finally:
        await database.close()


async def test_each_step_is_taken_once_and_recorded(kept: Database) -> None:
    for _ in range(2):
        async with Store(kept):
            pass
        assert await versions(kept) == CURRENT


async def test_an_older_database_is_brought_up_to_date_with_its_content(kept: Database) -> None:
    async with Store(kept) as store:
        await submit(store, group_row())
    async with Store(kept, migrations=NEXT) as store:
        assert await store.group("g") == group_row()
    assert await versions(kept) == [*CURRENT, CURRENT[-1] + 1]


async def test_a_session_that_was_held_before_the_upgrade_may_still_expire(kept: Database) -> None:
    """Up to version 20, `expires` of a held session was the time of its end, not the seconds that are left."""
    created = NOW - 100.0
    group = group_row("a", 1, created=created)
    async with Store(kept, clock=lambda: NOW, migrations=MIGRATIONS[: 21 - FIRST]) as store:
        await store.pauses.pause({}, None, tenant=None, who="test")
        await store.create_group(group, b"{}", session_ids(group), expires=created + 30.0)
        await kept.write(lambda tx: tx.execute("UPDATE sessions SET expires = ?", (created + 30.0,)))
    async with Store(kept, clock=lambda: NOW) as store:
        await store.pauses.resume({}, None, tenant=None)
        assert not await store.expire(now=NOW + 29.0)
        assert await store.expire(now=NOW + 30.0)


async def test_a_failing_step_changes_nothing(kept: Database) -> None:
    async with Store(kept) as store:
        await submit(store, group_row())
    with pytest.raises(ServiceError, match="nowhere"):
        async with Store(kept, migrations=BROKEN):
            pass
    assert await versions(kept) == CURRENT
    async with Store(kept, migrations=NEXT) as store:
        assert await store.group("g") == group_row()


async def test_a_newer_database_is_refused_with_advice(kept: Database) -> None:
    async with Store(kept, migrations=NEXT):
        pass
    store = Store(kept)
    with pytest.raises(ServiceError, match=f"version {CURRENT[-1] + 1},") as caught:
        async with store:
            pass
    assert "upgrade" in str(caught.value.hint)
    with pytest.raises(ServiceError, match="not open"):
        await store.groups()


async def test_a_database_from_before_the_first_migration_is_refused(kept: Database) -> None:
    await kept.open()
    await kept.write(lambda tx: tx.execute("CREATE TABLE migrations (version INTEGER, applied DOUBLE PRECISION)"))
    await kept.write(lambda tx: tx.execute("INSERT INTO migrations VALUES (?, 0)", (FIRST - 1,)))
    await kept.close()
    with pytest.raises(ServiceError, match=f"version {FIRST - 1}, from before the first release"):
        async with Store(kept):
            pass
