"""Stores how long the phases of a trainer's steps took. There is one record per tenant, epoch and step.

Invariant: a tenant has at most MOST_TIMINGS records. When a new record exceeds this number, the oldest is dropped.
"""

from __future__ import annotations

from collections.abc import Callable

from outrider.store.database import Connection, Database

MOST_TIMINGS = 5_000
"""Maximum number of stored records of one tenant."""


class TrainingTimings:
    """Reads and writes the records in the store's database. Methods raise ServiceError when the database fails. Each
    record is a JSON object, as bytes."""

    def __init__(self, database: Database, clock: Callable[[], float], *, most_timings: int = MOST_TIMINGS) -> None:
        self._db = database
        self._clock = clock
        self._most_timings = most_timings

    async def keep(self, tenant: str, epoch: int, step: int, record: bytes) -> None:
        """Store the record of a step. The record replaces an earlier record of the same step, and keeps the age of the
        earlier one."""
        put = """INSERT INTO training_timings (tenant, epoch, step, record, stored) VALUES (?, ?, ?, ?, ?)
            ON CONFLICT (tenant, epoch, step) DO UPDATE SET record = excluded.record"""
        drop = "DELETE FROM training_timings WHERE tenant = ? AND epoch = ? AND step = ?"
        oldest = """SELECT epoch, step FROM training_timings WHERE tenant = ?
            ORDER BY stored DESC, epoch DESC, step DESC LIMIT ? OFFSET ?"""

        async def body(tx: Connection) -> None:
            await tx.execute(put, (tenant, epoch, step, record, self._clock()))
            for old in await tx.fetch(oldest, (tenant, self._most_timings, self._most_timings)):
                await tx.execute(drop, (tenant, *old))

        await self._db.write(body)

    async def find(self, tenant: str, epoch: int, step: int) -> bytes | None:
        """Return the record of a step, or None."""
        sql = "SELECT record FROM training_timings WHERE tenant = ? AND epoch = ? AND step = ?"
        found = await self._db.read(lambda tx: tx.fetch(sql, (tenant, epoch, step)))
        return bytes(found[0][0]) if found else None

    async def all(self, tenant: str) -> list[bytes]:
        """Return the tenant's records in order of epoch and step."""
        sql = "SELECT record FROM training_timings WHERE tenant = ? ORDER BY epoch, step"
        return [bytes(row[0]) for row in await self._db.read(lambda tx: tx.fetch(sql, (tenant,)))]
