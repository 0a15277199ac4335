"""Stores the named consumers of the results. A consumer is a program that reads finished groups in order. Each finished
group has a cursor, a rising number. A consumer's position is the cursor up to which it has processed all groups.

A consumer of a tenant sees that tenant's groups; a consumer of the admins sees all groups. Two tenants may each have a
consumer of the same name. Invariants: a position is never greater than the newest cursor of a group; a position moves
back only on request.
"""

from __future__ import annotations

from collections.abc import Callable

from outrider.errors import Conflict, NotFound
from outrider.schemas import ConsumerView
from outrider.store.database import Connection, Database
from outrider.store.tenants import total

MAX_CONSUMERS = 1000
"""Maximum number of consumers of one tenant."""

OF_ADMINS = ""
"""Value of the tenant column for consumers that see all groups. No tenant has this name."""


class Consumers:
    """The consumers in a store. The store opens and closes the database. Every method raises ServiceError when the
    database fails.

    `tenant` is the owner of a consumer, or None for a consumer that sees all groups.
    """

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._db = database
        self._clock = clock

    async def enter(self, name: str, *, at: int = 0, tenant: str | None = None) -> int:
        """Return the consumer's position, and record that the consumer made a request now. An unknown consumer is
        created at position `at`.

        Raises Conflict if the position of a new consumer is greater than the newest cursor, or if the tenant already
        has MAX_CONSUMERS consumers.
        """
        owner = tenant or OF_ADMINS

        async def body(tx: Connection) -> int:
            now = self._clock()
            if not await tx.execute("UPDATE consumers SET seen = ? WHERE tenant = ? AND name = ?", (now, owner, name)):
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
            return int(position)

        return await self._db.write(body)

    async def acknowledge(
        self, name: str, cursor: int, *, rewind: bool = False, tenant: str | None = None
    ) -> ConsumerView:
        """Move a consumer forward to `cursor`. If `cursor` is lower than the consumer's position, the consumer moves
        back only with `rewind`.

        Raises NotFound for an unknown consumer, and Conflict if `cursor` is greater than the newest cursor.
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
        """List the consumers of a tenant, or all consumers if `tenant` is None: first the admins' consumers, then the
        consumers of each tenant, by name."""
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
    """Return the number of groups that the consumer has not processed yet. For a consumer of the admins, the number may
    include removed groups."""
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
