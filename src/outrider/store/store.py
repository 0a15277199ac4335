"""Stores the durable state of a service: groups, sessions, attempts, turns, results and events.

All SQL and all transactions of Outrider are in this folder. Each public method makes its changes in one transaction.
The caller decides which sessions to start, retry or cancel.

Invariants: only the newest attempt of a session can write, and only while it is in progress (but parts of timelines may
arrive later). A session's result is stored in the same transaction as the changes that follow from it: the group's
state, cursor, event and outbox row.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import suppress
from hmac import compare_digest
from math import inf
from typing import Any, NamedTuple, Self

import msgspec

from outrider.concurrency.events import Feed
from outrider.counts import Distribution
from outrider.errors import Boundary, Conflict, ErrorRecord, NotFound, QuotaExceeded, UnreadableTask
from outrider.lifecycle import MOVES, GroupState, SessionState, StopReason
from outrider.messages import Image
from outrider.redaction import KEY_PREFIX
from outrider.schemas import EventView
from outrider.store import queue, rows
from outrider.store.consumers import Consumers
from outrider.store.database import Connection, Database, Row
from outrider.store.images import find_image, insert_images, restore, split
from outrider.store.migrations import MIGRATIONS, Migrations, migrate
from outrider.store.pauses import Pauses, group_is_held, is_held
from outrider.store.removals import REMOVED, Removals
from outrider.store.rows import (
    Backlog,
    Delivery,
    EventKind,
    GroupRow,
    PackedResult,
    PolicyRow,
    QueueLength,
    SessionRow,
    StoredTurns,
    TokenRow,
)
from outrider.store.run_reader import RunReader
from outrider.store.task_key import DIGEST_LENGTH, KeySource, TaskKey, receiver_of_sealed
from outrider.store.tenants import newest_event, note_done, of_tenant, session_of_tenant, total
from outrider.store.training_timings import TrainingTimings
from outrider.timeline import TimelinePart
from outrider.trajectory import SessionResult, Turn, without_gaps

GROUPS_LISTED = "`outrider status` lists the newest groups, and `outrider show SESSION` shows a session"
SESSIONS_LISTED = (
    "a session's id ends with its number, as in s-0019a4e2b6c1f3d2-0; `outrider status GROUP` lists those of a group"
)
"""Hints for NotFound errors."""
EXTERNAL_KEY = f"{KEY_PREFIX}x_"
"""Prefix of the credentials of sessions whose agents run outside Outrider."""
MOST_PACES = 1000
"""Maximum number of engines whose usual call durations are stored. Without a limit, records of old engines would
accumulate."""
MOST_REFUSED = 10_000
"""Maximum number of refused idempotency keys of one tenant (see `Store.refuse_key`)."""
MOST_VALUES = 500
"""Maximum number of values in one SQL statement. Databases limit this number."""
MOVES_WITH_A_METHOD = frozenset({SessionState.QUEUED, SessionState.INITIALIZING, SessionState.DONE})
"""The states that `set_state` refuses. Only `requeue`, `recover`, `start_attempt` and `finish` set these states."""

# A model call waits for this write, so one statement both checks that the attempt is in progress and inserts the turn.
# `lease_until` is set exactly while an attempt is in progress. If no row was inserted, a second statement finds out the
# reason.
ADD_TURN = """INSERT INTO turns (session_id, attempt, turn_index, turn)
    SELECT id, attempt, ?, ? FROM sessions WHERE id = ? AND attempt = ? AND lease_until IS NOT NULL
    ON CONFLICT DO NOTHING"""
ADD_FROZEN_TURN = """INSERT INTO frozen_turns (session_id, attempt, model, turn_index, turn)
    SELECT id, attempt, ?, ?, ? FROM sessions WHERE id = ? AND attempt = ? AND lease_until IS NOT NULL
    ON CONFLICT DO NOTHING"""
ADD_TIMELINE = """INSERT INTO timelines (session_id, attempt, part, entries)
    SELECT id, ?, ?, ? FROM sessions WHERE id = ? AND state <> ? AND attempt >= ? ON CONFLICT DO NOTHING"""
TIMELINE = "SELECT part, entries FROM timelines WHERE session_id = ? AND attempt = ? ORDER BY part"
TURN_TABLES = ("turns", "frozen_turns")
TURNS = "SELECT turn FROM turns WHERE session_id = ? AND attempt = ? ORDER BY turn_index"
COUNT_TURNS = """SELECT (SELECT COUNT(*) FROM turns WHERE session_id = ? AND attempt = ?)
    + (SELECT COUNT(*) FROM frozen_turns WHERE session_id = ? AND attempt = ?)"""
ADOPT = (
    """INSERT INTO turns (session_id, attempt, turn_index, turn)
        SELECT sessions.id, sessions.attempt, turn_index, turn FROM sessions, turns
        WHERE sessions.id = ? AND turns.session_id = ? AND turns.attempt = ? ON CONFLICT DO NOTHING""",
    """INSERT INTO frozen_turns (session_id, attempt, model, turn_index, turn)
        SELECT sessions.id, sessions.attempt, model, turn_index, turn FROM sessions, frozen_turns
        WHERE sessions.id = ? AND frozen_turns.session_id = ? AND frozen_turns.attempt = ? ON CONFLICT DO NOTHING""",
    """INSERT INTO image_uses (session_id, digest, tenant) SELECT sessions.id, digest, groups.tenant
        FROM image_uses, sessions JOIN groups ON groups.id = sessions.group_id
        WHERE sessions.id = ? AND image_uses.session_id = ? ON CONFLICT DO NOTHING""",
)
END_OTHERS = """UPDATE sessions SET ending = ?, waiting = 0, held = 0
    WHERE group_id = ? AND state <> 'done' AND ending IS NULL"""
REVIVE = """UPDATE outbox SET given_up = NULL, tries = 0, since = ?, next_try = ? WHERE given_up IS NOT NULL"""


class MoreTurns(Exception):
    """A turn was stored after the turns for the result in `Store.finish` were read. The caller must read the turns
    again."""


class AddedTurn(NamedTuple):
    """A turn that was just stored. `model` is the frozen model that sampled it, or None for the policy."""

    session_id: str
    attempt: int
    turn: Turn
    model: str | None


class Store:
    """Durable state in a database. `async with` opens and closes the store. Specs and callback URLs are encrypted.

    Every method raises ServiceError when the database fails, and NotFound for unknown ids. Methods that write for an
    `attempt` raise Conflict if the session is done or has a newer attempt.

    With a `tenant`, a method reads only this tenant's rows, and ids of other tenants' rows count as unknown. If
    `tenant` is None, the method reads all rows.

    A session that was cancelled, has expired or is not needed any more has `ending` set:
    - It leaves the queue at once: `queued` skips it, and `start_attempt` refuses it.
    - It becomes done when the caller passes the reason in `ending` to `finish`.
    - If `requeue` or `recover` ends the session's attempt before the call of `finish`, the session's state is QUEUED
      until that call.
    - `to_end` lists the sessions that the caller must still finish, for instance after a crash.
    """

    def __init__(
        self,
        database: Database,
        *,
        key: KeySource | None = None,
        clock: Callable[[], float] = time.time,
        migrations: Migrations = MIGRATIONS,
    ) -> None:
        """`key` loads the stored key that encrypts tasks, or makes and stores a new one. If `key` is None, the store
        uses a new key that is not stored, so nobody can decrypt the tasks after the store is closed."""
        self._db = database
        self._key_source = key or TaskKey.new()
        self._clock = clock
        self._migrations = migrations
        self.consumers = Consumers(database, clock)
        self.removals = Removals(database)
        self.training_timings = TrainingTimings(database, clock)
        self.pauses = Pauses(database, clock)
        self.runs = RunReader(database)
        self.turns_added = Feed[AddedTurn]()
        """Publishes each turn of a model call when the turn is stored."""

    async def __aenter__(self) -> Self:
        """Open the database, and apply missing migrations of the schema. Raises ServiceError."""
        await self._db.open()
        try:
            await self._db.write(lambda tx: migrate(tx, self._db.types, self._clock(), self._migrations))
            key = await asyncio.to_thread(self._key_source.load)
            if key is None:
                # If the key is lost, do not make a new key, because a new key could not decrypt the tasks in the queue.
                any_group = "SELECT 1 FROM groups WHERE state <> ? LIMIT 1"
                if await self._db.read(lambda tx: tx.fetch(any_group, (REMOVED,))):
                    raise self._key_source.missing()
                key = await asyncio.to_thread(self._key_source.make)
            self._key = key
        except BaseException:  # the threads of the database must end after a cancellation, too
            await self._db.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._db.close()

    async def probe(self) -> None:
        """Update a row to check that the database accepts writes. Raises ServiceError, possibly after retries, if the
        database does not accept them."""
        now = self._clock()
        await self._db.write(lambda tx: tx.execute("UPDATE probe SET at = ?", (now,)), volatile=True)

    def _group(self, row: Row) -> GroupRow:
        """Build a group from a row with GROUP_COLUMNS. If the callback URL was encrypted with another key,
        `callback_url` is None."""
        group = rows.row_from(GroupRow, row)
        url = None if group.callback_url is None else self._opened_url(group.callback_url, group.id)
        return msgspec.structs.replace(group, callback_url=url)

    def _delivery(self, row: Row) -> Delivery:
        delivery = rows.row_from(Delivery, row)
        return msgspec.structs.replace(delivery, url=self._opened_url(delivery.url, delivery.group_id) or "")

    def _opened_url(self, sealed: str, group_id: str) -> str | None:
        try:
            return self._key.open_url(sealed, _url_of(group_id))
        except UnreadableTask:
            return None

    async def create_group(
        self,
        group: GroupRow,
        spec: bytes,
        session_ids: Sequence[str],
        *,
        expires: float | None = None,
        quota: int | None = None,
        external: bool = False,
    ) -> GroupRow:
        """Store a group, its queued sessions and the event of its creation.

        spec: JSON of a GroupSpec.
        expires: the method `expire` sets `ending` of each session that has not started by this time.
        quota: maximum number of sessions that the submitter may have queued or running.
        external: True if the group's agents run outside Outrider.

        The stored group is active and not cancelled, whatever `group` says. If the tenant has already used this
        idempotency key for a group with exactly this spec, that group is returned.

        Raises QuotaExceeded. Raises Conflict if the key was used with another spec, if the key is refused
        (`refuse_key`), or if an id is already in use.
        """
        if not session_ids or len(session_ids) != group.n:
            raise ValueError(f"group {group.id} of {group.n} sessions came with {len(session_ids)} session ids")

        key = None if group.idempotency_key is None else rows.stored_key(group.tenant, group.idempotency_key)
        sealed = self._key.seal(spec, _spec_of(group.id))
        sealed_url = None
        if (url := group.callback_url) is not None:
            sealed_url = self._key.seal_url(url, rows.receiver_of(url), _url_of(group.id))

        async def body(tx: Connection) -> GroupRow:
            if key is not None:
                sql = f"SELECT {rows.GROUP_COLUMNS} FROM groups WHERE idempotency_key = ?"
                for row in await tx.fetch(sql, (key,)):
                    known = self._group(row)
                    if self._key.open(await _find_spec(tx, known.id), _spec_of(known.id)) != spec:
                        raise Conflict(
                            f"idempotency key {group.idempotency_key!r} was used for another request, group {known.id}",
                            hint="use a new key for a new request",
                            field="idempotency_key",
                        )
                    return known
                refused = "SELECT 1 FROM refused_keys WHERE idempotency_key = ? AND until > ?"
                if await tx.fetch(refused, (key, self._clock())):
                    raise Conflict(
                        f"the group with the idempotency key {group.idempotency_key!r} was cancelled before it was"
                        " submitted",
                        hint="submit it under another key",
                        field="idempotency_key",
                    )
            if quota is not None:
                sql = "SELECT COALESCE(SUM(open_sessions), 0) FROM groups WHERE submitted_by = ? AND open_sessions > 0"
                taken: int = (await tx.fetch(sql, (group.submitted_by,)))[0][0]
                if taken + group.n > quota:
                    raise QuotaExceeded(
                        f"token {group.submitted_by!r} has {taken} sessions queued or running, and may have {quota}:"
                        f" {group.n} more do not fit",
                        hint="submit again when some of them are done",
                    )
            inserted = await tx.execute(
                """INSERT INTO groups (id, spec, labels, n, priority, idempotency_key, callback_url, state, cancelled,
                       open_sessions, created, min_usable, bytes, submitted_by, tenant, harness, translator,
                       usable_trains, traceparent)
                   VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING""",
                (
                    group.id,
                    sealed,
                    rows.pack_data(group.labels),
                    group.n,
                    group.priority,
                    key,
                    sealed_url,
                    GroupState.ACTIVE.value,
                    group.n,
                    group.created,
                    group.min_usable,
                    len(spec),
                    group.submitted_by,
                    group.tenant,
                    group.harness,
                    group.translator,
                    int(group.usable_trains),
                    group.traceparent,
                ),
            )
            if not inserted:
                raise Conflict(f"there already is a group {group.id!r}")
            bucket = queue.bucket_of(group.tenant, group.labels, external=external)
            held = await is_held(tx, group.tenant, group.labels, group.harness)
            until = expires - group.created if held and expires is not None else expires
            common = (group.priority, group.created, group.created, bucket, until, int(not held), int(held))
            inserted = await tx.execute_many(
                """INSERT INTO sessions (id, group_id, sample_index, state, attempt, priority, created, updated, bucket,
                       expires, waiting, held) VALUES (?, ?, ?, ?, 0, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING""",
                [(id, group.id, index, SessionState.QUEUED.value, *common) for index, id in enumerate(session_ids)],
            )
            if inserted != group.n:
                raise Conflict(f"some session ids of group {group.id!r} are already in use")
            kind = queue.kind_of(group.labels, external=external)
            await queue.open_share(tx, group.priority, bucket, kind=kind, since=group.created)
            data = {"n": group.n, "priority": group.priority}
            await self._add_event(tx, EventKind.GROUP_CREATED, group.id, None, data)
            return await self._find_group(tx, group.id)

        return await self._db.write(body)

    async def group(self, group_id: str, *, tenant: str | None = None) -> GroupRow:
        return await self._db.read(lambda tx: self._find_group(tx, group_id, tenant))

    async def spec(self, group_id: str) -> bytes:
        """Return the JSON of the group's GroupSpec. Raises UnreadableTask if the spec was encrypted with another
        key."""
        return self._key.open(await self._db.read(lambda tx: _find_spec(tx, group_id)), _spec_of(group_id))

    async def groups(
        self, *, state: GroupState | None = None, limit: int = 100, tenant: str | None = None
    ) -> list[GroupRow]:
        """List up to `limit` groups, newest first."""
        where, value = ("state <> ?", REMOVED) if state is None else ("state = ?", state.value)
        own = of_tenant(tenant)
        sql = f"SELECT {rows.GROUP_COLUMNS} FROM groups WHERE {where}{own.sql} ORDER BY created DESC, id DESC LIMIT ?"
        found = await self._db.read(lambda tx: tx.fetch(sql, (value, *own.values, limit)))
        return [self._group(row) for row in found]

    async def groups_before(
        self,
        before: str | None,
        *,
        limit: int,
        harness: str | None = None,
        since: float = 0.0,
        tenant: str | None = None,
    ) -> list[GroupRow]:
        """List up to `limit` groups, newest first.

        before: only groups that are older than the group with this id. Raises NotFound for an unknown id.
        harness: only groups that use this harness.
        since: only groups created at this time or later.
        """

        async def body(tx: Connection) -> list[Row]:
            own = of_tenant(tenant)
            sql = f"SELECT {rows.GROUP_COLUMNS} FROM groups WHERE state <> ? AND created >= ?{own.sql}"
            values: list[Any] = [REMOVED, since, *own.values]
            if before is not None:
                sql += " AND (created, id) < (?, ?)"
                values += [(await self._find_group(tx, before, tenant)).created, before]
            if harness is not None:
                sql += " AND harness = ?"
                values.append(harness)
            return await tx.fetch(f"{sql} ORDER BY created DESC, id DESC LIMIT ?", (*values, limit))

        return [self._group(row) for row in await self._db.read(body)]

    async def to_end(self, group_id: str | None = None) -> list[SessionRow]:
        """List the sessions that have `ending` set but are not done, in sample order. `group_id` limits the list to one
        group."""
        where, values = ("", ()) if group_id is None else ("AND group_id = ?", (group_id,))
        where = f"ending IS NOT NULL AND state <> 'done' {where} ORDER BY group_id, sample_index"
        return await self._db.read(lambda tx: _find_sessions(tx, where, *values))

    async def session(self, session_id: str, *, tenant: str | None = None) -> SessionRow:
        return await self._db.read(lambda tx: _find_session(tx, session_id, tenant))

    async def sessions(self, group_id: str) -> list[SessionRow]:
        """List the group's sessions in sample order."""
        found = await self._db.read(lambda tx: _find_sessions(tx, "group_id = ? ORDER BY sample_index", group_id))
        if not found:
            raise NotFound(f"no group {group_id!r}", hint=GROUPS_LISTED)
        return found

    async def queued(
        self,
        limit: int,
        *,
        now: float = inf,
        latest: float = inf,
        under_way: Mapping[str, int] = {},
        skip: Collection[str] = (),
        kind: queue.QueueKind | None = None,
    ) -> list[SessionRow]:
        """Return the next queued sessions that are due, in the order of the queue (`queue.py`). The arguments are
        explained at `queue.QueuePass`."""

        async def body(tx: Connection) -> queue.Picked:
            reading = queue.QueuePass(tx, now=now, latest=latest, under_way=under_way, skip=skip, kind=kind)
            return await reading.pick(limit)

        picked = await self._db.read(body)
        if picked.empty:
            await self._db.write(lambda tx: queue.close_empty_shares(tx, picked.empty), volatile=True)
        return picked.sessions

    async def expire(self, *, now: float) -> bool:
        """Set `ending` to EXPIRED for waiting sessions that have not started in time. Sessions that a pause holds do
        not expire. Returns True if a session was changed."""
        sql = "UPDATE sessions SET ending = ?, waiting = 0 WHERE waiting = 1 AND expires IS NOT NULL AND expires <= ?"
        return bool(await self._db.write(lambda tx: tx.execute(sql, (StopReason.EXPIRED.value, now))))

    async def next_due(self, *, after: float) -> float | None:
        """Return the next time, later than `after`, at which a waiting session becomes due or expires, or None."""

        async def body(tx: Connection) -> float | None:
            due = await tx.fetch("SELECT MIN(due) FROM sessions WHERE waiting = 1 AND due > 0 AND due > ?", (after,))
            sql = "SELECT MIN(expires) FROM sessions WHERE waiting = 1 AND expires IS NOT NULL AND expires > ?"
            times = [found for ((found,),) in (due, await tx.fetch(sql, (after,))) if found is not None]
            return min(times, default=None)

        return await self._db.read(body)

    async def queue_length(self) -> QueueLength:
        """Count the sessions that wait or are held by a pause, and the buckets and tenants with waiting sessions. Reads
        the whole queue."""

        async def body(tx: Connection) -> QueueLength:
            sessions = await tx.fetch(
                """SELECT (SELECT COUNT(*) FROM sessions WHERE waiting = 1)
                    + (SELECT COUNT(*) FROM sessions WHERE held = 1)"""
            )
            sql = "SELECT COUNT(DISTINCT bucket), COUNT(DISTINCT tenant) FROM queue_shares WHERE waiting = 1"
            ((buckets, tenants),) = await tx.fetch(sql)
            return QueueLength(sessions[0][0], buckets, tenants)

        return await self._db.read(body)

    async def backlog(self) -> Backlog:
        """Return measures of the queue, the callbacks and the stored bytes. Reads the indexes of the whole queue and
        the outbox."""

        async def body(tx: Connection) -> Backlog:
            ((oldest,),) = await tx.fetch("SELECT MIN(created) FROM sessions WHERE waiting = 1")
            ((pending,),) = await tx.fetch("SELECT COUNT(*) FROM outbox WHERE given_up IS NULL")
            ((given_up,),) = await tx.fetch("SELECT COUNT(*) FROM outbox WHERE given_up IS NOT NULL")
            ((stored,),) = await tx.fetch("SELECT bytes FROM totals")
            return Backlog(oldest, pending, given_up, stored)

        return await self._db.read(body)

    def commit_seconds(self) -> Distribution:
        """Return a histogram of how long committed writes took since the start. Its buckets are `SECONDS`."""
        return self._db.commits.read()

    async def waiting(self, tenant: str, labels: Mapping[str, str] | None = None, *, most: int) -> int:
        """Count the tenant's waiting sessions, up to `most`. With `labels`, count only the sessions in the bucket to
        which groups with these labels belong."""
        column, value = ("tenant", tenant) if labels is None else ("bucket", queue.bucket_of(tenant, labels))
        sql = queue.COUNT_WAITING.format(column=column)
        found: int = (await self._db.read(lambda tx: tx.fetch(sql, (value, most))))[0][0]
        return found

    async def has_key(self, tenant: str, idempotency_key: str) -> bool:
        """Return True if the tenant has a group with this idempotency key."""
        sql = "SELECT 1 FROM groups WHERE idempotency_key = ?"
        return bool(await self._db.read(lambda tx: tx.fetch(sql, (rows.stored_key(tenant, idempotency_key),))))

    async def keyed_group(self, tenant: str, idempotency_key: str) -> GroupRow | None:
        """Return the tenant's group with this idempotency key, or None."""
        sql = f"SELECT {rows.GROUP_COLUMNS} FROM groups WHERE idempotency_key = ?"
        found = await self._db.read(lambda tx: tx.fetch(sql, (rows.stored_key(tenant, idempotency_key),)))
        return self._group(found[0]) if found else None

    async def add_label(self, group_id: str, name: str, value: str) -> None:
        """Set a label of a stored group. The group's position in the queue does not change."""

        async def body(tx: Connection) -> None:
            group = await self._find_group(tx, group_id)
            labels = rows.pack_data(group.labels | {name: value})
            await tx.execute("UPDATE groups SET labels = ? WHERE id = ?", (labels, group_id))

        await self._db.write(body)

    async def states_of(self, group_ids: Sequence[str]) -> dict[SessionState, int]:
        """Count the sessions of several groups by state, in one transaction. Unknown groups are ignored."""

        async def body(tx: Connection) -> Counter[SessionState]:
            counted: Counter[SessionState] = Counter()
            for start in range(0, len(group_ids), MOST_VALUES):
                some = group_ids[start : start + MOST_VALUES]
                marks = ", ".join("?" * len(some))
                sql = f"SELECT state, COUNT(*) FROM sessions WHERE state <> ? AND group_id IN ({marks}) GROUP BY state"
                for state, count in await tx.fetch(sql, (REMOVED, *some)):
                    counted[SessionState(state)] += count
            return counted

        return await self._db.read(body)

    async def translated_groups(
        self, tenant: str, translator: str, *, since: float = -inf, before: tuple[float, str] | None = None, limit: int
    ) -> list[GroupRow]:
        """List up to `limit` groups that the tenant submitted through the API of another rollout system, `translator`.
        The newest group comes first.

        since: earliest creation time.
        before: creation time and id of the last group on the previous page."""
        page, values = ("", ()) if before is None else (" AND (created, id) < (?, ?)", before)
        sql = f"""SELECT {rows.GROUP_COLUMNS} FROM groups
            WHERE tenant = ? AND state <> ? AND translator = ? AND created >= ?{page}
            ORDER BY created DESC, id DESC LIMIT ?"""
        wanted = (tenant, REMOVED, translator, since, *values, limit)
        return [self._group(row) for row in await self._db.read(lambda tx: tx.fetch(sql, wanted))]

    async def refuse_key(self, tenant: str, idempotency_key: str, *, until: float) -> GroupRow | None:
        """Refuse new groups of the tenant with this idempotency key until the time `until`. If the tenant already has
        such a group, change nothing and return the group. Raises QuotaExceeded if MOST_REFUSED keys of the tenant are
        already refused."""
        key = rows.stored_key(tenant, idempotency_key)

        async def body(tx: Connection) -> GroupRow | None:
            sql = f"SELECT {rows.GROUP_COLUMNS} FROM groups WHERE idempotency_key = ?"
            if found := await tx.fetch(sql, (key,)):
                return self._group(found[0])
            await tx.execute("DELETE FROM refused_keys WHERE until <= ? OR idempotency_key = ?", (self._clock(), key))
            ((count,),) = await tx.fetch("SELECT COUNT(*) FROM refused_keys WHERE tenant = ?", (tenant,))
            if count >= MOST_REFUSED:
                raise QuotaExceeded(
                    f"{count} groups were cancelled before they were submitted: one more is not accepted now",
                    hint="cancel groups that were submitted, or cancel this one later",
                )
            await tx.execute("INSERT INTO refused_keys VALUES (?, ?, ?)", (key, tenant, until))
            return None

        return await self._db.write(body)

    async def is_refused(self, tenant: str, idempotency_key: str) -> bool:
        """Return True if new groups of the tenant with this idempotency key are currently refused."""
        sql = "SELECT 1 FROM refused_keys WHERE idempotency_key = ? AND until > ?"
        wanted = (rows.stored_key(tenant, idempotency_key), self._clock())
        return bool(await self._db.read(lambda tx: tx.fetch(sql, wanted)))

    async def drained_nodes(self) -> set[str]:
        """Return the names of the nodes that get no new sessions."""
        return {row[0] for row in await self._db.read(lambda tx: tx.fetch("SELECT name FROM drained_nodes"))}

    async def set_drained(self, node: str, drained: bool) -> None:
        sql = "INSERT INTO drained_nodes (name) VALUES (?) ON CONFLICT DO NOTHING"
        if not drained:
            sql = "DELETE FROM drained_nodes WHERE name = ?"
        await self._db.write(lambda tx: tx.execute(sql, (node,)))

    async def counts(self, *, tenant: str | None = None) -> dict[SessionState, int]:
        """Count sessions by state: the tenant's, or all if `tenant` is None."""
        live = [state.value for state in SessionState if state is not SessionState.DONE]
        sql = f"SELECT state, COUNT(*) FROM sessions WHERE state IN ({', '.join('?' * len(live))}) GROUP BY state"
        own = of_tenant(tenant)
        if tenant is not None:
            # Start from the tenant's active groups: all sessions that are not done belong to them. Do not compare with
            # a list of states instead of `<> 'done'`: the database would then use the index by state, which covers all
            # tenants' sessions.
            sql = f"""SELECT sessions.state, COUNT(*) FROM groups JOIN sessions ON sessions.group_id = groups.id
                WHERE groups.state = 'active' AND sessions.state <> 'done'{own.sql} GROUP BY sessions.state"""
            live = []

        async def body(tx: Connection) -> dict[str, int]:
            found: dict[str, int] = dict(await tx.fetch(sql, (*live, *own.values)))
            kept = await total(tx, "sessions", tenant)
            ((ended,),) = await tx.fetch(
                f"SELECT COALESCE(SUM(n - open_sessions), 0) FROM groups WHERE state = 'active'{own.sql}", own.values
            )
            return found | {SessionState.DONE.value: kept + ended}

        found = await self._db.read(body)
        return {state: found.get(state, 0) for state in SessionState}

    async def start_attempt(
        self,
        session_id: str,
        *,
        node: str,
        lease_until: float,
        policy_version: int | None = 0,
        continues_turns: bool = False,
    ) -> int:
        """Start a new attempt: move a queued session to INITIALIZING, with a lease. Returns the attempt's number.

        policy_version: stored as the version at which the group began, unless the group already has one. None if the
            attempt does not use the policy.
        continues_turns: move the turns of earlier attempts to this attempt.

        Raises Conflict if the session is not queued, has `ending` set, or is held by a pause."""

        async def body(tx: Connection) -> int:
            session = await _find_session(tx, session_id)
            if session.state is not SessionState.QUEUED:
                raise Conflict(f"session {session_id} is {session.state}, not queued")
            if session.ending is not None:
                raise Conflict(f"session {session_id} is to end: {session.ending}")
            if await tx.fetch("SELECT 1 FROM sessions WHERE id = ? AND held = 1", (session_id,)):
                raise Conflict(f"session {session_id} is held by a pause of the queue")
            attempt = session.attempt + 1
            await tx.execute(
                """UPDATE sessions SET state = ?, waiting = 0, due = 0, expires = NULL, attempt = ?, node = ?,
                       lease_until = ?, updated = ? WHERE id = ?""",
                (SessionState.INITIALIZING.value, attempt, node, lease_until, self._clock(), session_id),
            )
            if continues_turns:
                await _continue_turns(tx, session_id, attempt)
            await queue.note_served(tx, session.priority, session.bucket)
            await tx.execute(
                "UPDATE groups SET began_version = ? WHERE id = ? AND began_version IS NULL",
                (policy_version, session.group_id),
            )
            data = {"state": SessionState.INITIALIZING.value, "attempt": attempt, "node": node}
            await self._add_event(tx, EventKind.SESSION_STATE, session.group_id, session_id, data)
            return attempt

        return await self._db.write(body)

    async def adopt_turns(self, session_id: str, attempt: int, of: str) -> SessionRow:
        """Copy the turns of another session, `of`, to an attempt in progress. Returns the session `of`. A second call
        with the same arguments changes nothing. Raises Conflict if `of` is not done."""

        async def body(tx: Connection) -> SessionRow:
            await _under_way(tx, session_id, attempt)
            other = await _find_session(tx, of)
            if other.state is not SessionState.DONE:
                raise Conflict(f"session {of} is {other.state}, not done")
            values = (session_id, other.id, other.attempt)
            for sql in ADOPT:
                await tx.execute(sql, values[: sql.count("?")])
            return other

        return await self._db.write(body)

    async def drop_earlier_turns(self, session_id: str, attempt: int) -> None:
        """Delete the turns, the report and the failed calls of earlier attempts, because the agent of this attempt
        starts from the beginning."""

        async def body(tx: Connection) -> None:
            await _under_way(tx, session_id, attempt)
            for table in TURN_TABLES:
                await tx.execute(f"DELETE FROM {table} WHERE session_id = ? AND attempt < ?", (session_id, attempt))
            for table in ("session_reports", "failed_calls"):
                await tx.execute(f"DELETE FROM {table} WHERE session_id = ?", (session_id,))

        await self._db.write(body)

    async def drop_turns(self, session_id: str, attempt: int) -> None:
        """Delete the turns and failed calls of an attempt in progress, because its agent starts over. Raises Conflict
        if a report has already completed the session."""

        async def body(tx: Connection) -> None:
            session = await _under_way(tx, session_id, attempt)
            if await tx.fetch("SELECT 1 FROM session_reports WHERE session_id = ?", (session_id,)):
                raise Conflict(f"session {session_id} was completed")
            dropped = sum(
                [
                    await tx.execute(f"DELETE FROM {table} WHERE session_id = ? AND attempt = ?", (session_id, attempt))
                    for table in TURN_TABLES
                ]
            )
            await tx.execute("DELETE FROM failed_calls WHERE session_id = ?", (session_id,))
            data = {"attempt": attempt, "turns": dropped}
            await self._add_event(tx, EventKind.SESSION_RESET, session.group_id, session_id, data)

        await self._db.write(body)

    async def keep_failed_calls(self, session_id: str, attempt: int, calls: bytes, *, model: str | None = None) -> None:
        """Store one model's failed calls that no later call has replaced (see `FailedCalls`). `calls` is a JSON array
        of `FailedCall`, and replaces the stored array for this session and model. `model` is None for the policy.
        Raises Conflict if the attempt has ended."""
        sql = """INSERT INTO failed_calls (session_id, model, calls) VALUES (?, ?, ?)
            ON CONFLICT (session_id, model) DO UPDATE SET calls = excluded.calls"""

        async def body(tx: Connection) -> None:
            await _under_way(tx, session_id, attempt)
            await tx.execute(sql, (session_id, model or "", calls))

        await self._db.write(body)

    async def failed_calls(self, session_id: str) -> dict[str | None, bytes]:
        """Return the failed calls that `keep_failed_calls` has stored for the session, by model (None for the
        policy)."""
        sql = "SELECT model, calls FROM failed_calls WHERE session_id = ?"
        found = await self._db.read(lambda tx: tx.fetch(sql, (session_id,)))
        return {model or None: bytes(calls) for model, calls in found}

    async def keep_remote_run(self, session_id: str, attempt: int, name: str, run: str) -> None:
        """Store the id of the session's run at an external agent service. `name` is the run's name in Outrider, and
        `run` is the id that the service chose. The name and the id replace those of an earlier run. Raises Conflict if
        the attempt has ended."""
        sql = """INSERT INTO remote_runs (session_id, name, run) VALUES (?, ?, ?)
            ON CONFLICT (session_id) DO UPDATE SET name = excluded.name, run = excluded.run"""

        async def body(tx: Connection) -> None:
            await _under_way(tx, session_id, attempt)
            await tx.execute(sql, (session_id, name, run))

        await self._db.write(body)

    async def remote_run(self, session_id: str, name: str) -> str | None:
        """Return the id that `keep_remote_run` has stored for the session's run `name`, or None."""
        sql = "SELECT run FROM remote_runs WHERE session_id = ? AND name = ?"
        found = await self._db.read(lambda tx: tx.fetch(sql, (session_id, name)))
        return str(found[0][0]) if found else None

    async def add_report(self, session_id: str, report: bytes, *, tenant: str | None = None) -> None:
        """Store the report (JSON) with which a client completes a session. An equal report may be sent again. Raises
        Conflict if the session already has another report. Also raises Conflict if the session has no report but is
        over: it is done, or has `ending` set."""

        async def body(tx: Connection) -> None:
            session = await _find_session(tx, session_id, tenant)
            known = await tx.fetch("SELECT report FROM session_reports WHERE session_id = ?", (session_id,))
            if known:
                if msgspec.json.decode(bytes(known[0][0])) != msgspec.json.decode(report):
                    raise Conflict(
                        f"session {session_id} was completed with another report",
                        hint="a completion cannot be changed; grade the session again for another verdict",
                    )
                return
            if session.over:
                assert session.result is not None or session.ending is not None
                reason = session.ending if session.result is None else session.result.stop_reason
                raise Conflict(f"session {session_id} is over: {reason}", hint=f"see outrider show {session_id}")
            await tx.execute("INSERT INTO session_reports (session_id, report) VALUES (?, ?)", (session_id, report))

        await self._db.write(body)

    async def report(self, session_id: str) -> bytes | None:
        """Return the report that completed the session, or None."""
        sql = "SELECT report FROM session_reports WHERE session_id = ?"
        found = await self._db.read(lambda tx: tx.fetch(sql, (session_id,)))
        return bytes(found[0][0]) if found else None

    def digest_of(self, text: str) -> str:
        """Return a digest of a text: 16 hexadecimal digits. Without the store's key, nobody can guess a text and
        compare its digest."""
        return hashlib.sha256(self._key.keyed_digest(f"the text {text}").encode()).hexdigest()[:16]

    def credential_of(self, session_id: str) -> str:
        """Return the credential of a session whose agent runs outside Outrider. The credential is derived from the
        store's key. It is therefore not stored, but is still valid after a restart."""
        return f"{EXTERNAL_KEY}{session_id}_{self._key.keyed_digest(_key_of(session_id))}"

    def session_of_credential(self, credential: str) -> str | None:
        """Return the id of the session with this credential (see `credential_of`), or None."""
        if not credential.startswith(EXTERNAL_KEY):
            return None
        session_id = credential[len(EXTERNAL_KEY) : -DIGEST_LENGTH - 1]
        return session_id if compare_digest(self.credential_of(session_id).encode(), credential.encode()) else None

    async def began_before(self, version: int) -> list[str]:
        """Return the ids of groups that began at a lower policy version than `version` and are neither done nor
        cancelled, oldest first."""
        sql = "SELECT id FROM groups WHERE state = ? AND cancelled = 0 AND began_version < ? ORDER BY created, id"
        values = (GroupState.ACTIVE.value, version)
        return [row[0] for row in await self._db.read(lambda tx: tx.fetch(sql, values))]

    async def policy(self) -> PolicyRow | None:
        """Return the stored version and weights of the policy, or None if none were stored yet."""
        found = await self._db.read(lambda tx: tx.fetch("SELECT version, weights FROM policy"))
        return PolicyRow(*found[0]) if found else None

    async def keep_policy(self, version: int, weights: str | None) -> None:
        sql = """INSERT INTO policy (id, version, weights) VALUES (1, ?, ?)
                 ON CONFLICT (id) DO UPDATE SET version = excluded.version, weights = excluded.weights"""
        await self._db.write(lambda tx: tx.execute(sql, (version, weights)))

    async def position(self, reader: str) -> int | None:
        """Return the cursor that `keep_position` stored for `reader`, or None."""
        sql = "SELECT cursor FROM positions WHERE reader = ?"
        found = await self._db.read(lambda tx: tx.fetch(sql, (reader,)))
        return found[0][0] if found else None

    async def keep_position(self, reader: str, cursor: int) -> None:
        """Store the cursor up to which `reader`, a part of the service, has read the events."""
        sql = """INSERT INTO positions (reader, cursor) VALUES (?, ?)
                 ON CONFLICT (reader) DO UPDATE SET cursor = excluded.cursor"""
        await self._db.write(lambda tx: tx.execute(sql, (reader, cursor)), volatile=True)

    async def engine_paces(self) -> dict[str, str]:
        """Return the usual call durations of the engines as JSON (`RememberedPace`), by engine name."""
        return dict(await self._db.read(lambda tx: tx.fetch("SELECT engine, pace FROM engine_paces")))

    async def keep_engine_paces(self, paces: Mapping[str, str]) -> None:
        """Store how long these engines' calls usually take. Only the MOST_PACES newest records in the store are
        kept."""
        now = self._clock()
        sql = """INSERT INTO engine_paces (engine, pace, kept) VALUES (?, ?, ?)
                 ON CONFLICT (engine) DO UPDATE SET pace = excluded.pace, kept = excluded.kept"""

        async def body(tx: Connection) -> None:
            await tx.execute_many(sql, [(engine, pace, now) for engine, pace in paces.items()])
            newest = "SELECT engine FROM engine_paces ORDER BY kept DESC LIMIT ?"
            await tx.execute(f"DELETE FROM engine_paces WHERE engine NOT IN ({newest})", (MOST_PACES,))

        await self._db.write(body)

    async def set_state(self, session_id: str, attempt: int, state: SessionState) -> None:
        """Move a session to `state`. Raises Conflict if lifecycle.MOVES does not allow it, or if another method sets
        this state (MOVES_WITH_A_METHOD)."""

        async def body(tx: Connection) -> None:
            session = await _unfinished(tx, session_id, attempt)
            if state in MOVES_WITH_A_METHOD or state not in MOVES[session.state]:
                raise Conflict(f"session {session_id} cannot be moved from {session.state} to {state}")
            await tx.execute(
                "UPDATE sessions SET state = ?, updated = ? WHERE id = ?",
                (state.value, self._clock(), session_id),
            )
            data = {"state": state.value, "attempt": attempt}
            await self._add_event(tx, EventKind.SESSION_STATE, session.group_id, session_id, data)

        await self._db.write(body)

    async def renew_leases(self, attempts: Mapping[str, int], lease_until: float) -> None:
        """Set the time at which the leases of attempts in progress end. `attempts` maps session ids to attempt numbers.
        Attempts that have ended are skipped."""
        sql = "UPDATE sessions SET lease_until = ? WHERE id = ? AND attempt = ? AND lease_until IS NOT NULL"
        values = [(lease_until, id, attempt) for id, attempt in attempts.items()]
        await self._db.write(lambda tx: tx.execute_many(sql, values), volatile=True)

    async def add_turn(self, session_id: str, attempt: int, turn: Turn, *, model: str | None = None) -> None:
        """Store a turn of an attempt in progress. Raises Conflict if the attempt has ended, or already has a turn with
        this index.

        `model` is the frozen model that sampled the turn, or None for the policy. Each model's turns are numbered from
        0. The bytes of images are stored outside the turn, once for each digest.
        """
        taken = split(turn)
        packed = rows.pack(taken.turn)

        async def body(tx: Connection) -> None:
            row = (turn.index, packed, session_id, attempt)
            if not (
                await tx.execute(ADD_TURN, row) if model is None else await tx.execute(ADD_FROZEN_TURN, (model, *row))
            ):
                await _under_way(tx, session_id, attempt)
                raise Conflict(f"session {session_id} already has a turn {turn.index} in attempt {attempt}")
            await insert_images(tx, session_id, taken.images)

        # The write is volatile, because the agent waits for it. A loss of power that undoes the write also ends the
        # attempt. The session then starts again from its task. If the agent runs outside Outrider, it may continue, and
        # the session then lacks the turn. The write that stores the end of an attempt is not volatile, so it also makes
        # all turns of the attempt durable.
        await self._db.write(body, volatile=True)
        self.turns_added.publish(AddedTurn(session_id, attempt, turn, model))

    async def add_timeline(self, parts: Sequence[TimelinePart]) -> None:
        """Store parts of timelines. The parts are encrypted, because a task's commands may contain secrets. A part is
        skipped if it is already stored, if its session is unknown or removed, or if its attempt has not begun. Parts
        may arrive after the session is done."""
        sealed = [self._key.seal(part.entries, _part_of(part.session_id, part.attempt, part.part)) for part in parts]
        values = [
            (part.attempt, part.part, entries, part.session_id, REMOVED, part.attempt)
            for part, entries in zip(parts, sealed, strict=True)
        ]
        await self._db.write(lambda tx: tx.execute_many(ADD_TIMELINE, values), volatile=True)

    async def timeline(
        self, session_id: str, attempt: int | None = None, *, tenant: str | None = None
    ) -> tuple[int, list[bytes]]:
        """Return the number of an attempt (default: the newest) and the parts of its timeline in order. Each part is a
        list of `Entry` as MessagePack. Parts that were encrypted with another key are left out."""

        async def body(tx: Connection) -> tuple[int, list[bytes]]:
            number = (await _find_session(tx, session_id, tenant)).attempt if attempt is None else attempt
            parts = []
            for part, sealed in await _rows_of_attempt(tx, TIMELINE, session_id, number, tenant):
                with suppress(UnreadableTask):
                    parts.append(self._key.open(bytes(sealed), _part_of(session_id, number, part)))
            return number, parts

        return await self._db.read(body)

    async def session_events(self, session_id: str, *, tenant: str | None = None) -> list[EventView]:
        """List the events of one session, in order."""

        async def body(tx: Connection) -> list[Row]:
            session = await _find_session(tx, session_id, tenant)
            sql = f"SELECT {rows.EVENT_COLUMNS} FROM events WHERE group_id = ? AND session_id = ? ORDER BY cursor"
            return await tx.fetch(sql, (session.group_id, session_id))

        return [rows.row_from(EventView, row) for row in await self._db.read(body)]

    async def turns(
        self, session_id: str, attempt: int | None = None, *, images: bool = False, tenant: str | None = None
    ) -> list[Turn]:
        """Return the turns of an attempt (default: the newest), in order of index and without gaps. With `images`, the
        images include their bytes."""
        stored = await self._db.read(lambda tx: _rows_of_attempt(tx, TURNS, session_id, attempt, tenant))
        found = rows.StoredTurns([packed for (packed,) in stored]).turns()
        return await self._db.read(lambda tx: restore(tx, found)) if images else found

    async def count_turns(self, session_id: str, attempt: int) -> int:
        """Return the number of stored turns of an attempt, including those of frozen models. `turns` may return fewer,
        because it leaves out turns whose parent is missing."""
        return await self._db.read(lambda tx: _count_turns(tx, session_id, attempt))

    async def turns_of(self, attempts: Sequence[tuple[str, int]]) -> list[StoredTurns]:
        """Return the turns of several attempts (session id and number), in one transaction. Raises NotFound if a
        session is unknown."""

        async def body(tx: Connection) -> list[StoredTurns]:
            found = [await _rows_of_attempt(tx, TURNS, id, attempt, None) for id, attempt in attempts]
            return [StoredTurns([packed for (packed,) in stored]) for stored in found]

        return await self._db.read(body)

    async def packed_results(self, group_ids: Sequence[str], first: int, count: int) -> list[PackedResult]:
        """Return the encoded results of these groups' done sessions with sample indexes from `first` to `first + count
        - 1`. The caller decodes the results (`rows.result_from`), because decoding may take long."""
        if not group_ids:
            return []
        sql = f"""SELECT group_id, result FROM sessions WHERE group_id IN ({", ".join("?" * len(group_ids))})
            AND state = ? AND sample_index >= ? AND sample_index < ? AND result IS NOT NULL
            ORDER BY group_id, sample_index"""
        values = (*group_ids, SessionState.DONE.value, first, first + count)
        return [PackedResult(*row) for row in await self._db.read(lambda tx: tx.fetch(sql, values))]

    async def packed_turns(self, session_id: str, attempt: int, *, limit: int) -> list[bytes]:
        """Return the first `limit` turns of an attempt in order of index, encoded (see `rows.turn_from`). For an
        unknown session, the list is empty."""
        sql = "SELECT turn FROM turns WHERE session_id = ? AND attempt = ? ORDER BY turn_index LIMIT ?"
        return [row[0] for row in await self._db.read(lambda tx: tx.fetch(sql, (session_id, attempt, limit)))]

    async def frozen_turns(
        self, session_id: str, attempt: int | None = None, *, tenant: str | None = None
    ) -> dict[str, list[Turn]]:
        """Return the turns that frozen models sampled in an attempt (default: the newest), by model and in order of
        index."""
        sql = "SELECT model, turn FROM frozen_turns WHERE session_id = ? AND attempt = ? ORDER BY model, turn_index"
        stored = await self._db.read(lambda tx: _rows_of_attempt(tx, sql, session_id, attempt, tenant))
        found: dict[str, list[Turn]] = {}
        for model, packed in stored:
            found.setdefault(model, []).append(rows.turn_from(packed))
        return found

    async def image(self, digest: str, *, tenant: str | None = None) -> Image:
        """Return an image and its bytes. If the same bytes were sent with different media types, the first media type
        is returned."""
        return await self._db.read(lambda tx: find_image(tx, digest, tenant))

    async def requeue(self, session_id: str, attempt: int, error: ErrorRecord, *, due: float = 0.0) -> None:
        """End a failed attempt, and queue the session again. The next attempt does not start before the time `due`."""

        async def body(tx: Connection) -> None:
            await self._requeue(tx, await _under_way(tx, session_id, attempt), error, due=due)

        await self._db.write(body)

    async def finish(
        self,
        session_id: str,
        attempt: int,
        result: SessionResult,
        *,
        under_way: bool = False,
        of_turns: int | None = None,
    ) -> bool:
        """Store the result of a session. The session is then done. Returns True if its group is now done, too.

        A group is done when all its sessions are done. It then gets a cursor, an event and, if it has a callback URL,
        an outbox row. If enough sessions are usable (`min_usable`) before the group is done, `ending` is set for the
        group's other sessions. A queued session may be finished, too, for example after a cancellation. In this case,
        `attempt` is the session's newest attempt.

        under_way: set if the attempt itself ends the session. Conflict is then raised if the attempt is no longer in
            progress, for example because its lease has ended.
        of_turns: if `result` was computed while the attempt could still add turns, the `count_turns` from before the
            turns were read. Raises MoreTurns if there are more turns now.
        """
        packed = rows.pack(result)
        check = _under_way if under_way else _unfinished

        async def body(tx: Connection) -> bool:
            session = await check(tx, session_id, attempt)
            if of_turns is not None and await _count_turns(tx, session_id, attempt) != of_turns:
                raise MoreTurns(session_id)
            await tx.execute(
                """UPDATE sessions SET state = ?, waiting = 0, held = 0, lease_until = NULL, updated = ?, result = ?
                   WHERE id = ?""",
                (SessionState.DONE.value, self._clock(), packed, session_id),
            )
            verdict, error = result.verdict, result.error
            data = {
                "attempt": attempt,
                "stop_reason": result.stop_reason.value,
                "reward": None if verdict is None else verdict.reward,
                "error": None if error is None else error.code,
            }
            await self._add_event(tx, EventKind.SESSION_DONE, session.group_id, session_id, data)
            await tx.execute(
                """UPDATE groups SET open_sessions = open_sessions - 1, errors = errors + ?, rewarded = rewarded + ?,
                       reward_total = reward_total + ?, bytes = bytes + ?
                       + (SELECT COALESCE(SUM(LENGTH(turn)), 0) FROM turns WHERE session_id = ?)
                       + (SELECT COALESCE(SUM(LENGTH(turn)), 0) FROM frozen_turns WHERE session_id = ?)
                       + (SELECT COALESCE(SUM(LENGTH(entries)), 0) FROM timelines WHERE session_id = ?)
                   WHERE id = ?""",
                (
                    int(error is not None),
                    int(verdict is not None),
                    verdict.reward if verdict else 0.0,
                    len(packed) + result.artifact_bytes,
                    session_id,
                    session_id,
                    session_id,
                    session.group_id,
                ),
            )
            now = self._clock()
            if not await tx.execute(
                "UPDATE groups SET state = ?, finished = ? WHERE id = ? AND open_sessions = 0",
                (GroupState.DONE.value, now, session.group_id),
            ):
                group = await self._find_group(tx, session.group_id)
                if group.min_usable is None or group.rewarded < group.min_usable:
                    return False
                usable = await _count_trained(tx, group.id) if group.usable_trains else group.rewarded
                others = (StopReason.EARLY_STOP.value, group.id)
                if usable >= group.min_usable and await tx.execute(END_OTHERS, others):
                    await self._add_event(tx, EventKind.GROUP_ENOUGH, group.id, None, {"usable": usable})
                return False
            # The row of `totals` is locked from here to the commit, so cursors become visible in rising order.
            await tx.execute(
                """UPDATE totals SET cursor = cursor + 1, sessions = sessions + (SELECT n FROM groups WHERE id = ?),
                       bytes = bytes + (SELECT bytes FROM groups WHERE id = ?)""",
                (session.group_id, session.group_id),
            )
            await tx.execute("UPDATE groups SET cursor = (SELECT cursor FROM totals) WHERE id = ?", (session.group_id,))
            await note_done(tx, session.group_id)
            group = await self._find_group(tx, session.group_id)
            data = {"cursor": group.cursor, "cancelled": group.cancelled}
            await self._add_event(tx, EventKind.GROUP_DONE, group.id, None, data)
            ((url,),) = await tx.fetch("SELECT callback_url FROM groups WHERE id = ?", (group.id,))
            if url is not None:  # the encrypted URL is copied, so no key is needed
                await tx.execute(
                    """INSERT INTO outbox (group_id, url, receiver, tries, next_try, since, tenant)
                       VALUES (?, ?, ?, 0, ?, ?, ?)""",
                    (group.id, url, receiver_of_sealed(url), now, now, group.tenant),
                )
            return True

        return await self._db.write(body)

    async def cancel_group(self, group_id: str, *, tenant: str | None = None) -> list[SessionRow]:
        """Mark a group as cancelled. Returns the sessions that are not done; the caller must end them."""

        async def body(tx: Connection) -> list[SessionRow]:
            group = await self._find_group(tx, group_id, tenant)
            if group.state is GroupState.ACTIVE and not group.cancelled:
                await tx.execute("UPDATE groups SET cancelled = 1 WHERE id = ?", (group_id,))
                await tx.execute(END_OTHERS, (StopReason.CANCELLED.value, group_id))
                await self._add_event(tx, EventKind.GROUP_CANCELLED, group_id, None, {})
            return await _find_sessions(tx, "group_id = ? AND state <> 'done' ORDER BY sample_index", group_id)

        return await self._db.write(body)

    async def cancel_session(self, session_id: str, *, tenant: str | None = None) -> SessionRow:
        """Set `ending` of a session to CANCELLED. Returns the session; the caller must end it unless it is done. Other
        sessions of the group continue."""

        sql = """UPDATE sessions SET ending = ?, waiting = 0, held = 0
            WHERE id = ? AND ending IS NULL AND state <> 'done'"""

        async def body(tx: Connection) -> SessionRow:
            session = await _find_session(tx, session_id, tenant)
            if await tx.execute(sql, (StopReason.CANCELLED.value, session_id)):
                await self._add_event(tx, EventKind.SESSION_CANCELLED, session.group_id, session_id, {})
            return await _find_session(tx, session_id)

        return await self._db.write(body)

    async def recover(self, *, now: float, held: Container[str] = (), due: float = 0.0) -> list[SessionRow]:
        """Queue again all sessions whose leases ended before `now`. Their attempts were lost with their nodes, and
        count as recovered. The next attempt does not start before `due`.

        Sessions in `held` are skipped. Returns the sessions that were queued again, including those with `ending` set.
        """

        async def body(tx: Connection) -> list[SessionRow]:
            lapsed = await _find_sessions(tx, "lease_until < ? ORDER BY lease_until, id", now)
            lost = [session for session in lapsed if session.id not in held]
            for session in lost:
                error = ErrorRecord(
                    boundary=Boundary.SERVICE,
                    code="lease_expired",
                    message=f"the lease of attempt {session.attempt} on node {session.node} has ended",
                    hint="the node or the whole service was lost: see its log",
                    retryable=True,
                )
                await self._requeue(tx, session, error, due=due, recovered=1)
            return [await _find_session(tx, session.id) for session in lost]

        return await self._db.write(body)

    async def results(self, *, after: int, limit: int, tenant: str | None = None) -> list[GroupRow]:
        """List done groups whose cursor is greater than `after`, in order of cursor. The cursors of all tenants form
        one sequence."""
        own = of_tenant(tenant)
        sql = f"SELECT {rows.GROUP_COLUMNS} FROM groups WHERE cursor > ?{own.sql} ORDER BY cursor LIMIT ?"
        found = await self._db.read(lambda tx: tx.fetch(sql, (after, *own.values, limit)))
        return [self._group(row) for row in found]

    async def last_cursor(self, *, tenant: str | None = None) -> int:
        """Return the newest cursor that was given to a done group, or 0."""
        return await self._db.read(lambda tx: total(tx, "cursor", tenant))

    async def events(self, *, after: int, limit: int, tenant: str | None = None) -> list[EventView]:
        """List events whose cursor is greater than `after`, in order."""
        own = of_tenant(tenant)
        sql = f"SELECT {rows.EVENT_COLUMNS} FROM events WHERE cursor > ?{own.sql} ORDER BY cursor LIMIT ?"
        found = await self._db.read(lambda tx: tx.fetch(sql, (after, *own.values, limit)))
        return [rows.row_from(EventView, row) for row in found]

    async def tokens(self) -> list[TokenRow]:
        """List all tokens of the control API, including expired and revoked ones, oldest first."""
        sql = f"SELECT {rows.TOKEN_COLUMNS} FROM tokens ORDER BY created, name"
        return [rows.row_from(TokenRow, row) for row in await self._db.read(lambda tx: tx.fetch(sql))]

    async def has_tokens(self) -> bool:
        """Return True if a token was ever made."""
        return bool(await self._db.read(lambda tx: tx.fetch("SELECT 1 FROM tokens LIMIT 1")))

    async def token(self, digest: str) -> TokenRow | None:
        sql = f"SELECT {rows.TOKEN_COLUMNS} FROM tokens WHERE digest = ?"
        found = await self._db.read(lambda tx: tx.fetch(sql, (digest,)))
        return rows.row_from(TokenRow, found[0]) if found else None

    async def add_token(self, token: TokenRow, *, joins: bool = True) -> None:
        """Store a token. Raises Conflict if its name was ever used, because groups and the audit log refer to tokens by
        name. Without `joins`, also raises Conflict if another token belongs to the same tenant."""
        sql = f"INSERT INTO tokens ({rows.TOKEN_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"

        async def body(tx: Connection) -> None:
            if not await tx.execute(sql, msgspec.structs.astuple(token)):
                raise Conflict(
                    f"there is, or was, a token {token.name!r}", field="name", hint="give the new token another name"
                )
            others = "SELECT 1 FROM tokens WHERE tenant = ? AND name <> ? LIMIT 1"
            if not joins and await tx.fetch(others, (token.tenant, token.name)):
                raise Conflict(
                    f"there is a tenant {token.tenant!r}, whose groups this token would see",
                    field="name",
                    hint=f"add --tenant {token.tenant} if it should see these groups; otherwise choose another name",
                )

        await self._db.write(body)

    async def revoke_token(self, name: str) -> TokenRow:
        """Revoke a token. If it is already revoked, its time of revocation stays. Raises NotFound."""

        async def body(tx: Connection) -> TokenRow:
            await tx.execute("UPDATE tokens SET revoked = ? WHERE name = ? AND revoked IS NULL", (self._clock(), name))
            found = await tx.fetch(f"SELECT {rows.TOKEN_COLUMNS} FROM tokens WHERE name = ?", (name,))
            if not found:
                raise NotFound(f"no token {name!r}", hint="see their names with `outrider token list`")
            return rows.row_from(TokenRow, found[0])

        return await self._db.write(body)

    async def last_event(self, *, tenant: str | None = None) -> int:
        """Return the cursor of the newest event, or 0 if there was none. Events that have been removed count, too."""
        return await self._db.read(lambda tx: newest_event(tx, tenant))

    async def deliveries(
        self,
        *,
        now: float,
        limit: int,
        latest: float = inf,
        busy: Collection[str] = (),
        busy_tenants: Collection[str] = (),
    ) -> list[Delivery]:
        """List callbacks that are due for a try, except those to the receivers in `busy` and those of the tenants in
        `busy_tenants`.

        A callback whose next try is later than `latest` is due, too. No try is ever delayed until after `latest`, so
        such a time shows that the system clock was set back.
        """
        left_out = (("receiver", busy), ("tenant", busy_tenants))
        others = "".join(f" AND {name} NOT IN ({', '.join('?' * len(some))})" for name, some in left_out if some)
        values = (*busy, *busy_tenants)
        sql = f"SELECT {rows.DELIVERY_COLUMNS} FROM outbox WHERE given_up IS NULL AND next_try"
        order = f"{others} ORDER BY next_try, group_id LIMIT ?"

        async def body(tx: Connection) -> list[Row]:
            due = await tx.fetch(f"{sql} <= ?{order}", (now, *values, limit))
            return due + await tx.fetch(f"{sql} > ?{order}", (latest, *values, limit - len(due)))

        return [self._delivery(row) for row in await self._db.read(body)]

    async def delivered(self, group_id: str) -> None:
        """Remove a delivered callback from the outbox. Raises NotFound if the group has no callback there."""
        await self._change_outbox("DELETE FROM outbox WHERE group_id = ?", group_id)

    async def delivery_failed(self, group_id: str, *, next_try: float, fault: str | None = None) -> None:
        """Count a failed try of a group's callback, and set the time of the next try."""
        sql = "UPDATE outbox SET tries = tries + 1, next_try = ?, fault = ? WHERE group_id = ?"
        await self._change_outbox(sql, next_try, fault, group_id)

    async def give_up_delivery(self, group_id: str, *, fault: str) -> None:
        """Count a failed try of a callback, and stop trying. The callback is then a dead letter, which is retried only
        on request."""

        async def body(tx: Connection) -> None:
            sql = "UPDATE outbox SET tries = tries + 1, given_up = ?, fault = ? WHERE group_id = ?"
            if not await tx.execute(sql, (self._clock(), fault, group_id)):
                raise _no_delivery(group_id)
            ((tries,),) = await tx.fetch("SELECT tries FROM outbox WHERE group_id = ?", (group_id,))
            await self._add_event(tx, EventKind.CALLBACK_DEAD, group_id, None, {"tries": tries, "fault": fault})

        await self._db.write(body)

    async def dead_deliveries(self, *, limit: int, tenant: str | None = None) -> list[Delivery]:
        """List dead letters (given-up callbacks), newest first."""
        own = of_tenant(tenant)
        sql = f"""SELECT {rows.DELIVERY_COLUMNS} FROM outbox WHERE given_up IS NOT NULL{own.sql}
            ORDER BY given_up DESC, group_id DESC LIMIT ?"""
        found = await self._db.read(lambda tx: tx.fetch(sql, (*own.values, limit)))
        return [self._delivery(row) for row in found]

    async def redeliver(self, group_id: str) -> None:
        """Make a dead letter due again, as if it were new. Raises NotFound if there is no such dead letter."""
        now = self._clock()
        await self._change_outbox(f"{REVIVE} AND group_id = ?", now, now, group_id)

    async def redeliver_some(self, limit: int) -> int:
        """Make up to `limit` dead letters due again, oldest first, as if they were new. Returns their number."""
        oldest = "SELECT group_id FROM outbox WHERE given_up IS NOT NULL ORDER BY given_up, group_id LIMIT ?"
        now = self._clock()
        return await self._db.write(lambda tx: tx.execute(f"{REVIVE} AND group_id IN ({oldest})", (now, now, limit)))

    async def discard_delivery(self, group_id: str) -> None:
        """Delete a dead letter. Raises NotFound if there is no such dead letter."""
        await self._change_outbox("DELETE FROM outbox WHERE given_up IS NOT NULL AND group_id = ?", group_id)

    async def _find_group(self, tx: Connection, group_id: str, tenant: str | None = None) -> GroupRow:
        own = of_tenant(tenant)
        sql = f"SELECT {rows.GROUP_COLUMNS} FROM groups WHERE id = ? AND state <> ?{own.sql}"
        found = await tx.fetch(sql, (group_id, REMOVED, *own.values))
        if not found:
            raise NotFound(f"no group {group_id!r}", hint=GROUPS_LISTED)
        return self._group(found[0])

    async def _change_outbox(self, sql: str, *values: Any) -> None:
        """Run a statement that changes one row of the outbox. The last of `values` must be the group's id. Raises
        NotFound if no row was changed."""

        async def body(tx: Connection) -> None:
            if not await tx.execute(sql, values):
                raise _no_delivery(values[-1])

        await self._db.write(body)

    async def _requeue(
        self, tx: Connection, session: SessionRow, error: ErrorRecord, *, due: float = 0.0, recovered: int = 0
    ) -> None:
        held = await group_is_held(tx, session.group_id)
        await tx.execute(
            """UPDATE sessions SET state = ?, lease_until = NULL, updated = ?, last_error = ?, due = ?,
                   recovered = recovered + ?, waiting = CASE WHEN ending IS NULL THEN ? ELSE 0 END,
                   held = CASE WHEN ending IS NULL THEN ? ELSE 0 END
               WHERE id = ?""",
            (
                SessionState.QUEUED.value,
                self._clock(),
                rows.pack(error),
                due,
                recovered,
                int(not held),
                int(held),
                session.id,
            ),
        )
        await queue.reopen_share(tx, session.priority, session.bucket)
        data = {"attempt": session.attempt, "error": error}
        await self._add_event(tx, EventKind.SESSION_RETRY, session.group_id, session.id, data)

    async def _add_event(
        self, tx: Connection, kind: EventKind, group_id: str, session_id: str | None, data: Mapping[str, Any]
    ) -> None:
        await tx.execute(
            """INSERT INTO events (at, kind, group_id, session_id, data, tenant)
               VALUES (?, ?, ?, ?, ?, (SELECT tenant FROM groups WHERE id = ?))""",
            (self._clock(), kind.value, group_id, session_id, rows.pack_data(data), group_id),
        )


def _no_delivery(group_id: str) -> NotFound:
    return NotFound(f"there is no such delivery of group {group_id!r}", hint="see outrider callbacks list")


def _spec_of(group_id: str) -> str:
    """Return the place for which a group's spec is sealed (see `task_key.py`)."""
    return f"the task of group {group_id}"


def _key_of(session_id: str) -> str:
    return f"the credential of session {session_id}"


def _part_of(session_id: str, attempt: int, part: int) -> str:
    return f"part {part} of the timeline of {session_id}, attempt {attempt}"


def _url_of(group_id: str) -> str:
    return f"the callback of group {group_id}"


async def _count_trained(tx: Connection, group_id: str) -> int:
    """Count the group's sessions that have both a verdict and tokens to train on."""
    results = [session.result for session in await _find_sessions(tx, "group_id = ? AND state = 'done'", group_id)]
    return sum(result is not None and result.verdict is not None and result.tokens.trained > 0 for result in results)


async def _find_spec(tx: Connection, group_id: str) -> bytes:
    found = await tx.fetch("SELECT spec FROM groups WHERE id = ? AND state <> ?", (group_id, REMOVED))
    if not found:
        raise NotFound(f"no group {group_id!r}", hint=GROUPS_LISTED)
    return bytes(found[0][0])


async def _find_session(tx: Connection, session_id: str, tenant: str | None = None) -> SessionRow:
    own = session_of_tenant(tenant)
    found = await _find_sessions(tx, f"id = ?{own.sql}", session_id, *own.values)
    if not found:
        raise NotFound(f"no session {session_id!r}", hint=SESSIONS_LISTED)
    return found[0]


async def _rows_of_attempt(
    tx: Connection, sql: str, session_id: str, attempt: int | None, tenant: str | None
) -> list[Row]:
    """Run a query with `session_id` and `attempt` (default: the newest attempt) as the values of its placeholders.
    Return the query's rows."""
    own = session_of_tenant(tenant)
    newest = f"SELECT attempt FROM sessions WHERE state <> ? AND id = ?{own.sql}"
    found = await tx.fetch(newest, (REMOVED, session_id, *own.values))
    if not found:
        raise NotFound(f"no session {session_id!r}", hint=SESSIONS_LISTED)
    return await tx.fetch(sql, (session_id, found[0][0] if attempt is None else attempt))


async def _find_sessions(tx: Connection, where: str, *values: Any) -> list[SessionRow]:
    sql = f"SELECT {rows.SESSION_COLUMNS} FROM sessions WHERE state <> ? AND {where}"
    return [rows.row_from(SessionRow, row) for row in await tx.fetch(sql, (REMOVED, *values))]


async def _unfinished(tx: Connection, session_id: str, attempt: int) -> SessionRow:
    """Return the session. Raises Conflict if the session is done, or if `attempt` is not its newest attempt."""
    session = await _find_session(tx, session_id)
    if session.attempt != attempt:
        raise Conflict(f"session {session_id} is at attempt {session.attempt}, not {attempt}")
    if session.state is SessionState.DONE:
        raise Conflict(f"session {session_id} is done")
    return session


async def _count_turns(tx: Connection, session_id: str, attempt: int) -> int:
    [[stored]] = await tx.fetch(COUNT_TURNS, (session_id, attempt, session_id, attempt))
    return int(stored)


async def _continue_turns(tx: Connection, session_id: str, attempt: int) -> None:
    """Move the turns of earlier attempts to the attempt that starts. At most one earlier attempt has turns. The turns
    may have a gap where the service ended before it stored a turn. In this case, the later turns are renumbered to
    close the gap."""
    for table in TURN_TABLES:
        sql = f"UPDATE {table} SET attempt = ? WHERE session_id = ? AND attempt < ?"
        await tx.execute(sql, (attempt, session_id, attempt))
    found = await _rows_of_attempt(tx, TURNS, session_id, attempt, None)
    turns = [rows.turn_from(packed) for (packed,) in found]
    if any(turn.index != place for place, turn in enumerate(turns)):
        await tx.execute("DELETE FROM turns WHERE session_id = ? AND attempt = ?", (session_id, attempt))
        sql = "INSERT INTO turns (session_id, attempt, turn_index, turn) VALUES (?, ?, ?, ?)"
        values = [(session_id, attempt, turn.index, rows.pack(turn)) for turn in without_gaps(turns)]
        await tx.execute_many(sql, values)


async def _under_way(tx: Connection, session_id: str, attempt: int) -> SessionRow:
    """Return the session. Raises Conflict unless `attempt` is in progress."""
    session = await _unfinished(tx, session_id, attempt)
    if session.state is SessionState.QUEUED:
        raise Conflict(f"session {session_id} waits in the queue: attempt {attempt} has ended")
    return session
