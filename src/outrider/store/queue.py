"""Defines in which order queued sessions start.

The sessions of a tenant are divided into buckets by the value of their label `run`. Without this label, the label
`user` is used. Sessions with neither label share one bucket. No bucket has sessions of two kinds (`QueueKind`). These
steps choose the next session:
1. Take the tenant with the fewest sessions in progress. Among equals, take the tenant served least recently.
2. Take the highest priority at which this tenant has waiting sessions.
3. Take one of the tenant's buckets at this priority, by the rule of step 1.
4. Take the oldest session of this bucket.

Clients choose priorities and labels, so these must not affect other tenants. A priority orders only the sessions of one
tenant. A client that names a new run for each group delays only sessions of its own tenant.

The functions run in the caller's transaction. Invariant: if a session of a bucket waits at a priority, the row in
`queue_shares` for this bucket and priority has `waiting` = 1. A row may still have `waiting` = 1 when its last session
no longer waits. If a pass over the queue (`QueuePass`) finds such a row, `close_empty_shares` sets `waiting` to 0.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from enum import IntEnum
from heapq import heapify, heappop, heappush
from itertools import count

import msgspec

from outrider.spec import EVALUATION_LABEL, tenant_of
from outrider.store import rows
from outrider.store.database import Connection, Row
from outrider.store.rows import SessionRow

BUCKET_LABELS = ("run", "user")
"""Labels that determine a group's bucket. If a group has both labels, the first one is used."""

COUNT_WAITING = """SELECT COUNT(*) FROM (
    SELECT 1 FROM queue_shares JOIN sessions
        ON sessions.priority = queue_shares.priority AND sessions.bucket = queue_shares.bucket
    WHERE queue_shares.{column} = ? AND queue_shares.waiting = 1 AND sessions.waiting = 1 LIMIT ?) AS counted"""

# This query jumps from one tenant to the next in the index. A plain SELECT DISTINCT would read the rows of all buckets.
TENANTS = """WITH RECURSIVE found (tenant) AS (
        SELECT MIN(tenant) FROM queue_shares WHERE {which}
        UNION ALL
        SELECT (SELECT MIN(queue_shares.tenant) FROM queue_shares
                WHERE {which} AND queue_shares.tenant > found.tenant)
        FROM found WHERE found.tenant IS NOT NULL
    )
    SELECT found.tenant, (SELECT MAX(served) FROM queue_shares WHERE queue_shares.tenant = found.tenant) AS last
    FROM found WHERE found.tenant IS NOT NULL ORDER BY last, found.tenant"""

ABOVE_ALL = (1 << 31) - 1
"""Higher than every priority."""

MOST_SKIPPED_BUCKETS = 64
"""If this many buckets of a tenant are to be skipped (`QueuePass.skip`), the whole tenant is left out of the pass over
the queue. This limits the cost of the pass."""


class Picked(msgspec.Struct, frozen=True):
    """The next sessions in order. `empty` lists the pairs (priority, bucket) in which no session is waiting any
    more."""

    sessions: list[SessionRow]
    empty: list[tuple[int, str]]


class QueueKind(IntEnum):
    """The kind of a bucket's sessions. No bucket has sessions of two kinds."""

    ORDINARY = 0
    EVALUATION = 1
    """Sessions of groups with EVALUATION_LABEL. They may also use the slots that are reserved for evaluations."""
    EXTERNAL = 2
    """Sessions whose agents run outside Outrider. They need no slot, so they do not wait behind sessions that need a
    slot."""


def kind_of(labels: Mapping[str, str], *, external: bool) -> QueueKind:
    if external:
        return QueueKind.EXTERNAL
    return QueueKind.EVALUATION if EVALUATION_LABEL in labels else QueueKind.ORDINARY


def bucket_of(tenant: str, labels: Mapping[str, str], *, external: bool = False) -> str:
    """Return the name of a group's bucket: the tenant, and a digest of the label. The label itself might be too
    long, or contain characters that a database refuses. A run's evaluations and external sessions have buckets of
    their own."""
    named = next(((name, labels[name]) for name in BUCKET_LABELS if labels.get(name)), ())
    kind = kind_of(labels, external=external)
    if not named and kind is QueueKind.ORDINARY:
        return f"{tenant}:"
    text = "\0".join(("" if kind is QueueKind.ORDINARY else kind.name.lower(), *named))
    return f"{tenant}:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"


async def open_share(tx: Connection, priority: int, bucket: str, *, kind: QueueKind, since: float) -> None:
    """Record that sessions of a bucket wait at a priority. `since` is the creation time of the sessions' group. If the
    bucket already has a row at this priority, `since` is ignored."""
    await tx.execute(
        """INSERT INTO queue_shares (priority, tenant, bucket, kind, waiting, served, since)
           VALUES (?, ?, ?, ?, 1, 0, ?) ON CONFLICT (bucket, priority) DO UPDATE SET waiting = 1""",
        (priority, tenant_of(bucket), bucket, int(kind), since),
    )


