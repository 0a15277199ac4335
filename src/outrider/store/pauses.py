"""Stores the pauses of the queue. A pause holds queued sessions: they stay in the queue, but are not started.

A pause belongs to one tenant or applies to all tenants. It matches a group that has all labels of the pause. If the
pause names a harness, the group must also use this harness.

Invariants: a queued session is held if and only if a pause matches its group and `sessions.ending` is not set;
`sessions.held` and `sessions.waiting` are never both 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from outrider.errors import Conflict, NotFound
from outrider.schemas import PauseView
from outrider.store import queue
from outrider.store.database import Connection, Database

MAX_PAUSES = 100
"""Maximum number of pauses that one tenant may have. The admins' pauses, which apply to all tenants, are counted
separately, with the same limit."""
ALL_TENANTS = ""
"""Value of the column `tenant` for pauses of all tenants. No tenant has an empty name."""
AT_ONCE = 100


class Pause(msgspec.Struct, frozen=True):
    """A stored pause. If `harness` is empty, the pause matches every harness."""

    tenant: str
    labels: dict[str, str]
    harness: str

    def matches(self, tenant: str, labels: Mapping[str, str], harness: str) -> bool:
        return (
            self.tenant in (ALL_TENANTS, tenant)
            and self.labels.items() <= labels.items()
            and self.harness in ("", harness)
        )


class Pauses:
    """Reads and writes the pauses in the store's database. Methods raise ServiceError when the database fails. `tenant`
    is the owner of a pause. None stands for a pause of all tenants."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._db = database
        self._clock = clock

    async def pause(self, labels: Mapping[str, str], harness: str | None, *, tenant: str | None, who: str) -> int:
        """Hold all queued sessions that match, and all matching sessions that enter the queue later. Returns the number
        of sessions that were waiting and are now held. A second call with the same arguments adds no second pause.
        Raises Conflict if the owner already has MAX_PAUSES pauses."""
        pause = Pause(tenant or ALL_TENANTS, dict(labels), harness or "")

        async def body(tx: Connection) -> int:
            sql = """INSERT INTO pauses (tenant, labels, harness, since, who) VALUES (?, ?, ?, ?, ?)
                ON CONFLICT DO NOTHING"""
            new = await tx.execute(sql, (pause.tenant, _packed(labels), pause.harness, self._clock(), who))
            count = "SELECT COUNT(*) FROM pauses WHERE tenant = ?"
            if new and (await tx.fetch(count, (pause.tenant,)))[0][0] > MAX_PAUSES:
                raise Conflict(f"there are {MAX_PAUSES} pauses already", hint="end some: outrider queue list")
            waiting = """SELECT DISTINCT groups.id, groups.tenant, groups.labels, groups.harness
                FROM sessions JOIN groups ON groups.id = sessions.group_id WHERE sessions.waiting = 1"""
            groups = [id for id, *about in await tx.fetch(waiting) if pause.matches(*_about(*about))]
            change = "held = 1, waiting = 0, expires = expires - ?"
            return await _set(tx, groups, change, "waiting = 1", self._clock())

        return await self._db.write(body)

    async def resume(self, labels: Mapping[str, str], harness: str | None, *, tenant: str | None) -> int:
        """End a pause. Returns the number of sessions that may start again because no other pause matches them. Raises
        NotFound if there is no such pause."""
        owner = tenant or ALL_TENANTS

        async def body(tx: Connection) -> int:
            sql = "DELETE FROM pauses WHERE tenant = ? AND labels = ? AND harness = ?"
            if not await tx.execute(sql, (owner, _packed(labels), harness or "")):
                raise NotFound("there is no such pause", hint="see the pauses with `outrider queue list`")
            left = await _pauses(tx)
            held = """SELECT DISTINCT groups.id, groups.tenant, groups.labels, groups.harness
                FROM sessions JOIN groups ON groups.id = sessions.group_id WHERE sessions.held = 1"""
            free = [
                id for id, *about in await tx.fetch(held) if not any(pause.matches(*_about(*about)) for pause in left)
            ]
            shares: set[tuple[int, str]] = set()
            for some, marks in _chunks(free):
                sql = f"SELECT DISTINCT priority, bucket FROM sessions WHERE held = 1 AND group_id IN ({marks})"
                shares.update((priority, bucket) for priority, bucket in await tx.fetch(sql, some))
            change = "held = 0, waiting = 1, expires = expires + ?"
            changed = await _set(tx, free, change, "held = 1", self._clock())
            for priority, bucket in sorted(shares):
                await queue.reopen_share(tx, priority, bucket)
            return changed

        return await self._db.write(body)

    async def listed(self, *, tenant: str | None) -> tuple[PauseView, ...]:
        """Return the pauses that apply to the tenant, or all pauses if `tenant` is None, oldest first."""
        where, values = ("", ()) if tenant is None else (" WHERE tenant = ? OR tenant = ?", (tenant, ALL_TENANTS))
        sql = f"SELECT tenant, labels, harness, since, who FROM pauses{where} ORDER BY since, tenant, labels, harness"
        return tuple(
            PauseView(
                tenant=owner or None, labels=msgspec.json.decode(labels), harness=harness or None, since=since, who=who
            )
            for owner, labels, harness, since, who in await self._db.read(lambda tx: tx.fetch(sql, values))
        )

    async def held(self, *, tenant: str | None) -> int:
        """Count the sessions that pauses hold, for one tenant or for all."""
        own, values = ("", ()) if tenant is None else (" AND groups.tenant = ?", (tenant,))
        sql = f"""SELECT COUNT(*) FROM sessions JOIN groups ON groups.id = sessions.group_id
            WHERE sessions.held = 1{own}"""
        count: int = (await self._db.read(lambda tx: tx.fetch(sql, values)))[0][0]
        return count


