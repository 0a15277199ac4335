"""Implements `Database` over PostgreSQL. Only one transaction writes at a time, across all processes. Each process runs
up to READERS reading transactions at the same time.

Each writing transaction first takes a lock that only one writer of the database can hold. So results and events become
visible in the order of their cursors: after a reader has seen cursor 7, no new row with a lower cursor can appear.
Neither sequences nor SERIALIZABLE transactions guarantee this.

Writes that arrive during a commit share the next commit and its cost. An acknowledged commit survives a loss of power,
unless the server's setting synchronous_commit is off. Besides the store's tables, there is a table of this module,
`writers`.

Invariant: after a ServiceError, nothing was committed. If the reply to a COMMIT is lost, the writer looks up in the
database whether the batch was committed. It does so before the next write, and repeats the look-up until it gets an
answer or `close` is called.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple, NoReturn, TypeVar
from uuid import uuid4

import asyncpg

from outrider.concurrency.retries import RetryPolicy
from outrider.counts import Histogram
from outrider.errors import InvalidField, OutriderError, ServiceError
from outrider.store.database import Body, Row
from outrider.store.store import Store
from outrider.store.task_key import KeySource

T = TypeVar("T")

MAX_BATCH = 256
"""Maximum number of writes in one commit."""
READERS = 4
CONNECT_SECONDS = 10.0
STATEMENT_SECONDS = 60.0
"""How long the server may take to answer a statement, in seconds. After that, the connection counts as lost."""
FOREVER = 1e7
PATIENCE_SECONDS = 30.0
"""How long a transaction is retried while the server cannot be reached, in seconds. The server may be restarting."""
HANDOVER_SECONDS = 5.0
"""Seconds to wait for the lock that another service holds on the database. After a service is killed, the server may
keep the service's lock for a while."""
PAUSES = RetryPolicy(first=0.05, longest=1.0)

# An advisory lock belongs to one database and is identified by two numbers. The first of ours is LOCKS ("outr" in
# ASCII), and the second is SERVICE or WRITE.
LOCKS = 0x6F757472
SERVICE, WRITE = 1, 2

SESSION_SETTINGS = {
    # With these settings, the server closes a connection if the client's process was stopped or the client's host was
    # lost. Otherwise, the connection could go on holding the lock that all writers need.
    "idle_in_transaction_session_timeout": "15s",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}

# `writers` stores the number of the last batch that each writer committed. A writer that loses the reply to a COMMIT
# looks up here whether the batch was committed. Rows older than a day are deleted, because killed processes leave their
# rows behind.
CREATE_WRITERS = """CREATE TABLE IF NOT EXISTS writers
    (writer TEXT PRIMARY KEY, batch BIGINT NOT NULL, at TIMESTAMPTZ NOT NULL DEFAULT now());
    DELETE FROM writers WHERE at < now() - INTERVAL '1 day'"""
COMMIT_WRITE = """INSERT INTO writers (writer, batch) VALUES ('{}', {})
    ON CONFLICT (writer) DO UPDATE SET batch = excluded.batch, at = excluded.at; COMMIT"""
# With READ COMMITTED, each statement sees all earlier commits. With a stricter isolation level, the whole transaction
# would use one snapshot, taken before the lock is granted. Such a snapshot would lack the changes that others commit
# while this transaction waits for the lock.
BEGIN_WRITE = f"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; SELECT pg_advisory_xact_lock({LOCKS}, {WRITE})"
BEGIN_READ = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
# A connection that this process has lost may still be open on the server and hold locks. So a writer that reconnects
# ends its earlier connections. It finds these connections by their application name, which only this writer uses.
END_LOST = """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE application_name = current_setting('application_name') AND pid <> pg_backend_pid()"""
HOLDER = f"""SELECT pid, application_name, client_addr, backend_start FROM pg_stat_activity JOIN pg_locks USING (pid)
    WHERE locktype = 'advisory' AND classid = {LOCKS} AND objid = {SERVICE} AND granted
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"""

# asyncpg raises InternalClientError if a connection is used while the server closes it.
BROKEN = (TimeoutError, asyncpg.InternalClientError)
FAULTS = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)

HINTS: dict[str, str] = {
    "08": "is the server running, and is this its address?",
    "25006": "this server is a standby: name the primary",
    "28": "name the right user and password, in the URL, in ~/.pgpass or as PGPASSWORD",
    "3D": "create the database: createdb NAME",
    "42501": "make the user the owner of the database: createdb --owner USER NAME",
    "53100": "the server's disk is full: free some space",
    "53300": "the server has no connection left: raise its max_connections",
    "55P03": "another process holds the database: a long migration, or an administrator's statement",
    "57": "the server's log says why",
}
"""Hints for errors of the server. Each key is the first characters of an SQLSTATE code."""


