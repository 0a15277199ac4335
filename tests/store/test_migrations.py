"""How a database comes to the newest schema, and when it is refused."""

from __future__ import annotations

import pytest

from outrider.errors import ServiceError
from outrider.lifecycle import StopReason
from outrider.store.database import Database
from outrider.store.migrations import MIGRATIONS
from outrider.store.store import Store

from .world import group_row, put_old, submit

NEXT = (*MIGRATIONS, ("ALTER TABLE groups ADD COLUMN colour TEXT", "CREATE TABLE extra (data {blob})"))
CURRENT = list(range(1, len(MIGRATIONS) + 1))
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
    assert await versions(kept) == [*CURRENT, len(CURRENT) + 1]


async def test_sessions_of_groups_that_were_being_cancelled_are_to_end(kept: Database) -> None:
    async with Store(kept, migrations=MIGRATIONS[:5]):
        await put_old(kept, [])
        await kept.write(lambda tx: tx.execute("UPDATE groups SET cancelled = 1"))
    async with Store(kept) as store:
        assert [(row.id, row.ending) for row in await store.to_end()] == [("g.0", StopReason.CANCELLED)]


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
    with pytest.raises(ServiceError, match=f"version {len(CURRENT) + 1},") as caught:
        async with store:
            pass
    assert "upgrade" in str(caught.value.hint)
    with pytest.raises(ServiceError, match="not open"):
        await store.groups()
