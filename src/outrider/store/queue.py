"""The order of the queue: priority, then fair share between buckets, then age.

A bucket is the sessions of one run, or of one user where no run is named; all others share the bucket without a name.
Of the buckets that wait at the highest priority, the one with the least work under way goes first, then the one that
was served the longest time ago. Within a bucket the oldest session goes first. It opens no transaction.
Invariant: a bucket with a waiting session has a row of `queue_shares` with `waiting` = 1. The reverse does not hold:
who finds nothing in a bucket tells `close_shares`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count

import msgspec

from outrider.spec import EVALUATION_LABEL
from outrider.store import rows
from outrider.store.database import Connection, Row
from outrider.store.rows import SessionRow

BUCKET_LABELS = ("run", "user")
"""Labels that name a group's bucket; the first that it has counts."""

COUNT_OF_BUCKET = """SELECT COUNT(*) FROM (
    SELECT 1 FROM queue_shares JOIN sessions
        ON sessions.priority = queue_shares.priority AND sessions.bucket = queue_shares.bucket
    WHERE queue_shares.bucket = ? AND queue_shares.waiting = 1 AND sessions.waiting = 1 LIMIT ?) AS counted"""

ABOVE_ALL = (1 << 31) - 1
"""Above every priority."""


class Picked(msgspec.Struct, frozen=True):
    """The sessions that come next, in order, and the buckets, each at a priority, in which none waits any more."""

    sessions: list[SessionRow]
    empty: list[tuple[int, str]]


def bucket_of(labels: Mapping[str, str]) -> str:
    """The bucket of a group. A digest, because a label may be long or contain what a database refuses. Evaluations of a
    run have a bucket of their own."""
    named = next(((name, labels[name]) for name in BUCKET_LABELS if labels.get(name)), ())
    evaluation = EVALUATION_LABEL in labels
    if not named and not evaluation:
        return ""
    text = "\0".join(("evaluation" if evaluation else "", *named))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


async def open_share(tx: Connection, priority: int, bucket: str, *, evaluation: bool, since: float) -> None:
    """Note that sessions of a bucket wait, the oldest since then."""
    await tx.execute(
        """INSERT INTO queue_shares (priority, bucket, evaluation, waiting, served, since) VALUES (?, ?, ?, 1, 0, ?)
           ON CONFLICT (bucket, priority) DO UPDATE SET waiting = 1""",
        (priority, bucket, int(evaluation), since),
    )


async def reopen_share(tx: Connection, priority: int, bucket: str) -> None:
    """Note that a session of a bucket waits again."""
    sql = "UPDATE queue_shares SET waiting = 1 WHERE priority = ? AND bucket = ? AND waiting = 0"
    await tx.execute(sql, (priority, bucket))


async def note_served(tx: Connection, priority: int, bucket: str) -> None:
    """Put a bucket behind all others with as much work under way."""
    await tx.execute(
        """UPDATE queue_shares SET served = (SELECT MAX(served) + 1 FROM queue_shares)
           WHERE priority = ? AND bucket = ?""",
        (priority, bucket),
    )


async def close_shares(tx: Connection, shares: Sequence[tuple[int, str]]) -> None:
    """Take buckets in which no session waits out of the order."""
    await tx.execute_many(
        """UPDATE queue_shares SET waiting = 0 WHERE priority = ? AND bucket = ? AND NOT EXISTS (SELECT 1 FROM sessions
               WHERE sessions.waiting = 1 AND sessions.priority = queue_shares.priority
                   AND sessions.bucket = queue_shares.bucket)""",
        shares,
    )


