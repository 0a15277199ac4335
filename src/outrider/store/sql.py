"""The store as SQL: every statement and every transaction of Outrider's durable state.

It knows no particular database (see `database.py`) and makes no decision about rollouts: who runs, retries or
cancels is the caller's. Each public method is one transaction.
Invariants: a write of a session is made by its newest attempt while that is under way, or refused; a session's
result, its group's state, cursor, event and outbox row are committed together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from outrider.errors import Boundary, Conflict, ErrorRecord, NotFound
from outrider.lifecycle import GroupState, SessionState, can_move
from outrider.messages import Image
from outrider.store import rows
from outrider.store.base import Delivery, Event, EventKind, GroupRow, SessionRow
from outrider.store.database import Connection, Database
from outrider.store.images import find_image, insert_images, restore, split
from outrider.store.migrations import MIGRATIONS, Migrations, migrate
from outrider.store.records import (
    count_outcome,
    fenced,
    find_group,
    find_session,
    find_sessions,
    find_spec,
    group_of_key,
    insert_group,
    started,
)
from outrider.trajectory import SessionResult, Turn

MOVES_WITH_A_METHOD = frozenset({SessionState.QUEUED, SessionState.INITIALIZING, SessionState.DONE})

ADD_TURN = """INSERT INTO turns (session_id, attempt, turn_index, turn)
    SELECT id, attempt, ?, ? FROM sessions WHERE id = ? AND attempt = ? AND lease_until IS NOT NULL
    ON CONFLICT DO NOTHING"""


class SqlStore:
    """`Store` over any `Database`. `async with` opens and closes it.

    A cancelled group's sessions leave the queue at once: `queued` does not list them and `start_attempt`
    refuses them. They stay not done, also when `requeue` or `recover` ends their attempt (they are then QUEUED
    in state only), until the caller finishes each as cancelled. `cancel_group` may be repeated, after a crash
    for instance: it lists what is left to finish.
    """

    def __init__(
        self,
        database: Database,
        *,
        clock: Callable[[], float] = time.time,
        migrations: Migrations = MIGRATIONS,
    ) -> None:
        self._db = database
        self._clock = clock
        self._migrations = migrations

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        await self._db.open()
        try:
            await self._db.write(lambda tx: migrate(tx, self._db.types, self._clock(), self._migrations))
        except BaseException:  # cancelled, too: nothing that was opened stays open
            await self._db.close()
            raise

    async def close(self) -> None:
        await self._db.close()

    async def create_group(self, group: GroupRow, spec: bytes, session_ids: Sequence[str]) -> GroupRow:
        """As the protocol says. The stored group starts active and not cancelled, whatever `group` says."""
        if not session_ids or len(session_ids) != group.n:
            raise ValueError(f"group {group.id} of {group.n} sessions came with {len(session_ids)} session ids")

        def body(tx: Connection) -> GroupRow:
            if group.idempotency_key is not None and (known := group_of_key(tx, group.idempotency_key)):
                if find_spec(tx, known.id) != spec:
                    raise Conflict(
                        f"idempotency key {group.idempotency_key!r} was used for another request, group {known.id}",
                        hint="use a new key for a new request",
                        field="idempotency_key",
                    )
                return known
            insert_group(tx, group, spec, session_ids)
            data = {"n": group.n, "priority": group.priority}
            self._event(tx, EventKind.GROUP_CREATED, group.id, None, data)
            return find_group(tx, group.id)

        return await self._db.write(body)

    async def group(self, group_id: str) -> GroupRow:
        return await self._db.read(lambda tx: find_group(tx, group_id))

    async def spec(self, group_id: str) -> bytes:
        return await self._db.read(lambda tx: find_spec(tx, group_id))

    async def groups(self, *, state: GroupState | None = None, limit: int = 100) -> list[GroupRow]:
        where, values = ("", ()) if state is None else ("WHERE state = ?", (state.value,))
        sql = f"SELECT {rows.GROUP_COLUMNS} FROM groups {where} ORDER BY created DESC, id DESC LIMIT ?"
        found = await self._db.read(lambda tx: tx.fetch(sql, (*values, limit)))
        return [rows.group_from(row) for row in found]

    async def cancelled(self) -> list[str]:
        sql = "SELECT id FROM groups WHERE cancelled = 1 AND state = 'active' ORDER BY created, id"
        return [row[0] for row in await self._db.read(lambda tx: tx.fetch(sql))]

    async def session(self, session_id: str) -> SessionRow:
        return await self._db.read(lambda tx: find_session(tx, session_id))

    async def sessions(self, group_id: str) -> list[SessionRow]:
        found = await self._db.read(lambda tx: find_sessions(tx, "group_id = ? ORDER BY sample_index", group_id))
        if not found:
            raise NotFound(f"no group {group_id!r}")
        return found

    async def queued(self, limit: int, *, now: float = math.inf) -> list[SessionRow]:
        where = "waiting = 1 AND due <= ? ORDER BY priority DESC, created, group_id, sample_index LIMIT ?"
        return await self._db.read(lambda tx: find_sessions(tx, where, now, limit))

    async def next_due(self, *, after: float) -> float | None:
        sql = "SELECT MIN(due) FROM sessions WHERE waiting = 1 AND due > 0 AND due > ?"
        found: float | None = (await self._db.read(lambda tx: tx.fetch(sql, (after,))))[0][0]
        return found

    async def counts(self) -> dict[SessionState, int]:
        sql = "SELECT state, COUNT(*) FROM sessions GROUP BY state"
        found: dict[str, int] = dict(await self._db.read(lambda tx: tx.fetch(sql)))
        return {state: found.get(state, 0) for state in SessionState}

    async def start_attempt(self, session_id: str, *, node: str, lease_until: float) -> int:
        def body(tx: Connection) -> int:
            session = find_session(tx, session_id)
            if session.state is not SessionState.QUEUED:
                raise Conflict(f"session {session_id} is {session.state}, not queued")
            if find_group(tx, session.group_id).cancelled:
                raise Conflict(f"group {session.group_id} is cancelled")
            attempt = session.attempt + 1
            tx.execute(
                """UPDATE sessions SET state = ?, waiting = 0, due = 0, attempt = ?, node = ?, lease_until = ?,
                       updated = ? WHERE id = ?""",
                (SessionState.INITIALIZING.value, attempt, node, lease_until, self._clock(), session_id),
            )
            data = {"state": SessionState.INITIALIZING.value, "attempt": attempt, "node": node}
            self._event(tx, EventKind.SESSION_STATE, session.group_id, session_id, data)
            return attempt

        return await self._db.write(body)

    async def set_state(self, session_id: str, attempt: int, state: SessionState) -> None:
        """As the protocol says; to QUEUED, INITIALIZING and DONE only requeue, start_attempt and finish lead."""

        def body(tx: Connection) -> None:
            session = fenced(tx, session_id, attempt)
            if state in MOVES_WITH_A_METHOD or not can_move(session.state, state):
                raise Conflict(f"session {session_id} cannot be moved from {session.state} to {state}")
            tx.execute(
                "UPDATE sessions SET state = ?, updated = ? WHERE id = ?",
                (state.value, self._clock(), session_id),
            )
            data = {"state": state.value, "attempt": attempt}
            self._event(tx, EventKind.SESSION_STATE, session.group_id, session_id, data)

        await self._db.write(body)

    async def renew_leases(self, node: str, lease_until: float) -> None:
        sql = "UPDATE sessions SET lease_until = ? WHERE node = ? AND lease_until IS NOT NULL"
        await self._db.write(lambda tx: tx.execute(sql, (lease_until, node)))

    async def add_turn(self, session_id: str, attempt: int, turn: Turn) -> None:
        """As the protocol says; Conflict also for a turn index that the attempt already has."""
        taken = split(turn)
        packed = rows.pack(taken.turn)

        def body(tx: Connection) -> None:
            if not tx.execute(ADD_TURN, (turn.index, packed, session_id, attempt)):
                started(tx, session_id, attempt)
                raise Conflict(f"session {session_id} already has a turn {turn.index} in attempt {attempt}")
            insert_images(tx, taken.images)

        await self._db.write(body)

    async def turns(self, session_id: str, attempt: int | None = None, *, images: bool = False) -> list[Turn]:
        sql = "SELECT turn FROM turns WHERE session_id = ? AND attempt = ? ORDER BY turn_index"

        def body(tx: Connection) -> list[bytes]:
            newest = find_session(tx, session_id).attempt
            return [row[0] for row in tx.fetch(sql, (session_id, newest if attempt is None else attempt))]

        found = [rows.turn_from(packed) for packed in await self._db.read(body)]
        return await self._db.read(lambda tx: restore(tx, found)) if images else found

    async def image(self, digest: str) -> Image:
        return await self._db.read(lambda tx: find_image(tx, digest))

    async def requeue(self, session_id: str, attempt: int, error: ErrorRecord, *, due: float = 0.0) -> None:
        def body(tx: Connection) -> None:
            self._requeue(tx, started(tx, session_id, attempt), error, due=due)

        await self._db.write(body)

    async def finish(self, session_id: str, attempt: int, result: SessionResult) -> bool:
        packed = rows.pack(result)

        def body(tx: Connection) -> bool:
            session = fenced(tx, session_id, attempt)
            tx.execute(
                """UPDATE sessions SET state = ?, waiting = 0, lease_until = NULL, updated = ?, result = ?
                   WHERE id = ?""",
                (SessionState.DONE.value, self._clock(), packed, session_id),
            )
            data = {
                "attempt": attempt,
                "stop_reason": result.stop_reason.value,
                "reward": None if result.verdict is None else result.verdict.reward,
                "error": None if result.error is None else result.error.code,
            }
            self._event(tx, EventKind.SESSION_DONE, session.group_id, session_id, data)
            count_outcome(tx, session.group_id, result)
            return self._close_group(tx, session.group_id)

        return await self._db.write(body)

    async def cancel_group(self, group_id: str) -> list[SessionRow]:
        def body(tx: Connection) -> list[SessionRow]:
            group = find_group(tx, group_id)
            if group.state is GroupState.ACTIVE and not group.cancelled:
                tx.execute("UPDATE groups SET cancelled = 1 WHERE id = ?", (group_id,))
                tx.execute("UPDATE sessions SET waiting = 0 WHERE group_id = ?", (group_id,))
                self._event(tx, EventKind.GROUP_CANCELLED, group_id, None, {})
            return find_sessions(tx, "group_id = ? AND state <> 'done' ORDER BY sample_index", group_id)

        return await self._db.write(body)

    async def recover(self, *, now: float) -> list[SessionRow]:
        """As the protocol says; the sessions as they are afterwards, also those of cancelled groups."""

        def body(tx: Connection) -> list[SessionRow]:
            lost = find_sessions(tx, "lease_until < ? ORDER BY lease_until, id", now)
            for session in lost:
                error = ErrorRecord(
                    boundary=Boundary.SERVICE,
                    code="lease_expired",
                    message=f"node {session.node} stopped renewing its lease during attempt {session.attempt}",
                    hint="the node or the whole service died: its log says why",
                    retryable=True,
                )
                self._requeue(tx, session, error, recovered=1)
            return [find_session(tx, session.id) for session in lost]

        return await self._db.write(body)

    async def results(self, *, after: int, limit: int) -> list[GroupRow]:
        sql = f"SELECT {rows.GROUP_COLUMNS} FROM groups WHERE cursor > ? ORDER BY cursor LIMIT ?"
        found = await self._db.read(lambda tx: tx.fetch(sql, (after, limit)))
        return [rows.group_from(row) for row in found]

    async def events(self, *, after: int, limit: int) -> list[Event]:
        sql = f"SELECT {rows.EVENT_COLUMNS} FROM events WHERE cursor > ? ORDER BY cursor LIMIT ?"
        found = await self._db.read(lambda tx: tx.fetch(sql, (after, limit)))
        return [rows.event_from(row) for row in found]

    async def deliveries(self, *, now: float, limit: int) -> list[Delivery]:
        sql = f"SELECT {rows.DELIVERY_COLUMNS} FROM outbox WHERE next_try <= ? ORDER BY next_try, group_id LIMIT ?"
        found = await self._db.read(lambda tx: tx.fetch(sql, (now, limit)))
        return [rows.delivery_from(row) for row in found]

    async def delivered(self, group_id: str) -> None:
        await self._outbox("DELETE FROM outbox WHERE group_id = ?", group_id)

    async def delivery_failed(self, group_id: str, *, next_try: float) -> None:
        await self._outbox("UPDATE outbox SET tries = tries + 1, next_try = ? WHERE group_id = ?", next_try, group_id)

    async def _outbox(self, sql: str, *values: Any) -> None:
        """Run a change of one outbox row, whose group id is the last value."""

        def body(tx: Connection) -> None:
            if not tx.execute(sql, values):
                raise NotFound(f"group {values[-1]!r} has no delivery to make")

        await self._db.write(body)

    def _requeue(
        self, tx: Connection, session: SessionRow, error: ErrorRecord, *, due: float = 0.0, recovered: int = 0
    ) -> None:
        tx.execute(
            """UPDATE sessions SET state = ?, lease_until = NULL, updated = ?, last_error = ?, due = ?,
                   recovered = recovered + ?,
                   waiting = (SELECT 1 - cancelled FROM groups WHERE groups.id = sessions.group_id)
               WHERE id = ?""",
            (SessionState.QUEUED.value, self._clock(), rows.pack(error), due, recovered, session.id),
        )
        data = {"attempt": session.attempt, "error": error}
        self._event(tx, EventKind.SESSION_RETRY, session.group_id, session.id, data)

    def _close_group(self, tx: Connection, group_id: str) -> bool:
        """Finish the group if none of its sessions is open; whether it was so."""
        now = self._clock()
        # Two transactions that take the same cursor cannot both commit: the column is unique.
        closed = tx.execute(
            """UPDATE groups SET state = ?, finished = ?, cursor = (SELECT COALESCE(MAX(cursor), 0) + 1 FROM groups)
               WHERE id = ? AND open_sessions = 0""",
            (GroupState.DONE.value, now, group_id),
        )
        if not closed:
            return False
        group = find_group(tx, group_id)
        data = {"cursor": group.cursor, "cancelled": group.cancelled}
        self._event(tx, EventKind.GROUP_DONE, group_id, None, data)
        if group.callback_url is not None:
            tx.execute(
                "INSERT INTO outbox (group_id, url, tries, next_try) VALUES (?, ?, 0, ?)",
                (group_id, group.callback_url, now),
            )
        return True

    def _event(
        self, tx: Connection, kind: EventKind, group_id: str, session_id: str | None, data: Mapping[str, Any]
    ) -> None:
        tx.execute(
            "INSERT INTO events (at, kind, group_id, session_id, data) VALUES (?, ?, ?, ?, ?)",
            (self._clock(), kind.value, group_id, session_id, rows.pack_data(data)),
        )