async def reopen_share(tx: Connection, priority: int, bucket: str) -> None:
    """Record that the bucket has waiting sessions at this priority again."""
    sql = "UPDATE queue_shares SET waiting = 1 WHERE priority = ? AND bucket = ? AND waiting = 0"
    await tx.execute(sql, (priority, bucket))


async def note_served(tx: Connection, priority: int, bucket: str) -> None:
    """Record that a session of the bucket was started. Among buckets with equally many sessions in progress, this
    bucket then comes last."""
    await tx.execute(
        """UPDATE queue_shares SET served = (SELECT MAX(served) + 1 FROM queue_shares)
           WHERE priority = ? AND bucket = ?""",
        (priority, bucket),
    )


async def close_empty_shares(tx: Connection, shares: Sequence[tuple[int, str]]) -> None:
    """For each pair (priority, bucket) in which no session waits, set `waiting` to 0."""
    await tx.execute_many(
        """UPDATE queue_shares SET waiting = 0 WHERE priority = ? AND bucket = ? AND NOT EXISTS (SELECT 1 FROM sessions
               WHERE sessions.waiting = 1 AND sessions.priority = queue_shares.priority
                   AND sessions.bucket = queue_shares.bucket)""",
        shares,
    )


async def forget_share(tx: Connection, priority: int, bucket: str) -> None:
    """Delete the row of a bucket and priority, if no session needs it: none waits, and none may wait again later. A
    client that names a new run for each group would otherwise leave a row for each of them for ever."""
    same = "sessions.priority = queue_shares.priority AND sessions.bucket = queue_shares.bucket"
    needs = ("sessions.waiting = 1", "sessions.lease_until IS NOT NULL", "sessions.held = 1")
    unneeded = " ".join(f"AND NOT EXISTS (SELECT 1 FROM sessions WHERE {need} AND {same})" for need in needs)
    await tx.execute(f"DELETE FROM queue_shares WHERE priority = ? AND bucket = ? {unneeded}", (priority, bucket))


class QueuePass:
    """Picks sessions to start, in one pass over the queue.

    now: the current time. A session is picked only if its `due` is not later.
    latest: a session whose `due` is later than `latest` is picked, too. No retry is ever delayed until after `latest`,
        so such a `due` shows that the system clock was set back.
    under_way: number of sessions in progress, by bucket.
    skip: buckets to leave out. A tenant with MOST_SKIPPED_BUCKETS of them is left out entirely.
    kind: the kind of sessions to pick. None means every kind except EXTERNAL.
    """

    def __init__(
        self,
        tx: Connection,
        *,
        now: float,
        latest: float,
        under_way: Mapping[str, int],
        skip: Collection[str],
        kind: QueueKind | None,
    ) -> None:
        self.tx = tx
        self.which = "waiting = 1 AND kind <> 2" if kind is None else f"waiting = 1 AND kind = {kind:d}"
        self.now = now
        self.latest = latest
        self.skip = skip
        self.busy = Counter(under_way)
        """Number of sessions under way by bucket, including the sessions picked in this pass."""
        self._work: Counter[str] = Counter()
        """Number of sessions under way by tenant, at the beginning of the pass."""
        for bucket, number in under_way.items():
            self._work[tenant_of(bucket)] += number
        self._passed = Counter(map(tenant_of, skip))

    async def pick(self, limit: int) -> Picked:
        """Return up to `limit` sessions in the order in which they should start. The cost depends on `limit`, the
        number of tenants and the number of buckets with sessions in progress, but not on the length of the queue."""
        picked = Picked([], [])
        order = count()
        waiting = [(self._work[tenant], next(order), _Tenant(self, tenant)) for tenant in await self._tenants()]
        heapify(waiting)
        while waiting and len(picked.sessions) < limit:
            work, _, tenant = heappop(waiting)
            wanted = (limit - len(picked.sessions)) // (len(waiting) + 1) + 1
            session = await tenant.next(wanted, picked.empty)
            if session is not None:
                picked.sessions.append(rows.row_from(SessionRow, session))
                heappush(waiting, (work + 1, next(order), tenant))
        return picked

    async def _tenants(self) -> list[str]:
        """Return the tenants with waiting sessions, least recently served first. A tenant is left out if
        MOST_SKIPPED_BUCKETS or more of its buckets are in `skip`."""
        found = await self.tx.fetch(TENANTS.format(which=self.which), ())
        return [tenant for tenant, _ in found if self._passed[tenant] < MOST_SKIPPED_BUCKETS]


