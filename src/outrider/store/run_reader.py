"""Reads the store for the index of runs (`run_index/`): the changes after an event, or all groups in pages.

Invariant: every change that the index shows has an event, with two exceptions. Removals have no event: the caller of
`Removals.hide` reports them to the index. Labels that `Store.add_label` sets have no event, either: they are read with
the next change of their group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from outrider.errors import ErrorRecord
from outrider.store import rows
from outrider.store.database import Connection, Database
from outrider.store.removals import REMOVED
from outrider.store.rows import EventKind, GroupRow, SessionRow

AT_ONCE = 100
"""Maximum number of ids in one SQL statement."""


class Retry(msgspec.Struct, frozen=True):
    """A failed attempt after which its session was queued again."""

    session_id: str
    attempt: int
    at: float
    error: ErrorRecord


class RunChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Groups and sessions in their current state, and retries. `cursor` belongs to the last event that was read, and
    `at` is the time of this event. `more` is True if more changes may follow."""

    groups: list[GroupRow] = []
    sessions: list[SessionRow] = []
    retries: list[Retry] = []
    cursor: int = 0
    at: float = 0.0
    more: bool = False


class RunReader:
    """Reads groups and sessions from the store's database. Methods raise ServiceError when the database fails."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def changes(self, after: int, limit: int) -> RunChanges:
        """Read the next `limit` events after a cursor. Return the retries among these events, and the groups and
        sessions that the events changed, except hidden ones."""
        sql = "SELECT cursor, at, kind, group_id, session_id, data FROM events WHERE cursor > ? ORDER BY cursor LIMIT ?"

        async def body(tx: Connection) -> RunChanges:
            events = await tx.fetch(sql, (after, limit))
            if not events:
                return RunChanges(cursor=after)
            ids = list(dict.fromkeys(event[3] for event in events))
            created = [event[3] for event in events if event[2] == EventKind.GROUP_CREATED]
            changed = list(dict.fromkeys(event[4] for event in events if event[4] is not None))
            sessions = await _sessions(tx, "group_id", created)
            known = {session.id for session in sessions}
            sessions += await _sessions(tx, "id", [each for each in changed if each not in known])
            retries = [_retry(*event[1:]) for event in events if event[2] == EventKind.SESSION_RETRY]
            return RunChanges(
                groups=await _groups(tx, ids),
                sessions=sessions,
                retries=retries,
                cursor=events[-1][0],
                at=events[-1][1],
                more=len(events) == limit,
            )

        return await self._db.read(body)

    async def page(self, after: tuple[float, str] | None, limit: int) -> RunChanges:
        """Return up to `limit` groups with their sessions, oldest first. `after` has the creation time and id of the
        last group of the previous page."""
        where, values = ("", ()) if after is None else (" AND (created, id) > (?, ?)", after)
        sql = f"SELECT {rows.GROUP_COLUMNS} FROM groups WHERE state <> ?{where} ORDER BY created, id LIMIT ?"

        async def body(tx: Connection) -> RunChanges:
            groups = [rows.row_from(GroupRow, row) for row in await tx.fetch(sql, (REMOVED, *values, limit))]
            sessions = await _sessions(tx, "group_id", [group.id for group in groups])
            return RunChanges(groups=groups, sessions=sessions, more=len(groups) == limit)

        return await self._db.read(body)

    async def retries(self, after: int, limit: int) -> tuple[list[Retry], int]:
        """Return up to `limit` retries after a cursor, and the cursor with which to ask for more retries. This is the
        cursor of the last returned retry, or 0 if no more retries follow."""
        sql = """SELECT cursor, at, kind, group_id, session_id, data FROM events WHERE kind = ? AND cursor > ?
            ORDER BY cursor LIMIT ?"""
        found = await self._db.read(lambda tx: tx.fetch(sql, (EventKind.SESSION_RETRY.value, after, limit)))
        return [_retry(*event[1:]) for event in found], found[-1][0] if len(found) == limit else 0

    async def group_ids(self) -> set[str]:
        """Return the ids of all groups that are not hidden."""
        sql = "SELECT id FROM groups WHERE state <> ?"
        return {row[0] for row in await self._db.read(lambda tx: tx.fetch(sql, (REMOVED,)))}

    async def event_at(self, cursor: int) -> float | None:
        """Return the time of the event with this cursor, or None if the event is not stored."""
        found = await self._db.read(lambda tx: tx.fetch("SELECT at FROM events WHERE cursor = ?", (cursor,)))
        return float(found[0][0]) if found else None

    async def packed_turns(self, attempts: Sequence[tuple[str, int]]) -> list[list[tuple[str, bytes]]]:
        """Return the encoded turns of several attempts (session id and number). Each turn comes with its model (empty
        for the policy), in order of index."""
        own = "SELECT turn FROM turns WHERE session_id = ? AND attempt = ? ORDER BY turn_index"
        frozen = "SELECT model, turn FROM frozen_turns WHERE session_id = ? AND attempt = ? ORDER BY model, turn_index"

        async def body(tx: Connection) -> list[list[tuple[str, bytes]]]:
            found = []
            for attempt in attempts:
                turns = [("", bytes(turn)) for (turn,) in await tx.fetch(own, attempt)]
                found.append(turns + [(model, bytes(turn)) for model, turn in await tx.fetch(frozen, attempt)])
            return found

        return await self._db.read(body)

    async def sessions(self, ids: Sequence[str]) -> list[SessionRow]:
        """Return sessions in the order of `ids`, without those that were removed."""
        found = {row.id: row for row in await self._db.read(lambda tx: _sessions(tx, "id", ids))}
        return [found[id] for id in ids if id in found]

    async def groups(self, ids: Sequence[str]) -> list[GroupRow]:
        """Return groups in the order of `ids`, without those that were removed. Their callback URLs are left out."""
        found = {row.id: row for row in await self._db.read(lambda tx: _groups(tx, ids))}
        return [msgspec.structs.replace(found[id], callback_url=None) for id in ids if id in found]


def _retry(at: float, _kind: str, _group: str, session_id: str, data: str) -> Retry:
    found: dict[str, Any] = msgspec.json.decode(data)
    return Retry(session_id, found["attempt"], at, msgspec.convert(found["error"], ErrorRecord))


async def _groups(tx: Connection, ids: Sequence[str]) -> list[GroupRow]:
    found = []
    for some, marks in _chunks(ids):
        sql = f"SELECT {rows.GROUP_COLUMNS} FROM groups WHERE state <> ? AND id IN ({marks})"
        found += [rows.row_from(GroupRow, row) for row in await tx.fetch(sql, (REMOVED, *some))]
    return found


async def _sessions(tx: Connection, column: str, ids: Sequence[str]) -> list[SessionRow]:
    found = []
    for some, marks in _chunks(ids):
        sql = f"SELECT {rows.SESSION_COLUMNS} FROM sessions WHERE state <> ? AND {column} IN ({marks})"
        found += [rows.row_from(SessionRow, row) for row in await tx.fetch(sql, (REMOVED, *some))]
    return found


def _chunks(ids: Sequence[str]) -> list[tuple[Sequence[str], str]]:
    """Split the ids into chunks. Returns each chunk with its `?` placeholders. All chunks have the same length, so that
    the database prepares only one statement. Copies of the last id fill up the last chunk."""
    found: list[tuple[Sequence[str], str]] = []
    for start in range(0, len(ids), AT_ONCE):
        some = list(ids[start : start + AT_ONCE])
        found.append((some + some[-1:] * (AT_ONCE - len(some)), ", ".join("?" * AT_ONCE)))
    return found