async def is_held(tx: Connection, tenant: str, labels: Mapping[str, str], harness: str) -> bool:
    """Return True if a pause matches a group."""
    return any(pause.matches(tenant, labels, harness) for pause in await _pauses(tx))


async def group_is_held(tx: Connection, group_id: str) -> bool:
    """Return True if a pause matches the group with this id."""
    pauses = await _pauses(tx)
    found = await tx.fetch("SELECT tenant, labels, harness FROM groups WHERE id = ?", (group_id,)) if pauses else []
    return any(pause.matches(*_about(*about)) for about in found for pause in pauses)


async def _pauses(tx: Connection) -> list[Pause]:
    found = await tx.fetch("SELECT tenant, labels, harness FROM pauses")
    return [Pause(tenant, msgspec.json.decode(labels), harness) for tenant, labels, harness in found]


def _about(tenant: str, labels: str, harness: str) -> tuple[str, dict[str, str], str]:
    return tenant, msgspec.json.decode(labels), harness


async def _set(tx: Connection, groups: Sequence[str], change: str, where: str, *values: float) -> int:
    """Run `UPDATE sessions SET change` on the sessions of `groups` that match `where` and have no `ending`. `values`
    are the values of the placeholders in `change`. Returns the number of changed sessions."""
    return sum(
        [
            await tx.execute(
                f"UPDATE sessions SET {change} WHERE {where} AND ending IS NULL AND group_id IN ({marks})",
                (*values, *some),
            )
            for some, marks in _chunks(groups)
        ]
    )


def _chunks(ids: Sequence[str]) -> list[tuple[Sequence[str], str]]:
    """Split the ids into chunks. Returns each chunk with its `?` placeholders."""
    chunks = [ids[start : start + AT_ONCE] for start in range(0, len(ids), AT_ONCE)]
    return [(some, ", ".join("?" * len(some))) for some in chunks]


def _packed(labels: Mapping[str, str]) -> str:
    return msgspec.json.encode(labels, order="sorted").decode()