async def pick(
    tx: Connection,
    limit: int,
    *,
    now: float,
    latest: float,
    under_way: Mapping[str, int],
    skip: Collection[str],
    evaluations: bool,
) -> Picked:
    """The next sessions that are due by `now`, or only after `latest`: nothing is put off for so long, so the clock has
    been set back since. `under_way` counts the sessions under way by bucket; buckets in `skip` are left
    out; with `evaluations` only evaluations are looked at.

    Its cost grows with `limit` and the number of buckets with work under way, not with the length of the queue.
    """
    picked = Picked([], [])
    busy = Counter(under_way)
    which = "waiting = 1 AND evaluation = 1" if evaluations else "waiting = 1"
    priority = ABOVE_ALL
    while len(picked.sessions) < limit:
        found = await tx.fetch(
            f"SELECT MAX(priority) FROM queue_shares WHERE {which} AND priority < ?",
            (priority,),
        )
        if found[0][0] is None:
            break
        priority = found[0][0]
        line = _Line(tx, priority, which, now=now, latest=latest, busy=busy, skip=skip)
        await line.pick(limit, picked)
    return picked


class _Line:
    """The buckets that wait at one priority."""

    def __init__(
        self,
        tx: Connection,
        priority: int,
        which: str,
        *,
        now: float,
        latest: float,
        busy: Counter[str],
        skip: Collection[str],
    ) -> None:
        self._tx = tx
        self._priority = priority
        self._which = which
        self._now = now
        self._latest = latest
        self._busy = busy
        """Work under way by bucket, with what is picked."""
        self._skip = skip
        self._order = count()
        self._buckets: list[tuple[int, int, str]] = []
        """A heap: the work under way, the turn among equals, the bucket."""
        self._last: tuple[int, float, str] | None = (-1, 0.0, "")
        """`served`, `since` and name of the last bucket that was read; None once all were."""
        self._read: dict[str, list[Row]] = {}
        self._taken: dict[str, int] = {}

    async def pick(self, limit: int, picked: Picked) -> None:
        """Add sessions to `picked` until it has as many as `limit`, or none is left."""
        while len(picked.sessions) < limit:
            # A bucket without work under way may still come; one with some has to wait for all of these.
            while self._last is not None and (not self._buckets or self._buckets[0][0] > 0):
                await self._read_buckets(limit + len(self._busy) + len(self._skip))
            if not self._buckets:
                return
            bucket = heappop(self._buckets)[-1]
            session = await self._next(bucket, limit - len(picked.sessions))
            if session is not None:
                picked.sessions.append(rows.session_from(session))
                self._busy[bucket] += 1
                heappush(self._buckets, (self._busy[bucket], next(self._order), bucket))
            elif not self._taken.get(bucket) and await self._is_empty(bucket):
                picked.empty.append((self._priority, bucket))

    async def _read_buckets(self, number: int) -> None:
        """Read buckets in the order in which they were served."""
        found = await self._tx.fetch(
            f"""SELECT served, since, bucket FROM queue_shares
                WHERE {self._which} AND priority = ? AND (served, since, bucket) > (?, ?, ?)
                ORDER BY served, since, bucket LIMIT ?""",
            (self._priority, *(self._last or ()), number),
        )
        for _, _, bucket in found:
            if bucket not in self._skip:
                heappush(self._buckets, (self._busy[bucket], next(self._order), bucket))
        self._last = found[-1] if len(found) == number else None

    async def _next(self, bucket: str, wanted: int) -> Row | None:
        """The bucket's oldest session that is due and was not taken before."""
        taken = self._taken.get(bucket, 0)
        read = self._read.setdefault(bucket, [])
        if not read:
            read += reversed(
                await self._tx.fetch(
                    f"""SELECT {rows.SESSION_COLUMNS} FROM sessions
                        WHERE waiting = 1 AND priority = ? AND bucket = ? AND (due <= ? OR due > ?)
                        ORDER BY created, group_id, sample_index LIMIT ? OFFSET ?""",
                    (self._priority, bucket, self._now, self._latest, wanted // (len(self._buckets) + 1) + 1, taken),
                )
            )
        if not read:
            return None
        self._taken[bucket] = taken + 1
        return read.pop()

    async def _is_empty(self, bucket: str) -> bool:
        """Whether no session waits in it, due or not."""
        sql = "SELECT 1 FROM sessions WHERE waiting = 1 AND priority = ? AND bucket = ? LIMIT 1"
        return not await self._tx.fetch(sql, (self._priority, bucket))
