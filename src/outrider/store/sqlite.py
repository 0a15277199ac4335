"""Implements `Database` over SQLite. One thread writes, and commits several writes together. Reader threads never wait
for the writing thread.

Writes that arrive during a commit share the next commit and its cost. Another thread moves SQLite's write-ahead log
into the database file. Every commit survives the end of the process.

A commit with a non-volatile write waits for the disk (synchronous=FULL). This commit and all earlier ones then survive
a loss of power. A commit with only volatile writes does not wait (synchronous=NORMAL). A loss of power may undo such
commits if they were made in the last seconds, but it never undoes only a part of a commit.

Invariant: if a body (the function that makes one write) fails, only the changes of this body are undone.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from outrider.concurrency.chores import Failures
from outrider.counts import Histogram
from outrider.errors import ServiceError
from outrider.store.database import Body, Connection, Row
from outrider.store.store import Store
from outrider.store.task_key import KEY_FILE, KeyFile, KeySource

T = TypeVar("T")

MAX_BATCH = 256
"""Maximum number of writes in one commit."""
READERS = 2
BUSY_SECONDS = 5.0
"""Seconds to wait while another process locks the file."""
CHECKPOINT_SECONDS = 1.0
CHECKPOINTS = "checkpoints of the database"
"""Name under which failed checkpoints appear in the list of failures."""
CHECKPOINT_PAGES = 16_384
"""When the write-ahead log has this many pages (64 MiB), the writer itself moves the log into the file. This limits the
length of the log."""

NORMAL, FULL = 1, 2
"""Values of SQLite's setting `synchronous`. In WAL mode, only a commit with FULL waits for the disk."""

INCREMENTAL = 2
"""Value of SQLite's setting `auto_vacuum` that lets `shrink` free pages."""
SHRINK_PAGES = 64
"""Maximum number of pages (256 KiB) that one call of `shrink` frees. Freeing them keeps the writer busy for a few
milliseconds."""
SPARE = 10
"""`shrink` keeps 1/SPARE of the file's pages free, because writes would be slower if the file shrank and grew all the
time."""

HINTS: dict[int, str] = {
    sqlite3.SQLITE_BUSY: "another program holds the database: is a second service using the same data folder?",
    sqlite3.SQLITE_CANTOPEN: "the data folder must exist and be writable",
    sqlite3.SQLITE_CORRUPT: "the database is damaged: restore a copy, or start with an empty data folder",
    sqlite3.SQLITE_FULL: "the disk is full: free some space",
    sqlite3.SQLITE_IOERR: "the disk failed: look at the system log",
    sqlite3.SQLITE_NOTADB: "the file is not an Outrider database: choose another data folder",
    sqlite3.SQLITE_READONLY: "the database file and its folder must be writable",
}

GONE = "put the data folder back where it was, or restart the service: until then nothing is stored"


def sqlite_store(path: Path | None, failures: Failures | None = None, *, key: KeySource | None = None) -> Store:
    """Return a store in the SQLite file at `path`, whose folder must exist. If `path` is None, the store is in memory,
    for tests. Failed checkpoints are reported to `failures`. `key` encrypts the tasks. By default, the key is in a file
    beside the store's file."""
    if key is None and path is not None:
        key = KeyFile(path.with_name(KEY_FILE))
    return Store(SqliteDatabase(path, failures), key=key)


def make_private(path: Path) -> None:
    """If there is no file at `path`, create an empty file for SQLite. Only the owner can read the file. SQLite gives
    the -wal and -shm files the same mode. Errors are ignored, because SQLite then fails to open the file, too, and
    reports the cause."""
    # O_EXCL, because an existing file must not be opened here: closing it would end the locks that SQLite has in this
    # process.
    with suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


