"""Limits reads to the rows of one tenant, and maintains the totals of each tenant. A tenant is an owner of groups.

Each token belongs to a tenant, and several tokens may share one (see docs/security.md). A group belongs to the tenant
of the token that submitted it. A read for a client has a parameter `tenant`; None stands for all tenants, and is only
for admins and the service itself. The functions run in the caller's transaction. Invariant: a tenant's reads do not
depend on rows of other tenants.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from outrider.store.database import Connection


class Condition(NamedTuple):
    """An addition to a WHERE clause, and the values of its placeholders."""

    sql: str
    values: tuple[str, ...]


EVERYBODY = Condition("", ())


def of_tenant(tenant: str | None) -> Condition:
    """Return the condition for tables with a `tenant` column."""
    return EVERYBODY if tenant is None else Condition(" AND tenant = ?", (tenant,))


def session_of_tenant(tenant: str | None) -> Condition:
    """Return the condition for `sessions`. A session's tenant is the tenant of its group."""
    if tenant is None:
        return EVERYBODY
    sql = " AND EXISTS (SELECT 1 FROM groups WHERE groups.id = sessions.group_id AND groups.tenant = ?)"
    return Condition(sql, (tenant,))


async def note_done(tx: Connection, group_id: str) -> None:
    """Add a group to the totals of its tenant. The group must already have its cursor."""
    await tx.execute(
        """INSERT INTO tenants (name, cursor, sessions, removed_event)
           SELECT tenant, cursor, n, 0 FROM groups WHERE id = ?
           ON CONFLICT (name)
           DO UPDATE SET cursor = excluded.cursor, sessions = tenants.sessions + excluded.sessions""",
        (group_id,),
    )


async def note_hidden(tx: Connection, group_id: str, sessions: int) -> None:
    """Subtract the sessions of a hidden group from the totals of the group's tenant."""
    sql = "UPDATE tenants SET sessions = sessions - ? WHERE name = (SELECT tenant FROM groups WHERE id = ?)"
    await tx.execute(sql, (sessions, group_id))


async def note_erased_events(tx: Connection, group_id: str, last: int) -> None:
    """Record in the tenant's totals that a group's events up to the cursor `last` are removed."""
    await tx.execute(
        """UPDATE tenants SET removed_event = ?
           WHERE removed_event < ? AND name = (SELECT tenant FROM groups WHERE id = ?)""",
        (last, last, group_id),
    )


async def total(tx: Connection, column: Literal["cursor", "sessions", "removed_event"], tenant: str | None) -> int:
    """Return a total of the tenant, 0 if there is none yet. `cursor` is the newest cursor given to a result, `sessions`
    the number of sessions in done groups, and `removed_event` the newest cursor of a removed event."""
    if tenant is None:
        found = await tx.fetch(f"SELECT {column} FROM totals")
    else:
        found = await tx.fetch(f"SELECT {column} FROM tenants WHERE name = ?", (tenant,))
    return int(found[0][0]) if found else 0


async def newest_event(tx: Connection, tenant: str | None) -> int:
    """Return the newest cursor given to an event of the tenant, including removed events; 0 before the first event."""
    where, values = ("", ()) if tenant is None else (" WHERE tenant = ?", (tenant,))
    ((stored,),) = await tx.fetch(f"SELECT COALESCE(MAX(cursor), 0) FROM events{where}", values)
    return max(int(stored), await total(tx, "removed_event", tenant))
