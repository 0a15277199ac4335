"""Named consumers of the results: each has a position of its own, up to which it has processed the groups.

It knows no group. Invariants: a position is never beyond the newest cursor that was given to a group; it moves back
only when that is asked for.
"""

from __future__ import annotations

from collections.abc import Callable

from outrider.errors import Conflict, NotFound
from outrider.store.database import Connection, Database
from outrider.store.rows import Consumer

MAX_CONSUMERS = 1000
"""Each of them is looked at whenever groups are removed."""


class Consumers:
    """The consumers in a store, which opens and closes the database. Every method raises ServiceError when it fails."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._db = database
        self._clock = clock

    async def enter(self, name: str, *, at: int = 0) -> Consumer:
        """The consumer, which has just been heard of. An unknown one is made, at position `at`.

        Raises Conflict for a position that no group has reached, and if there are too many consumers.
        """

        async def body(tx: Connection) -> Consumer:
            now = self._clock()
            if not await tx.execute("UPDATE consumers SET seen = ? WHERE name = ?", (now, name)):
                if (await tx.fetch("SELECT COUNT(*) FROM consumers"))[0][0] >= MAX_CONSUMERS:
                    raise Conflict(
                        f"there are {MAX_CONSUMERS} consumers already",
                        hint="delete those that are not needed any more: outrider consumers list",
                        field="consumer",
                    )
                await _check_reached(tx, at, field="after")
                sql = "INSERT INTO consumers (name, cursor, created, seen) VALUES (?, ?, ?, ?)"
                await tx.execute(sql, (name, at, now, now))
            return await _find(tx, name)

        return await self._db.write(body)

    async def acknowledge(self, name: str, cursor: int, *, rewind: bool = False) -> Consumer:
        """Move a consumer forward to `cursor`; back, too, with `rewind`.

        Raises NotFound for an unknown consumer, and Conflict for a position that no group has reached.
        """
        further = "" if rewind else " AND cursor < ?"

        async def body(tx: Connection) -> Consumer:
            await _check_reached(tx, cursor, field="cursor")
            now = self._clock()
            await tx.execute("UPDATE consumers SET seen = ? WHERE name = ?", (now, name))
            values = (cursor, name) if rewind else (cursor, name, cursor)
            await tx.execute(f"UPDATE consumers SET cursor = ? WHERE name = ?{further}", values)
            return await _find(tx, name)

        return await self._db.write(body)

    async def listed(self) -> list[Consumer]:
        """All consumers, by name."""
        return await self._db.read(lambda tx: _consumers(tx, "ORDER BY name"))

    async def remove(self, name: str) -> None:
        """Forget a consumer and its position. Raises NotFound for an unknown one."""

        async def body(tx: Connection) -> None:
            await _find(tx, name)
            await tx.execute("DELETE FROM consumers WHERE name = ?", (name,))

        await self._db.write(body)


async def _find(tx: Connection, name: str) -> Consumer:
    found = await _consumers(tx, "WHERE name = ?", name)
    if not found:
        raise NotFound(f"no consumer {name!r}", hint=f"it begins with its first GET /v1/results?consumer={name}")
    return found[0]


async def _consumers(tx: Connection, where: str, *values: str) -> list[Consumer]:
    newest = await _newest(tx)
    oldest: int = (await tx.fetch("SELECT COALESCE(MIN(cursor), 0) FROM groups"))[0][0] or newest + 1
    found = await tx.fetch(f"SELECT name, cursor, created, seen FROM consumers {where}", values)
    return [
        # What was removed before it was read is not left to be read.
        Consumer(name=row[0], cursor=row[1], created=row[2], seen=row[3], lag=newest - max(row[1], oldest - 1))
        for row in found
    ]


async def _newest(tx: Connection) -> int:
    cursor: int = (await tx.fetch("SELECT cursor FROM totals"))[0][0]
    return cursor


async def _check_reached(tx: Connection, cursor: int, *, field: str) -> None:
    if cursor > (newest := await _newest(tx)):
        raise Conflict(
            f"no group has the cursor {cursor}: the newest is {newest}",
            hint="give the cursor of a group that was read; if the service has lost its data, begin again at 0",
            field=field,
        )
