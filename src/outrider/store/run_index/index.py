"""Keeps the index of runs up to date with the store, and reads it for lists.

The index file stores the cursor of the newest event that the index includes. Later events show what has changed since
then. A new file has no cursor, and is filled from all groups. No event records the removal of a group, so removed
groups are passed to `forget`.

Invariants: after `catch_up`, the index includes all events that were stored before the call, and no group that was
passed to `forget` before the call; only one thread writes to the file.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from outrider.concurrency.cancellation import shielded
from outrider.errors import Busy, OutriderError, ServiceError
from outrider.store.run_index import rows_of_runs
from outrider.store.run_index.tables import TABLES, VERSION
from outrider.store.run_reader import RunChanges
from outrider.store.sqlite import make_private
from outrider.store.store import Store

T = TypeVar("T")

CHORE_SECONDS = 5.0
"""Seconds between two background updates of the index. Updates are frequent, so that only a few changes are left to
copy when a reader waits for the index."""
EVENTS_AT_ONCE = 1000
GROUPS_AT_ONCE = 50
SESSIONS_AT_ONCE = 16
"""Maximum number of sessions whose turns are copied in one step."""
CATCH_UP_SECONDS = 20.0
"""Maximum seconds that a reader waits until the index is up to date. After that, the reader gets Busy. This can happen
while a new file is filled from many sessions."""
READ_SECONDS = 10.0
"""Maximum seconds of one read by the service itself."""
STEPS_BETWEEN_CLOCK_CHECKS = 10_000
"""A read checks its time limit after this many steps of SQLite's virtual machine."""
TASK_LABEL = "task"
"""Label that names the task of a group. Groups without this label have the same task if their instructions are
equal."""
CURSOR, CURSOR_AT, FILLED = "cursor", "cursor_at", "filled"


