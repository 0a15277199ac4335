"""Limits reads to the rows of one tenant, and keeps totals for each tenant. A tenant is an owner of groups.

Each token belongs to a tenant, and a tenant may have several tokens (see docs/security.md). A group belongs to the
tenant of the token that submitted it. Methods that read for a client have a parameter `tenant`. The value None means
all tenants. Only admins and the service itself may read all tenants.

The functions run in the caller's transaction. Invariant: what a tenant reads does not depend on rows of other tenants.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from outrider.store.database import Connection


class Condition(NamedTuple):
    """A condition to append to a WHERE clause, and the values of its placeholders."""

    sql: str
    values: tuple[str, ...]


EVERYBODY = Condition("", ())


def of_tenant(tenant: str | None) -> Condition:
    """Return a condition that selects the tenant's rows in a table with a column `tenant`. If `tenant` is None, it
    selects all rows."""
    return EVERYBODY if tenant is None else Condition(" AND tenant = ?", (tenant,))


def session_of_tenant(tenant: str | None) -> Condition:
    """Return the condition for `sessions`, which has no column `tenant`. A session belongs to its group's tenant."""
    if tenant is None:
        return EVERYBODY
    sql = " AND EXISTS (SELECT 1 FROM groups WHERE groups.id = sessions.group_id AND groups.tenant = ?)"
    return Condition(sql, (tenant,))


async def note_done(tx: Connection, group_id: str) -> None:
    """Add a done group to the totals of its tenant. The group must already have its cursor."""
    await tx.execute(
        """INSERT INTO tenants (name, cursor, sessions, removed_event)
           SELECT tenant, cursor, n, 0 FROM groups WHERE id = ?
           ON CONFLICT (name)
           DO UPDATE SET cursor = excluded.cursor, sessions = tenants.sessions + excluded.sessions""",
        (group_id,),
    )


async def note_hidden(tx: Connection, group_id: str, sessions: int) -> None:
    """Subtract a hidden group's sessions from the totals of its tenant."""
    sql = "UPDATE tenants SET sessions = sessions - ? WHERE name = (SELECT tenant FROM groups WHERE id = ?)"
    await tx.execute(sql, (sessions, group_id))


async def note_erased_events(tx: Connection, group_id: str, last: int) -> None:
    """Record that events of a group were removed. `last` is the greatest cursor of these events."""
    await tx.execute(
        """UPDATE tenants SET removed_event = ?
           WHERE removed_event < ? AND name = (SELECT tenant FROM groups WHERE id = ?)""",
        (last, last, group_id),
    )


async def total(tx: Connection, column: Literal["cursor", "sessions", "removed_event"], tenant: str | None) -> int:
    """Return one of a tenant's totals, or 0 if there is none yet.

    cursor: the newest cursor given to a done group.
    sessions: number of sessions in done groups.
    removed_event: the newest cursor of a removed event."""
    if tenant is None:
        found = await tx.fetch(f"SELECT {column} FROM totals")
    else:
        found = await tx.fetch(f"SELECT {column} FROM tenants WHERE name = ?", (tenant,))
    return int(found[0][0]) if found else 0


async def newest_event(tx: Connection, tenant: str | None) -> int:
    """Return the cursor of the tenant's newest event, or 0 if there was none. Removed events count, too."""
    where, values = ("", ()) if tenant is None else (" WHERE tenant = ?", (tenant,))
    ((stored,),) = await tx.fetch(f"SELECT COALESCE(MAX(cursor), 0) FROM events{where}", values)
    return max(int(stored), await total(tx, "removed_event", tenant))