def postgresql_store(url: str, *, sole: bool = True, key: KeySource | None = None) -> Store:
    """Return a store in the PostgreSQL database at `url` (postgresql://USER@HOST/NAME). `sole` is explained at
    `PostgresqlDatabase`."""
    return Store(PostgresqlDatabase(url, sole=sole), key=key)


def without_password(url: str) -> str:
    """Replace the password in the URL by asterisks."""
    scheme, _, rest = url.partition("://")
    credentials, at, place = rest.rpartition("@")
    user, colon, _ = credentials.partition(":")
    return re.sub("password=[^&]*", "password=***", f"{scheme}://{user}{colon and ':***'}{at}{place}")


class PostgresqlDatabase:
    """Implements `Database` over one PostgreSQL database.

    With `sole`, the writer holds a lock that only one service can have. Services set `sole`, so a second service on the
    same database gets a ServiceError, which names the process with the lock. The first write has no time limit, because
    it migrates the schema.
    """

    types: Mapping[str, str] = {"blob": "BYTEA", "serial": "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY"}

    def __init__(
        self, url: str, *, sole: bool = False, patience: float = PATIENCE_SECONDS, limit: float = STATEMENT_SECONDS
    ) -> None:
        self.commits = Histogram()
        self._server = _Server(url, limit)
        self._sole = sole
        self._patience = patience
        self._writer: _Writer | None = None
        self._tasks = asyncio.TaskGroup()
        self._readers = asyncio.Semaphore(READERS)
        self._idle: list[asyncpg.Connection] = []

    async def open(self) -> None:
        """Connect to the server. Raises ServiceError if the database cannot be used."""
        writer = _Writer(self._server, sole=self._sole, patience=self._patience, commits=self.commits)
        await writer.connection()
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        self._tasks.create_task(writer.serve(), name="store writer")
        self._writer = writer

    async def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is None:
            return
        writer.stop()
        await self._tasks.__aexit__(None, None, None)
        while self._idle:
            await _closed(self._idle.pop())

    async def write(self, body: Body[T], *, volatile: bool = False) -> T:
        # `volatile` is ignored. Even volatile changes must survive the end of any process, but PostgreSQL loses an
        # asynchronous commit if the server process is killed.
        if self._writer is None:
            raise ServiceError("the store is not open")
        return await self._writer.put(body)

    async def read(self, body: Body[T]) -> T:
        async with self._readers:
            return await _patiently(lambda: self._read(body), self._patience)

    async def shrink(self) -> bool:
        return False  # autovacuum, which runs on the server, frees the space of deleted rows

    async def _read(self, body: Body[T]) -> T:
        if self._writer is None:
            raise ServiceError("the store is not open")
        raw = self._idle.pop() if self._idle else await self._server.connect("reader")
        try:
            await raw.execute(BEGIN_READ)
            found = await body(_Connection(raw))
            await raw.execute("COMMIT")
        except Exception as error:
            await _roll_back(raw, error)
            self._put_back(raw)
            _fail(error, raw)
        except BaseException:  # after a cancellation, a query may still be running
            raw.terminate()
            raise
        self._put_back(raw)
        return found

    def _put_back(self, raw: asyncpg.Connection) -> None:
        if raw.is_closed():
            return
        if self._writer is None:
            raw.terminate()
        else:
            self._idle.append(raw)


class _Job(NamedTuple):
    body: Body[Any]
    future: asyncio.Future[Any]


class _Unreachable(ServiceError):
    """The connection failed, another service holds the lock, or the server aborted the transaction. A retry may
    succeed."""