class SqliteDatabase:
    """Implements `Database` over one SQLite file, or in memory. In memory, the writer thread also reads, because a
    second connection would open a separate, empty database."""

    types: Mapping[str, str] = {"blob": "BLOB", "serial": "INTEGER PRIMARY KEY AUTOINCREMENT"}

    def __init__(self, path: Path | None, failures: Failures | None = None) -> None:
        self._path = path
        self._failures = failures or Failures()
        self.commits = Histogram()
        self._writes: _Jobs | None = None
        self._reads: _Jobs | None = None
        self._threads: list[_Thread] = []
        self._file: tuple[int, int] | None = None
        """Device and inode of the open file, once something was written."""

    async def open(self) -> None:
        """Start the threads. Raises ServiceError if the file cannot be opened."""
        writes = reads = _Jobs("BEGIN IMMEDIATE", MAX_BATCH, self._check_file, self.commits)
        try:
            # The writer opens the file before the other threads, because it may have to create the file.
            await self._start("writer", writes.serve, writes.stop).opened
            if self._path is not None:
                reads = _Jobs("BEGIN", 1)
                stopping = threading.Event()
                threads = [self._start(f"reader-{n}", reads.serve, reads.stop) for n in range(READERS)]
                threads.append(self._start("checkpoints", self._checkpointing(stopping), stopping.set))
                await asyncio.gather(*(thread.opened for thread in threads))
        except BaseException:  # the started threads must end after a cancellation, too
            await self.close()
            raise
        self._writes, self._reads = writes, reads

    async def close(self) -> None:
        self._writes = self._reads = self._file = None
        threads, self._threads = self._threads, []
        # The threads end one after another, because only the connection that closes last removes the write-ahead log.
        # If several connections closed at once, each might find another connection still open, and the log would stay.
        for thread in threads:
            thread.stop()
            await thread.ended()

    async def write(self, body: Body[T], *, volatile: bool = False) -> T:
        return await _result(self._writes, body, volatile=volatile)

    async def read(self, body: Body[T]) -> T:
        return await _result(self._reads, body, volatile=True)

    async def shrink(self) -> bool:
        async def body(tx: Connection) -> bool:
            # A file that was created without INCREMENTAL cannot be shrunk in steps. Only VACUUM would shrink it, and
            # VACUUM blocks for minutes.
            if (await tx.fetch("PRAGMA auto_vacuum"))[0][0] != INCREMENTAL:
                return False
            pages, free = [(await tx.fetch(f"PRAGMA {name}"))[0][0] for name in ("page_count", "freelist_count")]
            excess: int = free - pages // SPARE
            for _ in range(min(excess, SHRINK_PAGES)):
                await tx.execute("PRAGMA incremental_vacuum(1)")  # in sqlite3, each execution frees only one page
            return excess > SHRINK_PAGES

        return await self.write(body, volatile=True)

    def _check_file(self) -> None:
        """Raise ServiceError if the file was removed or replaced. SQLite would go on writing to the removed file, and
        these writes would be lost when the process ends."""
        if self._path is None:
            return
        try:
            status = os.stat(self._path)
            found = status.st_dev, status.st_ino
        except OSError as error:
            raise ServiceError(f"the database failed: {self._path}: {error.strerror}", hint=GONE) from error
        self._file = self._file or found
        if found != self._file:
            raise ServiceError(f"the database failed: {self._path} is another file now", hint=GONE)

    def _checkpointing(self, stopping: threading.Event) -> Callable[[sqlite3.Connection], None]:
        loop, failures = asyncio.get_running_loop(), self._failures

        def serve(raw: sqlite3.Connection) -> None:
            """Move the write-ahead log into the database file every second, so that no commit has to wait for this
            work."""
            while not stopping.wait(CHECKPOINT_SECONDS):
                try:
                    raw.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
                except (sqlite3.Error, MemoryError) as error:
                    loop.call_soon_threadsafe(failures.note, CHECKPOINTS, _translated(error))
                else:
                    loop.call_soon_threadsafe(failures.note_success, CHECKPOINTS)

        return serve

    def _start(self, name: str, serve: Callable[[sqlite3.Connection], None], stop: Callable[[], None]) -> _Thread:
        thread = _Thread(f"outrider-store-{name}", self._connect, serve, stop)
        self._threads.append(thread)
        return thread

    def _connect(self) -> sqlite3.Connection:
        if self._path is not None:
            make_private(self._path)
        target = ":memory:" if self._path is None else self._path
        raw = sqlite3.connect(target, timeout=BUSY_SECONDS, isolation_level=None)
        try:
            raw.execute(f"PRAGMA auto_vacuum={INCREMENTAL}")  # takes effect only in an empty file
            raw.execute("PRAGMA journal_mode=WAL").fetchall()
            raw.execute(f"PRAGMA synchronous={NORMAL}")
            raw.execute("PRAGMA foreign_keys=ON")
            raw.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}").fetchall()
        except sqlite3.Error:
            raw.close()
            raise
        return raw


class _Job(NamedTuple):
    body: Body[Any]
    volatile: bool
    future: asyncio.Future[Any]


class _Outcome(NamedTuple):
    future: asyncio.Future[Any]
    value: Any
    error: Exception | None


