"""SQLite behind the database seam: one writer thread that commits in batches, readers that never wait for it.

It knows no table. Writes that arrive while a commit is under way share the next one, so the cost of a commit is
paid once for all of them, and a thread of its own waits for the disk. A commit survives the death of the process;
a loss of power may take the commits of the last seconds, never half of one (WAL with synchronous=NORMAL).
Invariant: a body that fails takes nothing with it but its own changes.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from outrider.errors import ServiceError
from outrider.store.database import Body, Row
from outrider.store.sql import SqlStore

T = TypeVar("T")

MAX_BATCH = 256
READERS = 2
BUSY_SECONDS = 5.0
CHECKPOINT_SECONDS = 1.0
CHECKPOINT_PAGES = 16_384
"""The log's length (64 MiB) at which the writer itself waits for the disk, so that the log stays bounded."""

HINTS: dict[int, str] = {
    sqlite3.SQLITE_BUSY: "another program holds the database: is a second service using the same data folder?",
    sqlite3.SQLITE_CANTOPEN: "the data folder must exist and be writable",
    sqlite3.SQLITE_CORRUPT: "the database is damaged: restore a copy, or start with an empty data folder",
    sqlite3.SQLITE_FULL: "the disk is full: free some space",
    sqlite3.SQLITE_IOERR: "the disk failed: look at the system log",
    sqlite3.SQLITE_NOTADB: "the file is not an Outrider database: choose another data folder",
    sqlite3.SQLITE_READONLY: "the database file and its folder must be writable",
}


def sqlite_store(path: Path | None) -> SqlStore:
    """A store in the SQLite file at `path`, whose folder must exist; None keeps it in memory, for tests."""
    return SqlStore(SqliteDatabase(path))


class SqliteDatabase:
    """`Database` over one SQLite file, or over memory (then reads wait for writes)."""

    types: Mapping[str, str] = {"blob": "BLOB", "serial": "INTEGER PRIMARY KEY AUTOINCREMENT"}

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._writes: _Jobs | None = None
        self._reads: _Jobs | None = None
        self._threads: list[_Thread] = []

    async def open(self) -> None:
        """Start the threads. Raises ServiceError when the file cannot be opened."""
        writes = reads = _Jobs("BEGIN IMMEDIATE", MAX_BATCH)
        try:
            # The writer first and alone: it may have to create the file.
            await self._start("writer", writes.serve, writes.stop).opened
            if self._path is not None:
                reads = _Jobs("BEGIN", 1)
                stopping = threading.Event()
                threads = [self._start(f"reader-{n}", reads.serve, reads.stop) for n in range(READERS)]
                threads.append(self._start("checkpoints", lambda raw: _checkpoint(raw, stopping), stopping.set))
                await asyncio.gather(*(thread.opened for thread in threads))
        except BaseException:  # cancelled, too: no thread that was started stays behind
            await self.close()
            raise
        self._writes, self._reads = writes, reads

    async def close(self) -> None:
        self._writes = self._reads = None
        threads, self._threads = self._threads, []
        for thread in threads:  # one by one: of connections that close at once none might put the log away
            thread.stop()
            await thread.ended()

    async def write(self, body: Body[T]) -> T:
        return await _result(self._writes, body)

    async def read(self, body: Body[T]) -> T:
        return await _result(self._reads, body)

    def _start(self, name: str, serve: Callable[[sqlite3.Connection], None], stop: Callable[[], None]) -> _Thread:
        thread = _Thread(f"outrider-store-{name}", self._connect, serve, stop)
        self._threads.append(thread)
        return thread

    def _connect(self) -> sqlite3.Connection:
        target = ":memory:" if self._path is None else self._path
        raw = sqlite3.connect(target, timeout=BUSY_SECONDS, isolation_level=None)
        try:
            raw.execute("PRAGMA journal_mode=WAL").fetchall()
            raw.execute("PRAGMA synchronous=NORMAL")
            raw.execute("PRAGMA foreign_keys=ON")
            raw.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}").fetchall()
        except sqlite3.Error:
            raw.close()
            raise
        return raw


class _Job(NamedTuple):
    body: Body[Any]
    future: asyncio.Future[Any]


class _Outcome(NamedTuple):
    future: asyncio.Future[Any]
    value: Any
    error: Exception | None


