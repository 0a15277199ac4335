"""Removes finished groups and all their rows. The transactions are short, so that other writers hardly wait.

A removal has two steps. `hide` excludes the group and its sessions from all queries and totals, except that
`Store.events` still lists their events. `erase` then deletes the rows, a limited number per call.
`service/retention.py` chooses the groups and removes the files of their sessions.

Invariants:
- A group is hidden together with all its sessions.
- A group is hidden only if it is done and its callback, if any, was delivered or discarded.
- A group is hidden only if every consumer that reads it has acknowledged it. `force` overrides this rule.
- A hidden group stays hidden, even if the process is killed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import msgspec

from outrider.store.database import Connection, Database
from outrider.store.images import forget_images
from outrider.store.queue import forget_share
from outrider.store.rows import row_from
from outrider.store.tenants import note_erased_events, note_hidden

REMOVED = "removed"
"""State of hidden groups and their sessions, until their rows are deleted. The rest of the store skips these rows."""

ALL_CURSORS = (1 << 63) - 1

# SQL condition: every consumer has acknowledged the group. The `?` is the lowest position among the admins' consumers,
# which read the groups of all tenants. The subquery finds consumers of the group's own tenant that have not
# acknowledged the group.
ACKNOWLEDGED = """cursor <= ? AND NOT EXISTS (SELECT 1 FROM consumers
    WHERE consumers.tenant = groups.tenant AND consumers.cursor < groups.cursor)"""

REMOVABLE = "cursor IS NOT NULL AND NOT EXISTS (SELECT 1 FROM outbox WHERE outbox.group_id = groups.id)"


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A finished group that may be removed. `bytes` counts its spec, turns, timelines, results and artifacts, but
    no images."""

    id: str
    sessions: int
    bytes: int
    finished: float
    cursor: int

    @property
    def sort_key(self) -> tuple[float, int]:
        """Sort key of the group in `Removals.candidates`."""
        return self.finished, self.cursor


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of finished groups that must not be removed yet. A group may be in both counts.

    unacknowledged: groups that a consumer has not acknowledged.
    undelivered: groups whose callback is not delivered.
    """

    unacknowledged: int
    undelivered: int


class Removals:
    """Removes groups from the store's database. Methods raise ServiceError when the database fails.

    With `force`, groups are removed even if a consumer has not acknowledged them.
    """

    def __init__(self, database: Database) -> None:
        self._db = database

    async def size(self) -> int:
        """Return the size in bytes of all finished groups and all images."""
        sql = "SELECT bytes, (SELECT COALESCE(SUM(LENGTH(data)), 0) FROM images) FROM totals"
        ((groups, images),) = await self._db.read(lambda tx: tx.fetch(sql))
        return int(groups) + int(images)

    async def has_images(self) -> bool:
        return bool(await self._db.read(lambda tx: tx.fetch("SELECT 1 FROM images LIMIT 1")))

    async def image_bytes(self, group_id: str, uses: dict[str, int]) -> int:
        """Return the size in bytes of the images that are removed together with a group. This assumes that the groups
        of all earlier calls with the same `uses` are removed, too.

        Pass an empty `uses` to the first call. For each image of the group that other sessions still use, the method
        stores the number of these sessions in `uses`."""
        sql = """SELECT digest, own, (SELECT LENGTH(data) FROM images WHERE images.digest = used.digest) FROM
            (SELECT digest, COUNT(*) AS own FROM sessions JOIN image_uses ON image_uses.session_id = sessions.id
                WHERE sessions.group_id = ? GROUP BY digest) AS used"""

        async def body(tx: Connection) -> list[tuple[str, int, int]]:
            found = []
            for digest, own, size in await tx.fetch(sql, (group_id,)):
                if (known := uses.get(digest)) is None:
                    ((known,),) = await tx.fetch("SELECT COUNT(*) FROM image_uses WHERE digest = ?", (digest,))
                found.append((digest, size, known - own))
            return found

        freed = 0
        for digest, size, others in await self._db.read(body):
            if others > 0:
                uses[digest] = others
            else:
                uses.pop(digest, None)
                freed += size
        return freed

    async def candidates(self, *, force: bool, after: tuple[float, int] = (-inf, 0), limit: int) -> list[Candidate]:
        """Return up to `limit` groups that may be removed, in the order in which they finished. For the next page, pass
        the `sort_key` of the last returned group as `after`."""
        sql = f"""SELECT id, n, bytes, finished, cursor FROM groups
            WHERE {_removable(force)} AND (finished, cursor) > (?, ?)
            ORDER BY finished, cursor LIMIT ?"""

        async def body(tx: Connection) -> list[Candidate]:
            found = await tx.fetch(sql, (*await _bound(tx, force), *after, limit))
            return [row_from(Candidate, row) for row in found]

        return await self._db.read(body)

    async def held(self, *, before: float = inf, force: bool) -> Held:
        """Count the groups that finished before the time `before` but must not be removed yet."""

        kept = f"SELECT COUNT(*) FROM groups WHERE cursor IS NOT NULL AND finished < ? AND NOT ({ACKNOWLEDGED})"

        async def body(tx: Connection) -> Held:
            unacknowledged: int = 0 if force else (await tx.fetch(kept, (before, *await _bound(tx, force))))[0][0]
            ((undelivered,),) = await tx.fetch(
                "SELECT COUNT(*) FROM outbox JOIN groups ON groups.id = outbox.group_id WHERE finished < ?", (before,)
            )
            return Held(unacknowledged=unacknowledged, undelivered=undelivered)

        return await self._db.read(body)

    async def hide(self, group_ids: Sequence[str], *, force: bool) -> list[str]:
        """Hide the given groups, except those that may no longer be removed. Returns the ids of the hidden groups. The
        caller must then call `erase` until it returns False."""
        sql = f"SELECT n, bytes FROM groups WHERE {_removable(force)} AND id = ?"

        async def body(tx: Connection) -> list[str]:
            hidden, bound = [], await _bound(tx, force)
            for group_id in group_ids:
                for n, size in await tx.fetch(sql, (*bound, group_id)):
                    await tx.execute(
                        "UPDATE groups SET state = ?, cursor = NULL, idempotency_key = NULL WHERE id = ?",
                        (REMOVED, group_id),
                    )
                    await tx.execute("UPDATE sessions SET state = ? WHERE group_id = ?", (REMOVED, group_id))
                    await tx.execute("UPDATE totals SET sessions = sessions - ?, bytes = bytes - ?", (n, size))
                    await note_hidden(tx, group_id, n)
                    hidden.append(group_id)
            return hidden

        return await self._db.write(body)

    async def hidden_sessions(self) -> list[str]:
        """Return the ids of the sessions of hidden groups."""
        sql = """SELECT sessions.id FROM groups JOIN sessions ON sessions.group_id = groups.id
            WHERE groups.state = ? ORDER BY sessions.id"""
        return [row[0] for row in await self._db.read(lambda tx: tx.fetch(sql, (REMOVED,)))]

    async def unknown(self, session_ids: Sequence[str]) -> list[str]:
        """Return the ids that belong to no stored session."""

        async def body(tx: Connection) -> list[str]:
            sql = "SELECT 1 FROM sessions WHERE id = ?"
            return [session_id for session_id in session_ids if not await tx.fetch(sql, (session_id,))]

        return await self._db.read(body)

    async def erase(self, rows: int) -> bool:
        """Delete about `rows` rows of hidden groups. Returns True if more may be left.

        The caller must first delete the sessions' other data, such as files, because only the rows refer to this data.
        """

        async def body(tx: Connection) -> bool:
            left = rows
            for (group_id,) in await tx.fetch("SELECT id FROM groups WHERE state = ? ORDER BY id", (REMOVED,)):
                sessions = await tx.fetch("SELECT id, priority, bucket FROM sessions WHERE group_id = ?", (group_id,))
                for number, (session_id, priority, bucket) in enumerate(sessions, 1):
                    for table, key in (
                        ("turns", "attempt, turn_index"),
                        ("frozen_turns", "attempt, model, turn_index"),
                        ("timelines", "attempt, part"),
                    ):
                        left -= await tx.execute(
                            f"""DELETE FROM {table} WHERE session_id = ? AND ({key}) IN
                                (SELECT {key} FROM {table} WHERE session_id = ? ORDER BY {key} LIMIT ?)""",
                            (session_id, session_id, left),
                        )
                        if left <= 0:
                            return True
                    await forget_images(tx, session_id)
                    for table in ("session_reports", "failed_calls", "remote_runs"):
                        await tx.execute(f"DELETE FROM {table} WHERE session_id = ?", (session_id,))
                    left -= await tx.execute("DELETE FROM sessions WHERE id = ?", (session_id,))
                    if number == len(sessions):  # all sessions of a group have the same bucket
                        await forget_share(tx, priority, bucket)
                    if left <= 0:
                        return True
                events = await tx.fetch(
                    "SELECT cursor FROM events WHERE group_id = ? ORDER BY cursor LIMIT ?", (group_id, left)
                )
                if events:
                    last = events[-1][0]
                    left -= await tx.execute("DELETE FROM events WHERE group_id = ? AND cursor <= ?", (group_id, last))
                    await tx.execute("UPDATE totals SET removed_event = ? WHERE removed_event < ?", (last, last))
                    await note_erased_events(tx, group_id, last)
                if left <= 0:
                    return True
                await tx.execute("DELETE FROM groups WHERE id = ?", (group_id,))
            return False

        return await self._db.write(body)

    async def shrink(self) -> bool:
        """Free some of the disk space of deleted rows. Returns True if another call would free more."""
        return await self._db.shrink()


def _removable(force: bool) -> str:
    """Return the SQL condition for groups that may be removed. A group gets a `cursor` when it is done, and loses the
    `cursor` when it is hidden."""
    return REMOVABLE if force else f"{ACKNOWLEDGED} AND {REMOVABLE}"


async def _bound(tx: Connection, force: bool) -> tuple[int, ...]:
    """Return the values for the placeholders in `_removable(force)`. With `force`, there are none. Otherwise the only
    value is the lowest position among the admins' consumers."""
    if force:
        return ()
    slowest: int | None = (await tx.fetch("SELECT MIN(cursor) FROM consumers WHERE tenant = ''"))[0][0]
    return (ALL_CURSORS if slowest is None else slowest,)