class _Connection:
    """Implements `Connection` over a sqlite3 connection. Its methods never suspend; they block the thread that calls
    them."""

    def __init__(self, raw: sqlite3.Connection) -> None:
        self._raw = raw

    async def execute(self, sql: str, values: Sequence[Any] = ()) -> int:
        return self._raw.execute(sql, values).rowcount

    async def execute_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> int:
        return self._raw.executemany(sql, rows).rowcount

    async def fetch(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        return self._raw.execute(sql, values).fetchall()


class _Jobs:
    """Queue of bodies that one or more threads run. The queue needs no limit, because each caller waits for its own
    body before it queues another body."""

    def __init__(
        self,
        begin: str,
        batch: int,
        check_file: Callable[[], None] = lambda: None,
        commits: Histogram | None = None,
    ) -> None:
        self._commits = commits
        self._begin = begin
        self._check_file = check_file
        self._batch = batch
        self._loop = asyncio.get_running_loop()
        self._waiting: SimpleQueue[_Job | None] = SimpleQueue()

    def put(self, body: Body[T], *, volatile: bool) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self._loop.create_future()
        self._waiting.put(_Job(body, volatile, future))
        return future

    def stop(self) -> None:
        """Make every serving thread return after all jobs that are already queued."""
        self._waiting.put(None)

    def serve(self, raw: sqlite3.Connection) -> None:
        while batch := self._next():
            self._loop.call_soon_threadsafe(_deliver, self._settle(raw, batch))

    def _next(self) -> list[_Job]:
        """Wait for a job, then take the jobs that are waiting, up to the batch size. Returns an empty list after
        `stop`."""
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
        self._waiting.put(None)  # the next call and the other threads must find this None, too
        return batch

    def _settle(self, raw: sqlite3.Connection, batch: Sequence[_Job]) -> list[_Outcome]:
        """Run a batch of jobs in one transaction. If a job fails, each half of the batch is run in its own transaction,
        and so on, until the failing job runs alone. Only the caller of this job gets the error. Savepoints would avoid
        the repetition, but slow down every batch."""
        began = time.perf_counter()
        try:
            self._check_file()
            raw.execute(f"PRAGMA synchronous={NORMAL if all(job.volatile for job in batch) else FULL}")
            raw.execute(self._begin)
        except (sqlite3.Error, ServiceError, MemoryError) as error:  # a raised error would end the thread
            return [_Outcome(job.future, None, _translated(error)) for job in batch]
        try:
            connection = _Connection(raw)
            outcomes = [_Outcome(job.future, _run(job.body, connection), None) for job in batch]
            raw.execute("COMMIT")
            if self._commits is not None:  # only the writer has a histogram
                self._commits.add(time.perf_counter() - began)
            return outcomes
        except Exception as error:  # a body may raise any exception.
            with suppress(sqlite3.Error):  # SQLite may have rolled back by itself
                raw.execute("ROLLBACK")
            if len(batch) == 1:
                return [_Outcome(batch[0].future, None, _translated(error))]
        middle = len(batch) // 2
        return self._settle(raw, batch[:middle]) + self._settle(raw, batch[middle:])


class _Thread:
    """A thread that opens a connection, and then runs `serve` with this connection. A call of `stop` makes `serve`
    return.

    The future `opened` is done once the connection is open. If the connection cannot be opened, the future fails with
    ServiceError.
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
        self._thread.join()  # does not block, because the thread has nothing left to do

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


def _run(body: Body[T], connection: _Connection) -> T:
    """Run a body without an event loop. The body may await only its connection. The connection never suspends, so one
    `send` runs the whole body. Raises TypeError if the body awaits anything else."""
    coroutine = body(connection)
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    coroutine.close()
    raise TypeError("the body of a transaction awaited something else than its connection")


async def _result(jobs: _Jobs | None, body: Body[T], *, volatile: bool) -> T:
    if jobs is None:
        raise ServiceError("the store is not open")
    return await jobs.put(body, volatile=volatile)


def _deliver(outcomes: Sequence[_Outcome]) -> None:
    for future, value, error in outcomes:
        if future.done():
            continue  # the future is done because its caller was cancelled
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)


def _translated(error: Exception) -> Exception:
    if isinstance(error, MemoryError):  # raised by Python, or by sqlite3 when SQLite has no memory (SQLITE_NOMEM)
        return ServiceError(
            "the database failed: out of memory", hint="the machine, or this process, has no memory left"
        )
    if not isinstance(error, sqlite3.Error) or isinstance(error, sqlite3.IntegrityError):
        return error  # caused by the statement, so it would fail again
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the low byte of an extended code is SQLite's code
    return ServiceError(f"the database failed: {error}", hint=HINTS.get(code))