class _Connection:
    """Implements `Connection` over an asyncpg connection. Each statement is prepared once."""

    def __init__(self, raw: asyncpg.Connection, limit: float | None = None) -> None:
        self._raw = raw
        self._limit = limit  # time limit of a statement in seconds; None: the connection's own limit

    async def execute(self, sql: str, values: Sequence[Any] = ()) -> int:
        # The reply ends with the number of rows, as in `UPDATE 3` or `INSERT 0 1`. For statements that change no rows,
        # such as `CREATE TABLE`, the reply has no number.
        status: str = await self._raw.execute(_numbered(sql), *values, timeout=self._limit)
        count = status.rpartition(" ")[2]
        return int(count) if count.isdigit() else 0

    async def execute_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> int:
        return len(await self._raw.fetchmany(f"{_numbered(sql)} RETURNING 1", rows, timeout=self._limit))

    async def fetch(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        return [tuple(row) for row in await self._raw.fetch(_numbered(sql), *values, timeout=self._limit)]


class _Server:
    """Opens connections to a server. The connections have an application name that only this process uses.
    Administrators and `_Writer` recognise the connections by this name."""

    def __init__(self, url: str, limit: float) -> None:
        self.shown = without_password(url)
        self.id = uuid4().hex
        self._name = f"{self.id[:8]}, process {os.getpid()} on {socket.gethostname()}"
        self._url = url
        self._limit = limit
        # The server stops waiting for a lock after 80 % of this client's time limit for a statement. Otherwise, the
        # server would still wait after this client has given up.
        self._settings = SESSION_SETTINGS | {"lock_timeout": f"{limit * 800:.0f}ms"}

    async def connect(self, purpose: str) -> asyncpg.Connection:
        settings = self._settings | {"application_name": f"outrider {purpose} {self._name}"[:63]}
        try:
            return await asyncpg.connect(
                self._url, timeout=CONNECT_SECONDS, command_timeout=self._limit, server_settings=settings
            )
        except ValueError:  # not chained, because the ValueError's text may contain a part of the password
            raise InvalidField(
                f"the database's URL cannot be read: {self.shown}",
                field="store",
                hint="write / ? # @ of a password as %2F %3F %23 %40, or keep it out of the URL: PGPASSWORD, ~/.pgpass",
            ) from None
        except FAULTS as error:
            code = getattr(error, "sqlstate", None) or "08"
            reason = str(error) or "it does not answer"
            raise _Unreachable(f"cannot connect to {self.shown}: {reason}", hint=_hint(code)) from error


class _Batch:
    """Bodies (functions that each make one write) that run in one transaction. `results` is set just before the COMMIT
    is sent. It is set to None again if the COMMIT certainly failed."""

    def __init__(self, number: int, bodies: Sequence[Body[Any]]) -> None:
        self.number = number
        self.bodies = bodies
        self.results: list[Any] | None = None


class _Writer:
    """Runs all writes on one connection, from a queue. The queue needs no limit, because each caller waits for its own
    write before it queues another write."""

    def __init__(self, server: _Server, *, sole: bool, patience: float, commits: Histogram) -> None:
        self._server = server
        self._commits = commits
        self._sole = sole
        self._patience = patience
        self._waiting: asyncio.Queue[_Job | None] = asyncio.Queue()
        self._stopping = False
        # the number of the last batch. It starts at the current time, so that a reopened database repeats no number.
        self._batches = time.time_ns()
        self._limit: float | None = FOREVER
        self._raw: asyncpg.Connection | None = None

    def put(self, body: Body[T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait(_Job(body, future))
        return future

    def stop(self) -> None:
        """Make `serve` return after all jobs that are already queued."""
        self._stopping = True
        self._waiting.put_nowait(None)

    async def serve(self) -> None:
        try:
            while (job := await self._waiting.get()) is not None:
                jobs = [job]
                while len(jobs) < MAX_BATCH and not self._waiting.empty():
                    if (job := self._waiting.get_nowait()) is None:
                        self._waiting.put_nowait(None)  # this None ends the loop after the current batch
                        break
                    jobs.append(job)
                await self._settle(jobs)
            if self._raw is not None and not self._raw.is_closed():
                with suppress(*FAULTS):
                    await self._raw.execute("DELETE FROM writers WHERE writer = $1", self._server.id, timeout=1.0)
        finally:
            if self._raw is not None:
                await _closed(self._raw)

    async def connection(self) -> asyncpg.Connection:
        """Return the open connection, or open a new one. With `sole`, a new connection also takes the lock (see
        `_hold`)."""
        if self._raw is None or self._raw.is_closed():
            raw = await self._server.connect("writer")
            try:
                await raw.execute(END_LOST)
                if self._sole:
                    await self._hold(raw)
                await raw.execute(f"{BEGIN_WRITE}; {CREATE_WRITERS}; COMMIT")
            except Exception as error:
                await _roll_back(raw, error)
                raw.terminate()
                _fail(error, raw)
            except BaseException:
                raw.terminate()
                raise
            self._raw = raw
        return self._raw

    async def _hold(self, raw: asyncpg.Connection) -> None:
        """Take the lock that only one service can hold. The lock is held until the connection ends. Raises _Unreachable
        if another service still has the lock after HANDOVER_SECONDS."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + min(HANDOVER_SECONDS, self._patience)
        while not await raw.fetchval(f"SELECT pg_try_advisory_lock({LOCKS}, {SERVICE})"):
            if loop.time() > give_up and (holder := await raw.fetchrow(HOLDER)):
                pid, name, address, since = holder
                raise _Unreachable(
                    f"another service is using {self._server.shown}: {name or 'one of another user'}, from "
                    f"{address or 'the same host'}, since {since:%Y-%m-%d %H:%M:%S %Z} (server process {pid})",
                    hint="stop it, or give this one a database of its own: --store URL",
                )
            await asyncio.sleep(0.1)

    async def _settle(self, jobs: Sequence[_Job]) -> None:
        """Run the jobs in one transaction, and set their futures. If a job fails, each half of the jobs is run in its
        own transaction, and so on, until the failing job runs alone. Only the caller of this job gets the error.
        Savepoints would avoid the repetition, but slow down every batch."""
        self._batches += 1
        batch = _Batch(self._batches, [job.body for job in jobs])
        try:
            results = await _patiently(
                lambda: self._commit(batch),
                self._patience,
                lasting=lambda: batch.results is not None and not self._stopping,
            )
        except Exception as error:  # a body may raise any exception
            if len(jobs) > 1 and not isinstance(error, _Unreachable):
                middle = len(jobs) // 2
                await self._settle(jobs[:middle])
                await self._settle(jobs[middle:])
                return
            for job in jobs:
                if not job.future.done():  # the future is already done if its caller was cancelled
                    job.future.set_exception(error)
        else:
            for job, result in zip(jobs, results, strict=True):
                if not job.future.done():
                    job.future.set_result(result)

    async def _commit(self, batch: _Batch) -> list[Any]:
        """Run the bodies, commit, and return their results. If an earlier try has already committed the batch, return
        the results of that try."""
        raw = await self.connection()
        began = time.perf_counter()
        writer, number = self._server.id, batch.number
        try:
            await raw.execute(BEGIN_WRITE)
            if batch.results is not None:
                # An earlier try sent COMMIT but got no reply. Its transaction has ended, because this transaction now
                # holds the writers' lock.
                sql = "SELECT 1 FROM writers WHERE writer = $1 AND batch = $2"
                if await raw.fetchval(sql, writer, number):
                    await raw.execute("ROLLBACK")
                    return batch.results
                batch.results = None
            connection = _Connection(raw, self._limit)
            results = [await body(connection) for body in batch.bodies]
            batch.results = results
            try:
                await raw.execute(COMMIT_WRITE.format(writer, number))
            except asyncpg.PostgresError as error:
                # After an error of severity ERROR, nothing was committed. After FATAL or PANIC, which end the
                # connection, the COMMIT may still have succeeded.
                if error.severity_en == "ERROR":
                    batch.results = None
                raise
        except Exception as error:
            await _roll_back(raw, error)
            _fail(error, raw)
        self._limit = None
        self._commits.add(time.perf_counter() - began)
        return results


async def _patiently(
    once: Callable[[], Awaitable[T]], patience: float, lasting: Callable[[], bool] = lambda: False
) -> T:
    """Call `once` until it succeeds. After `_Unreachable`, retry for at most `patience` seconds. While `lasting()` is
    True, retry after every error, without a time limit."""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + patience
    tries = 0
    while True:
        try:
            return await once()
        except Exception as error:
            if not lasting() and (not isinstance(error, _Unreachable) or loop.time() >= give_up):
                raise
            await asyncio.sleep(PAUSES.wait(tries))
            tries += 1


async def _roll_back(raw: asyncpg.Connection, error: Exception) -> None:
    """Roll a transaction back after an error. If the rollback fails or takes too long, close the connection."""
    try:
        if isinstance(error, BROKEN):
            raw.terminate()
        elif not raw.is_closed():
            await raw.execute("ROLLBACK")
    except FAULTS:
        raw.terminate()


async def _closed(raw: asyncpg.Connection) -> None:
    try:
        await raw.close(timeout=1.0)
    except FAULTS:
        raw.terminate()


@cache
def _numbered(sql: str) -> str:
    """Replace each `?` in the statement by $1, $2 and so on. No statement has a `?` inside a literal."""
    first, *others = sql.split("?")
    return first + "".join(f"${number}{other}" for number, other in enumerate(others, start=1))


def _hint(code: str) -> str | None:
    return next((hint for start, hint in HINTS.items() if code.startswith(start)), None)


def _fail(error: Exception, raw: asyncpg.Connection) -> NoReturn:
    """Raise the error of a transaction. An error that the database caused is raised as an OutriderError."""
    if isinstance(error, asyncpg.CharacterNotInRepertoireError):
        raise InvalidField("PostgreSQL cannot store text with a NUL character", field="text") from error
    if isinstance(error, OutriderError):
        raise error
    if raw.is_closed() or isinstance(error, asyncpg.SerializationError | asyncpg.DeadlockDetectedError):
        text = str(error) or type(error).__name__
        raise _Unreachable(f"the database broke off a transaction: {text}", hint=HINTS["57"]) from error
    if not isinstance(error, asyncpg.PostgresError) or error.sqlstate[:2] in ("22", "23"):
        raise error  # the statement itself is wrong, so a retry would fail, too
    raise ServiceError(f"the database failed: {error}", hint=_hint(error.sqlstate)) from error