class _Connection:
    """`Connection` over a sqlite3 connection."""

    def __init__(self, raw: sqlite3.Connection) -> None:
        self._raw = raw

    def execute(self, sql: str, values: Sequence[Any] = ()) -> int:
        return self._raw.execute(sql, values).rowcount

    def execute_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> int:
        return self._raw.executemany(sql, rows).rowcount

    def fetch(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        return self._raw.execute(sql, values).fetchall()


class _Jobs:
    """Bodies waiting for a transaction, for any number of threads to serve. It needs no bound: each entry is a
    caller that waits for it."""

    def __init__(self, begin: str, batch: int) -> None:
        self._begin = begin
        self._batch = batch
        self._loop = asyncio.get_running_loop()
        self._waiting: SimpleQueue[_Job | None] = SimpleQueue()

    def put(self, body: Body[T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()
        self._waiting.put(_Job(body, future))
        return future

    def stop(self) -> None:
        """Let every serving thread go, once what was put before is done."""
        self._waiting.put(None)

    def serve(self, raw: sqlite3.Connection) -> None:
        while batch := self._next():
            self._loop.call_soon_threadsafe(_deliver, self._settle(raw, batch))

    def _next(self) -> list[_Job]:
        """Wait for a job, then take what else is there; empty when it is time to end."""
        batch: list[_Job] = []
        job = self._waiting.get()
        while job is not None:
            batch.append(job)
            if len(batch) == self._batch:
                return batch
            try:
                job = self._waiting.get_nowait()
            except Empty:
                return batch
        self._waiting.put(None)  # for the next round, and for the other threads
        return batch

    def _settle(self, raw: sqlite3.Connection, batch: Sequence[_Job]) -> list[_Outcome]:
        """Commit the batch in one transaction. When a body fails, the halves are tried apart, so that in the
        end only the failing one is refused; the common case pays for no savepoints."""
        try:
            raw.execute(self._begin)
        except sqlite3.Error as error:
            return [_Outcome(job.future, None, _translated(error)) for job in batch]
        try:
            connection = _Connection(raw)
            outcomes = [_Outcome(job.future, job.body(connection), None) for job in batch]
            raw.execute("COMMIT")
            return outcomes
        except Exception as error:  # a body may raise anything: it is refused, and the rest of its batch is not
            with suppress(sqlite3.Error):  # SQLite may have rolled back already
                raw.execute("ROLLBACK")
            if len(batch) == 1:
                return [_Outcome(batch[0].future, None, _translated(error))]
        middle = len(batch) // 2
        return self._settle(raw, batch[:middle]) + self._settle(raw, batch[middle:])


class _Thread:
    """A thread with its own connection, which `serve` uses until `stop` makes it return.

    `opened` fails with ServiceError when there is no connection to be had.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], sqlite3.Connection],
        serve: Callable[[sqlite3.Connection], None],
        stop: Callable[[], None],
    ) -> None:
        self.stop = stop
        self._connect = connect
        self._serve = serve
        self._loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = self._loop.create_future()
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def ended(self) -> None:
        """Wait until `serve` has returned and the connection is closed."""
        await asyncio.shield(self._closed)
        self._thread.join()  # it has nothing left to do

    def _run(self) -> None:
        try:
            raw = self._connect()
        except sqlite3.Error as error:
            self._report(self.opened, _translated(error))
        else:
            self._report(self.opened)
            try:
                self._serve(raw)
            finally:
                raw.close()
        finally:
            self._report(self._closed)

    def _report(self, future: asyncio.Future[None], error: Exception | None = None) -> None:
        self._loop.call_soon_threadsafe(_deliver, [_Outcome(future, None, error)])


async def _result(jobs: _Jobs | None, body: Body[T]) -> T:
    if jobs is None:
        raise ServiceError("the store is not open")
    return await jobs.put(body)


def _deliver(outcomes: Sequence[_Outcome]) -> None:
    for future, value, error in outcomes:
        if future.done():
            continue  # its caller was cancelled
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


def _checkpoint(raw: sqlite3.Connection, stopping: threading.Event) -> None:
    """Move the log into the database file from time to time, so that no commit has to wait for the disk."""
    while not stopping.wait(CHECKPOINT_SECONDS):
        with suppress(sqlite3.Error):  # a disk that fails here fails the next write, which has a caller to tell
            raw.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()


def _translated(error: Exception) -> Exception:
    if not isinstance(error, sqlite3.Error) or isinstance(error, sqlite3.IntegrityError):
        return error  # what was written is wrong, not the database: another try would come to the same
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte of SQLite's extended codes
    return ServiceError(f"the database failed: {error}", hint=HINTS.get(code))
