"""Stores the position of each consumer. A consumer is a named program that reads finished groups in order. Each
finished group gets a cursor, a rising number. A consumer at position 7 has processed all groups with cursors up to 7.

A tenant's consumers read only its own groups; an admin's consumers read all groups. Two tenants may use the same
consumer name. Invariants: no position is greater than the newest cursor; a position moves back only on request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from outrider.errors import Conflict, NotFound
from outrider.schemas import ConsumerView
from outrider.store.database import Connection, Database
from outrider.store.tenants import total

MAX_CONSUMERS = 1000
"""Maximum number of consumers of one tenant."""

OF_ADMINS = ""
"""Value of the column `tenant` for the admins' consumers. No tenant has an empty name."""


class Entered(NamedTuple):
    """The position of a consumer that reads results. `new` is True if this request created the consumer."""

    position: int
    new: bool


class Consumers:
    """Reads and writes the consumers in the store's database. Methods raise ServiceError when the database fails.

    `tenant` is the owner of a consumer. None stands for the admins, whose consumers read all groups.
    """

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._db = database
        self._clock = clock

    async def enter(self, name: str, *, at: int = 0, tenant: str | None = None) -> Entered:
        """Return the consumer's position, and record the time of this request. An unknown consumer is created at
        position `at`.

        For a new consumer, raises Conflict if `at` is greater than the newest cursor, or if the tenant already has
        MAX_CONSUMERS consumers.
        """
        owner = tenant or OF_ADMINS

        async def body(tx: Connection) -> Entered:
            now = self._clock()
            known = "UPDATE consumers SET seen = ? WHERE tenant = ? AND name = ?"
            if new := not await tx.execute(known, (now, owner, name)):
                if (await tx.fetch("SELECT COUNT(*) FROM consumers WHERE tenant = ?", (owner,)))[0][0] >= MAX_CONSUMERS:
                    raise Conflict(
                        f"there are {MAX_CONSUMERS} consumers already",
                        hint="delete consumers that are not needed any more: outrider consumers list",
                        field="consumer",
                    )
                await _check_reached(tx, at, tenant, field="after")
                sql = "INSERT INTO consumers (tenant, name, cursor, created, seen) VALUES (?, ?, ?, ?, ?)"
                await tx.execute(sql, (owner, name, at, now, now))
            ((position,),) = await tx.fetch("SELECT cursor FROM consumers WHERE tenant = ? AND name = ?", (owner, name))
            return Entered(position, new)

        return await self._db.write(body)

    async def acknowledge(
        self, name: str, cursor: int, *, rewind: bool = False, tenant: str | None = None
    ) -> ConsumerView:
        """Move a consumer to position `cursor`. Without `rewind`, a position lower than the current one is ignored.

        Raises NotFound for an unknown consumer. Raises Conflict if `cursor` is greater than the newest cursor.
        """
        owner = tenant or OF_ADMINS
        further = "" if rewind else " AND cursor < ?"

        async def body(tx: Connection) -> ConsumerView:
            known = "UPDATE consumers SET seen = ? WHERE tenant = ? AND name = ?"
            if not await tx.execute(known, (self._clock(), owner, name)):
                raise _unknown(name)
            await _check_reached(tx, cursor, tenant, field="cursor")
            values = (cursor, owner, name) if rewind else (cursor, owner, name, cursor)
            await tx.execute(f"UPDATE consumers SET cursor = ? WHERE tenant = ? AND name = ?{further}", values)
            [moved] = await _consumers(tx, "WHERE tenant = ? AND name = ?", owner, name)
            return moved

        return await self._db.write(body)

    async def listed(self, tenant: str | None = None) -> list[ConsumerView]:
        """List the consumers of a tenant by name. If `tenant` is None, list the admins' consumers first, then those of
        every tenant."""
        where, values = ("", ()) if tenant is None else ("WHERE tenant = ?", (tenant,))
        return await self._db.read(lambda tx: _consumers(tx, f"{where} ORDER BY tenant, name", *values))

    async def remove(self, name: str, *, tenant: str | None = None) -> None:
        """Delete a consumer and its position. Raises NotFound for an unknown consumer."""

        async def body(tx: Connection) -> None:
            sql = "DELETE FROM consumers WHERE tenant = ? AND name = ?"
            if not await tx.execute(sql, (tenant or OF_ADMINS, name)):
                raise _unknown(name)

        await self._db.write(body)


def _unknown(name: str) -> NotFound:
    return NotFound(f"no consumer {name!r}", hint=f"it begins with its first GET /v1/results?consumer={name}")


async def _consumers(tx: Connection, where: str, *values: str) -> list[ConsumerView]:
    found = await tx.fetch(f"SELECT tenant, name, cursor, created, seen FROM consumers {where}", values)
    return [
        ConsumerView(
            tenant=row[0] or None,
            name=row[1],
            cursor=row[2],
            created=row[3],
            seen=row[4],
            lag=await _lag(tx, row[0] or None, row[2]),
        )
        for row in found
    ]


async def _lag(tx: Connection, tenant: str | None, position: int) -> int:
    """Return how many finished groups the consumer has not processed yet. For an admin's consumer, removed groups may
    be included."""
    if tenant is not None:
        sql = "SELECT COUNT(*) FROM groups WHERE tenant = ? AND cursor > ?"
        return int((await tx.fetch(sql, (tenant, position)))[0][0])
    newest = await total(tx, "cursor", None)
    oldest: int = (await tx.fetch("SELECT COALESCE(MIN(cursor), 0) FROM groups"))[0][0] or newest + 1
    return newest - max(position, oldest - 1)


async def _check_reached(tx: Connection, cursor: int, tenant: str | None, *, field: str) -> None:
    if cursor > (newest := await total(tx, "cursor", tenant)):
        raise Conflict(
            f"no group has the cursor {cursor}: the newest is {newest}",
            hint="give the cursor of a group that was read; if the service has lost its data, begin again at 0",
            field=field,
        )