class _Tenant:
    """Hands out the waiting sessions of one tenant, highest priority first."""

    def __init__(self, queue_pass: QueuePass, name: str) -> None:
        self._pass = queue_pass
        self._name = name
        self._priority = ABOVE_ALL
        self._line: _Line | None = None

    async def next(self, wanted: int, empty: list[tuple[int, str]]) -> Row | None:
        """Return the tenant's next session, or None if none is left. The arguments are explained at `_Line.next`."""
        while True:
            if self._line is not None and (session := await self._line.next(wanted, empty)) is not None:
                return session
            sql = f"SELECT MAX(priority) FROM queue_shares WHERE {self._pass.which} AND tenant = ? AND priority < ?"
            ((found,),) = await self._pass.tx.fetch(sql, (self._name, self._priority))
            if found is None:
                return None
            self._priority = found
            self._line = _Line(self._pass, found, self._name)


class _Line:
    """Hands out the waiting sessions of one tenant at one priority, with fair shares for its buckets."""

    def __init__(self, queue_pass: QueuePass, priority: int, tenant: str) -> None:
        self._pass = queue_pass
        self._priority = priority
        self.tenant = tenant
        self._order = count()
        self._buckets: list[tuple[int, int, str]] = []
        """A heap of tuples: the number of sessions under way, the order among equals, and the bucket."""
        self._last: tuple[int, float, str] | None = (-1, 0.0, "")
        """The last bucket that was read: its `served`, its `since` and its name. None after all buckets were read."""
        self._read: dict[str, list[Row]] = {}
        self._taken: dict[str, int] = {}

    async def next(self, wanted: int, empty: list[tuple[int, str]]) -> Row | None:
        """Return the tenant's next session at this priority, or None. `wanted` is roughly the number of sessions that
        the caller still needs from this tenant. How many rows a query reads depends on this number. Buckets without
        waiting sessions are added to `empty`."""
        queue_pass = self._pass
        while True:
            # A bucket without sessions in progress comes before all others. So read more buckets until such a bucket is
            # at the top of the heap.
            while self._last is not None and (not self._buckets or self._buckets[0][0] > 0):
                await self._read_buckets(wanted + len(queue_pass.busy) + len(queue_pass.skip))
            if not self._buckets:
                return None
            bucket = heappop(self._buckets)[-1]
            session = await self._next_in(bucket, wanted)
            if session is not None:
                queue_pass.busy[bucket] += 1
                heappush(self._buckets, (queue_pass.busy[bucket], next(self._order), bucket))
                return session
            if not self._taken.get(bucket) and await self._is_empty(bucket):
                empty.append((self._priority, bucket))

    async def _read_buckets(self, number: int) -> None:
        """Read the next `number` buckets into the heap, least recently served first."""
        found = await self._pass.tx.fetch(
            f"""SELECT served, since, bucket FROM queue_shares
                WHERE {self._pass.which} AND priority = ? AND tenant = ? AND (served, since, bucket) > (?, ?, ?)
                ORDER BY served, since, bucket LIMIT ?""",
            (self._priority, self.tenant, *(self._last or ()), number),
        )
        for _, _, bucket in found:
            if bucket not in self._pass.skip:
                heappush(self._buckets, (self._pass.busy[bucket], next(self._order), bucket))
        self._last = found[-1] if len(found) == number else None

    async def _next_in(self, bucket: str, wanted: int) -> Row | None:
        """Return the bucket's oldest due session that this pass has not returned yet, or None."""
        queue_pass = self._pass
        taken = self._taken.get(bucket, 0)
        read = self._read.setdefault(bucket, [])
        if not read:
            read += reversed(
                await queue_pass.tx.fetch(
                    f"""SELECT {rows.SESSION_COLUMNS} FROM sessions
                        WHERE waiting = 1 AND priority = ? AND bucket = ? AND (due <= ? OR due > ?)
                        ORDER BY created, group_id, sample_index LIMIT ? OFFSET ?""",
                    (
                        self._priority,
                        bucket,
                        queue_pass.now,
                        queue_pass.latest,
                        wanted // (len(self._buckets) + 1) + 1,
                        taken,
                    ),
                )
            )
        if not read:
            return None
        self._taken[bucket] = taken + 1
        return read.pop()

    async def _is_empty(self, bucket: str) -> bool:
        """Return True if the bucket has no waiting session. A session that is not due yet also counts as waiting."""
        sql = "SELECT 1 FROM sessions WHERE waiting = 1 AND priority = ? AND bucket = ? LIMIT 1"
        return not await self._pass.tx.fetch(sql, (self._priority, bucket))