class RunIndex:
    """The index of one store's runs, in the file `path`: `async with RunIndex(store, path) as index`. If the file is
    damaged or has other tables when it is opened, a new file replaces it. If the file was made for another store, it is
    emptied.

    Methods raise ServiceError if the file cannot be used, and Busy if the index cannot be brought up to date in time.
    """

    def __init__(self, store: Store, path: Path) -> None:
        self.path = path
        self._store = store
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="outrider-run-index-writer")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="outrider-run-index-reader")
        self._written = _OpenFile(path, _open_writer)
        self._read = _OpenFile(path, _open_reader)
        self._checked = False
        """True once the open file is known to belong to this store."""
        self._one_at_a_time = asyncio.Lock()
        self._reads_of: defaultdict[str | None, asyncio.Lock] = defaultdict(asyncio.Lock)
        """One lock for each tenant. Only one read of a tenant is in the reader thread at a time, because all tenants
        share this thread, and a read may take READ_SECONDS."""
        self._gone: set[str] = set()
        """Removed groups that the index may still have."""
        self._cursor = 0
        self._filled = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for executor, close in ((self._reader, self._read.close), (self._writer, self._written.close)):
            await asyncio.get_running_loop().run_in_executor(executor, close)
            executor.shutdown(wait=True)

    def forget(self, group_ids: Iterable[str]) -> None:
        """Report groups that were removed from the store, so that later readers do not see them."""
        self._gone.update(group_ids)

    async def chore(self) -> None:
        """Bring the index up to date, however long it takes. The service calls this every CHORE_SECONDS."""
        async with self._failures():
            more = True
            while more:
                began = time.monotonic()
                more = await self._step() or await self._step_of_turns(None)
                await asyncio.sleep(time.monotonic() - began)  # half of the time is left to other work

    async def catch_up(self, *, turns: bool = False) -> None:
        """Wait until the index includes every event that is stored now and, with `turns`, the turns of all sessions
        that are done now. Raises Busy after CATCH_UP_SECONDS."""
        try:
            async with asyncio.timeout(CATCH_UP_SECONDS), self._failures():
                newest, gone = await self._store.last_event(), set(self._gone)
                await self._on_writer(lambda _: None)  # opens the file again if somebody has removed it
                while not self._checked or not self._filled or self._cursor < newest or gone & self._gone:
                    if not await self._step() and self._filled:
                        break  # the events up to `newest` that are still missing were removed with their groups
                if turns:
                    last = await self._on_writer(_last_unread)
                    while await self._step_of_turns(last):
                        pass
        except TimeoutError:
            raise Busy(
                "the index of runs is being made from the store, and is not complete yet",
                hint="ask again in a minute; the service makes it in the background",
                retry_after=30.0,
            ) from None

    async def read(self, work: Callable[[sqlite3.Connection], T], *, tenant: str | None = None) -> T:
        """Call `work` with a read-only connection to the index, in the reader thread. Reads for the same `tenant` wait
        for each other. Raises Busy after READ_SECONDS."""
        loop = asyncio.get_running_loop()

        def run() -> T:
            db, _ = self._read.connection()
            until = loop.time() + READ_SECONDS
            db.set_progress_handler(lambda: loop.time() > until, STEPS_BETWEEN_CLOCK_CHECKS)
            return work(db)

        async with self._reads_of[tenant], self._failures():
            try:
                # A read cannot be cancelled, so its tenant's next read waits for its end even after a cancellation.
                return await shielded(lambda: loop.run_in_executor(self._reader, run))
            except sqlite3.OperationalError as error:
                if "interrupted" not in str(error):
                    raise
                raise Busy(
                    f"the list took longer than {READ_SECONDS:.0f} s", hint="narrow it with `since` or a label"
                ) from error

    async def _step(self) -> bool:
        """Copy the next changes from the store to the index. Returns True if more changes may be left."""
        async with self._one_at_a_time:
            await self._on_writer(lambda _: None)
            if not self._checked:
                await self._check()
            # Copy `_gone` (the removed groups) before the store is read. A group that is removed after the copy may
            # still be written by this step, but the next step removes it.
            gone = frozenset(self._gone)
            changes = await self._next_changes()
            tasks = await self._tasks_of(changes)
            await self._on_writer(lambda db: self._write(db, changes, tasks, gone))
            self._gone -= gone
            if not self._filled and not changes.more:
                await self._fill_retries()
            return changes.more

    async def _check(self) -> None:
        """Empty the file if it was filled from another store. Add to `_gone` the groups that were removed from the
        store while the file was closed."""
        if self._cursor and await self._store.runs.event_at(self._cursor) != self._cursor_at:
            await self._on_writer(self._empty)
        if self._filled:
            stored = await self._store.runs.group_ids()
            self._gone |= await self._on_writer(lambda db: _group_ids(db) - stored)
        self._checked = True

    async def _next_changes(self) -> RunChanges:
        if self._filled:
            return await self._store.runs.changes(self._cursor, EVENTS_AT_ONCE)
        last = await self._on_writer(_last_group)
        if last is None:
            # Set the cursor before the first group is read. Then every later change has an event after the cursor.
            newest = await self._store.last_event()
            at = await self._store.runs.event_at(newest) or 0.0
            await self._on_writer(lambda db: self._mark(db, newest, at))
        return await self._store.runs.page(last, GROUPS_AT_ONCE)

    async def _tasks_of(self, changes: RunChanges) -> dict[str, str | None]:
        """Return the task of each group that is new to the index, by group id."""
        ids = [group.id for group in changes.groups]
        new = set(await self._on_writer(lambda db: _new_groups(db, ids)))
        tasks: dict[str, str | None] = {}
        for group in changes.groups:
            if group.id in new:
                tasks[group.id] = group.labels.get(TASK_LABEL) or await self._digest_of_task(group.id)
        return tasks

    async def _digest_of_task(self, group_id: str) -> str | None:
        """Return a digest of the group's instruction, or None if the spec cannot be read."""
        with suppress(OutriderError):  # the key that encrypted the spec is missing, or the group was just removed
            instruction = rows_of_runs.instruction_of(await self._store.spec(group_id))
            return None if instruction is None else self._store.digest_of(instruction)
        return None

    def _write(
        self, db: sqlite3.Connection, changes: RunChanges, tasks: dict[str, str | None], gone: frozenset[str]
    ) -> None:
        with db:
            db.execute("BEGIN IMMEDIATE")
            for group in changes.groups:
                rows_of_runs.write_group(db, group, tasks.get(group.id))
            for session in changes.sessions:
                rows_of_runs.write_session(db, session)
            rows_of_runs.write_retries(db, changes.retries)
            rows_of_runs.remove_groups(db, gone)
            moved = self._filled and changes.cursor > self._cursor
            if moved:
                _set_cursor(db, changes.cursor, changes.at)
        if moved:
            self._cursor, self._cursor_at = changes.cursor, changes.at

    async def _fill_retries(self) -> None:
        """Copy all retries: failed attempts after which the session was queued again. This is the last step of filling
        a new file."""
        after = 0
        while True:
            retries, after = await self._store.runs.retries(after, EVENTS_AT_ONCE)
            await self._on_writer(partial(rows_of_runs.write_retries, retries=retries))
            if not after:
                break

        def note(db: sqlite3.Connection) -> None:
            db.execute("INSERT OR REPLACE INTO marks VALUES (?, 1)", (FILLED,))
            self._filled = True

        await self._on_writer(note)

    def _mark(self, db: sqlite3.Connection, cursor: int, at: float) -> None:
        _set_cursor(db, cursor, at)
        self._cursor, self._cursor_at = cursor, at

    def _empty(self, db: sqlite3.Connection) -> None:
        with db:
            db.execute("BEGIN IMMEDIATE")
            for table in _tables(db):
                db.execute(f"DELETE FROM {table}")
        self._cursor, self._cursor_at, self._filled = 0, 0.0, False

    async def _step_of_turns(self, last: int | None) -> bool:
        """Copy the turns of the next few sessions that the table `unread_turns` lists, at most up to the row `last`. If
        `last` is None, there is no such limit. Returns True if more sessions may be left."""
        async with self._one_at_a_time:
            found = await self._on_writer(lambda db: _unread(db, last))
            if not found:
                return False
            packed = await self._store.runs.packed_turns([(id, attempt) for _, _, id, attempt in found])

            def write(db: sqlite3.Connection) -> None:
                with db:
                    db.execute("BEGIN IMMEDIATE")
                    for (_, no, _, _), turns in zip(found, packed, strict=True):
                        rows_of_runs.write_turns(db, no, turns)
                    db.executemany("DELETE FROM unread_turns WHERE place = ?", [(place,) for place, *_ in found])

            await self._on_writer(write)
            return True

    async def _on_writer(self, work: Callable[[sqlite3.Connection], T]) -> T:
        def run() -> T:
            db, opened = self._written.connection()
            if opened:
                marks = dict(db.execute("SELECT name, value FROM marks").fetchall())
                self._filled, self._checked = FILLED in marks, False
                self._cursor, self._cursor_at = int(marks.get(CURSOR, 0)), marks.get(CURSOR_AT, 0.0)
            return work(db)

        return await asyncio.get_running_loop().run_in_executor(self._writer, run)

    @asynccontextmanager
    async def _failures(self) -> AsyncIterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            damaged = getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
            raise ServiceError(
                f"the index of runs failed: {error}",
                hint=f"remove {self.path}: the service makes the file again"
                if damaged
                else f"{self.path} must be writable, and its disk must have room",
            ) from error


