"""Groups and sessions inside one transaction: found, checked, put in.

Each function is a few statements on the transaction that its caller has open. It decides nothing but what an attempt
may still write. Invariant: only the newest attempt of a session that is not done passes the checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.errors import Conflict, NotFound
from outrider.lifecycle import GroupState, SessionState
from outrider.store import rows
from outrider.store.base import GroupRow, SessionRow
from outrider.store.database import Connection
from outrider.trajectory import SessionResult


def find_group(tx: Connection, group_id: str) -> GroupRow:
    found = tx.fetch(f"SELECT {rows.GROUP_COLUMNS} FROM groups WHERE id = ?", (group_id,))
    if not found:
        raise NotFound(f"no group {group_id!r}")
    return rows.group_from(found[0])


def group_of_key(tx: Connection, key: str) -> GroupRow | None:
    found = tx.fetch(f"SELECT {rows.GROUP_COLUMNS} FROM groups WHERE idempotency_key = ?", (key,))
    return rows.group_from(found[0]) if found else None


def find_spec(tx: Connection, group_id: str) -> bytes:
    found = tx.fetch("SELECT spec FROM groups WHERE id = ?", (group_id,))
    if not found:
        raise NotFound(f"no group {group_id!r}")
    return bytes(found[0][0])


def count_outcome(tx: Connection, group_id: str, result: SessionResult) -> None:
    tx.execute(
        """UPDATE groups SET open_sessions = open_sessions - 1, errors = errors + ?, rewarded = rewarded + ?,
               reward_total = reward_total + ? WHERE id = ?""",
        (
            int(result.error is not None),
            int(result.verdict is not None),
            result.verdict.reward if result.verdict else 0.0,
            group_id,
        ),
    )


def insert_group(tx: Connection, group: GroupRow, spec: bytes, session_ids: Sequence[str]) -> None:
    inserted = tx.execute(
        """INSERT INTO groups (id, spec, labels, n, priority, idempotency_key, callback_url, state, cancelled,
               open_sessions, created) VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?) ON CONFLICT DO NOTHING""",
        (
            group.id,
            spec,
            rows.pack_data(group.labels),
            group.n,
            group.priority,
            group.idempotency_key,
            group.callback_url,
            GroupState.ACTIVE.value,
            group.n,
            group.created,
        ),
    )
    if not inserted:
        raise Conflict(f"there already is a group {group.id!r}")
    inserted = tx.execute_many(
        """INSERT INTO sessions (id, group_id, sample_index, state, attempt, priority, created, updated, waiting)
           VALUES (?, ?, ?, ?, 0, ?, ?, ?, 1) ON CONFLICT DO NOTHING""",
        [
            (id, group.id, index, SessionState.QUEUED.value, group.priority, group.created, group.created)
            for index, id in enumerate(session_ids)
        ],
    )
    if inserted != group.n:
        raise Conflict(f"some session ids of group {group.id!r} are already in use")


def find_session(tx: Connection, session_id: str) -> SessionRow:
    found = find_sessions(tx, "id = ?", session_id)
    if not found:
        raise NotFound(f"no session {session_id!r}")
    return found[0]


def find_sessions(tx: Connection, where: str, *values: Any) -> list[SessionRow]:
    sql = f"SELECT {rows.SESSION_COLUMNS} FROM sessions WHERE {where}"
    return [rows.session_from(row) for row in tx.fetch(sql, values)]


def fenced(tx: Connection, session_id: str, attempt: int) -> SessionRow:
    """The session, if `attempt` is its newest and it is not done; else Conflict."""
    session = find_session(tx, session_id)
    if session.attempt != attempt:
        raise Conflict(f"session {session_id} is at attempt {session.attempt}, not {attempt}")
    if session.state is SessionState.DONE:
        raise Conflict(f"session {session_id} is done")
    return session


def started(tx: Connection, session_id: str, attempt: int) -> SessionRow:
    """The session, if `attempt` is under way; else Conflict."""
    session = fenced(tx, session_id, attempt)
    if session.state is SessionState.QUEUED:
        raise Conflict(f"session {session_id} waits in the queue: attempt {attempt} has ended")
    return session
