"""Tenants, the owners of groups: conditions that limit reads to one tenant's rows, and the totals of each tenant.

A tenant is the label of one or several tokens (see docs/security.md). A group belongs for good to the tenant of the
submitting token. A read on behalf of a client takes a `tenant`. None stands for all tenants, for the service itself and
admins only. No transaction is opened here. Invariant: a tenant's reads do not depend on rows of other tenants.
"""

from __future__ import annotations

from typing import NamedTuple

from outrider.store.database import Connection


class Condition(NamedTuple):
    """An addition to a WHERE clause, and its values."""

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
    """Add a group, which has just got its cursor, to the totals of its tenant."""
    await tx.execute(
        """INSERT INTO tenants (name, cursor, sessions, removed_event)
           SELECT tenant, cursor, n, 0 FROM groups WHERE id = ?
           ON CONFLICT (name)
           DO UPDATE SET cursor = excluded.cursor, sessions = tenants.sessions + excluded.sessions""",
        (group_id,),
    )


async def note_hidden(tx: Connection, group_id: str, sessions: int) -> None:
    """Subtract a group that is being removed from the totals of its tenant."""
    sql = "UPDATE tenants SET sessions = sessions - ? WHERE name = (SELECT tenant FROM groups WHERE id = ?)"
    await tx.execute(sql, (sessions, group_id))


async def note_erased_events(tx: Connection, group_id: str, last: int) -> None:
    """Record that a group's events up to the cursor `last` are removed."""
    await tx.execute(
        """UPDATE tenants SET removed_event = ?
           WHERE removed_event < ? AND name = (SELECT tenant FROM groups WHERE id = ?)""",
        (last, last, group_id),
    )


async def newest_cursor(tx: Connection, tenant: str | None) -> int:
    """The newest cursor given to a result of the tenant; 0 before the first."""
    if tenant is None:
        found = await tx.fetch("SELECT cursor FROM totals")
    else:
        found = await tx.fetch("SELECT cursor FROM tenants WHERE name = ?", (tenant,))
    return int(found[0][0]) if found else 0


async def newest_event(tx: Connection, tenant: str | None) -> int:
    """The newest cursor given to an event of the tenant, removed ones included; 0 before the first."""
    if tenant is None:
        sql, values = "SELECT (SELECT COALESCE(MAX(cursor), 0) FROM events), removed_event FROM totals", ()
        ((stored, removed),) = await tx.fetch(sql, values)
    else:
        own = "SELECT COALESCE(MAX(cursor), 0) FROM events WHERE tenant = ?"
        gone = "SELECT COALESCE(MAX(removed_event), 0) FROM tenants WHERE name = ?"
        ((stored, removed),) = await tx.fetch(f"SELECT ({own}), ({gone})", (tenant, tenant))
    return max(int(stored), int(removed))


async def sessions_in_done_groups(tx: Connection, tenant: str | None) -> int:
    """Number of sessions in the tenant's done groups. There may be millions, so the number is read from the totals."""
    if tenant is None:
        found = await tx.fetch("SELECT sessions FROM totals")
    else:
        found = await tx.fetch("SELECT sessions FROM tenants WHERE name = ?", (tenant,))
    return int(found[0][0]) if found else 0