class _OpenFile:
    """Keeps a connection to the file at a path, and opens the file again if it was removed or replaced."""

    def __init__(self, path: Path, open_file: Callable[[Path], sqlite3.Connection]) -> None:
        self._path = path
        self._open_file = open_file
        self._db: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        """Device and inode of the open file."""

    def connection(self) -> tuple[sqlite3.Connection, bool]:
        """Return the connection, and True if this call opened it."""
        if self._db is not None and _file_at(self._path) == self._file:
            return self._db, False
        self.close()
        self._db = self._open_file(self._path)
        self._file = _file_at(self._path)
        return self._db, True

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None


def _file_at(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _open_writer(path: Path) -> sqlite3.Connection:
    """Open the file for writing. A file that is damaged, or was created with different TABLES, is replaced."""
    for last in (False, True):
        if not path.exists():
            _remove(path)  # a removed file may leave its write-ahead log behind
        db = _connect(path)
        try:
            db.execute("PRAGMA journal_mode=WAL").fetchall()
            # A loss of power may undo the newest commits. The cursors in these commits are undone, too, so their
            # changes are copied again.
            db.execute("PRAGMA synchronous=NORMAL")
            db.execute("PRAGMA cache_size=-16384")
            found = db.execute("PRAGMA user_version").fetchone()[0]
            if found == VERSION:
                db.execute("SELECT COUNT(*) FROM marks").fetchall()
                return db
            if not db.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall():
                with db:
                    db.execute("BEGIN IMMEDIATE")
                    for sql in TABLES:
                        db.execute(sql)
                    db.execute(f"PRAGMA user_version={VERSION}")
                return db
        except sqlite3.DatabaseError as error:
            db.close()
            if last or error.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise
        db.close()
        _remove(path)
    raise AssertionError("a new file has no tables")


def _connect(path: Path) -> sqlite3.Connection:
    make_private(path)
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _open_reader(path: Path) -> sqlite3.Connection:
    db = _connect(path)
    db.execute("PRAGMA query_only=ON")
    db.execute("PRAGMA temp_store=MEMORY")
    db.execute("PRAGMA cache_size=-32768")
    return db


def _set_cursor(db: sqlite3.Connection, cursor: int, at: float) -> None:
    db.executemany("INSERT OR REPLACE INTO marks VALUES (?, ?)", [(CURSOR, cursor), (CURSOR_AT, at)])


def _tables(db: sqlite3.Connection) -> list[str]:
    sql = "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    return [name for (name,) in db.execute(sql).fetchall()]


def _group_ids(db: sqlite3.Connection) -> set[str]:
    return {id for (id,) in db.execute("SELECT id FROM kept_groups").fetchall()}


def _last_group(db: sqlite3.Connection) -> tuple[float, str] | None:
    found: list[Any] = db.execute(
        "SELECT created, id FROM kept_groups ORDER BY created DESC, id DESC LIMIT 1"
    ).fetchall()
    return (found[0][0], found[0][1]) if found else None


def _new_groups(db: sqlite3.Connection, ids: Sequence[str]) -> list[str]:
    return [id for id in ids if not db.execute("SELECT 1 FROM kept_groups WHERE id = ?", (id,)).fetchall()]


def _last_unread(db: sqlite3.Connection) -> int:
    last: int = db.execute("SELECT COALESCE(MAX(place), 0) FROM unread_turns").fetchone()[0]
    return last


def _unread(db: sqlite3.Connection, last: int | None) -> list[tuple[int, int, str, int]]:
    """Return the next sessions whose turns must still be copied. For each session, return its place in `unread_turns`,
    its number, its id and its attempt."""
    return db.execute(
        """SELECT place, s.no, s.id, s.attempt FROM unread_turns JOIN kept_sessions AS s ON s.no = session_no
            WHERE ? IS NULL OR place <= ? ORDER BY place LIMIT ?""",
        (last, last, SESSIONS_AT_ONCE),
    ).fetchall()
