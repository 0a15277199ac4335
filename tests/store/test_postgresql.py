"""The PostgreSQL database: cursors become visible in order, each write is committed once, and only one service uses the
database. All this holds although connections fail."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest
import pytest_asyncio

from outrider.errors import Conflict, InvalidField, NotFound, ServiceError
from outrider.store.database import Body, Connection
from outrider.store.migrations import FIRST, MIGRATIONS
from outrider.store.postgresql import MAX_BATCH, PostgresqlDatabase, postgresql_store, without_password
from outrider.store.store import Store
from support.postgresql import PostgresqlServer

from .world import group_row, result, start, submit, turn

BACKENDS = "SELECT pid FROM pg_stat_activity WHERE datname = '{}' AND backend_type = 'client backend'"

pytestmark = pytest.mark.deep


@pytest_asyncio.fixture
async def url(postgresql: PostgresqlServer) -> str:
    """The URL of an empty database."""
    return await postgresql.new_database()


@asynccontextmanager
async def numbered(url: str, **options: Any) -> AsyncIterator[PostgresqlDatabase]:
    """Yield an open database with the table `numbers`, whose cursors follow the order of insertion."""
    database = PostgresqlDatabase(url, **options)
    await database.open()
    try:
        create = f"CREATE TABLE IF NOT EXISTS numbers (cursor {database.types['serial']}, number INTEGER UNIQUE)"
        await database.write(lambda tx: tx.execute(create))
        yield database
    finally:
        await database.close()


def insert(value: int) -> Body[int]:
    async def body(tx: Connection) -> int:
        return await tx.execute("INSERT INTO numbers (number) VALUES (?)", (value,))

    return body


def insert_and_fail(value: int) -> Body[int]:
    async def body(tx: Connection) -> int:
        await insert(value)(tx)
        raise Conflict(f"no {value}")

    return body


async def numbers(tx: Connection) -> list[int]:
    return [row[0] for row in await tx.fetch("SELECT number FROM numbers ORDER BY cursor")]


class Held:
    """A body that inserts a number and then waits until `release` is set. `runs` is the number of times that it was
    run."""

    def __init__(self, value: int) -> None:
        self._value = value
        self.entered = asyncio.Event()
        self.release = asyncio.Event()
        self.runs = 0

    async def body(self, tx: Connection) -> None:
        self.runs += 1
        await insert(self._value)(tx)
        self.entered.set()
        await self.release.wait()


def database_of(url: str) -> str:
    return urlsplit(url).path.removeprefix("/")


async def end_backends(server: PostgresqlServer, url: str) -> None:
    await server.execute(BACKENDS.replace("pid", "pg_terminate_backend(pid)", 1).format(database_of(url)))


async def test_a_failing_write_does_not_hurt_its_neighbours(url: str) -> None:
    async with numbered(url) as database:
        held = Held(-1)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(database.write(held.body))
            await held.entered.wait()
            bodies = [insert_and_fail(n) if n % 7 == 3 else insert(n) for n in range(MAX_BATCH + 50)]
            waiting = [tasks.create_task(_outcome(database, body)) for body in bodies]
            await asyncio.sleep(0)  # the writes are in the queue now, behind the held one
            held.release.set()
        refused = [n for n, task in enumerate(waiting) if isinstance(task.result(), Conflict)]
        assert refused == list(range(3, MAX_BATCH + 50, 7))
        assert await database.read(numbers) == [-1, *(n for n in range(MAX_BATCH + 50) if n not in refused)]


async def _outcome(database: PostgresqlDatabase, body: Body[int]) -> int | Exception:
    try:
        return await database.write(body)
    except Exception as error:
        return error


async def test_errors_tell_what_is_worth_another_try(url: str) -> None:
    async with numbered(url) as database:
        await database.write(insert(1))
        with pytest.raises(ServiceError, match="the database failed"):
            await database.write(lambda tx: tx.execute("NONSENSE"))
        with pytest.raises(asyncpg.UniqueViolationError):
            await database.write(insert(1))
        with pytest.raises(asyncpg.DataError):
            await database.write(insert(1 << 40))
        with pytest.raises(ServiceError, match="read-only"):
            await database.read(insert(2))

        async def swallow(tx: Connection) -> None:
            await insert(3)(tx)
            with suppress(asyncpg.PostgresError):
                await tx.execute("NONSENSE")

        with pytest.raises(ServiceError, match="aborted"):  # PostgreSQL's COMMIT would roll back without an error
            await database.write(swallow)
        assert await database.read(numbers) == [1]


async def test_a_cancelled_caller_leaves_the_others_served(url: str) -> None:
    async with numbered(url) as database:
        held = Held(1)
        async with asyncio.TaskGroup() as tasks:
            holder = tasks.create_task(database.write(held.body))
            await held.entered.wait()
            holder.cancel()
            held.release.set()
            await database.write(insert(2))
            reading = tasks.create_task(database.read(lambda tx: tx.fetch("SELECT pg_sleep(100)")))
            while not reading.done():
                await asyncio.sleep(0.01)
                reading.cancel()
        assert holder.cancelled()
        assert await database.read(numbers) == [1, 2]


async def test_closing_commits_what_was_asked_for_before(url: str) -> None:
    async with numbered(url) as database:
        held = Held(1)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(database.write(held.body))
            await held.entered.wait()
            tasks.create_task(database.write(insert(2)))
            await asyncio.sleep(0)
            closing = tasks.create_task(database.close())
            await asyncio.sleep(0)
            held.release.set()
        assert closing.done()
        await database.close()
        for call in (database.write(insert(3)), database.read(numbers)):
            with pytest.raises(ServiceError, match="not open"):
                await call
        await database.open()
        assert await database.read(numbers) == [1, 2]
        assert await database.read(lambda tx: tx.fetch("SELECT * FROM writers")) == []


async def test_no_cursor_becomes_visible_after_a_higher_one(url: str) -> None:
    """Two clients of one database write concurrently. The second waits for the lock until the first has committed.
    Control: without the lock, a transaction that began later commits first, so 4 becomes visible before 3."""
    async with numbered(url) as one, numbered(url) as other:
        held = Held(1)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(one.write(held.body))
            await held.entered.wait()
            second = tasks.create_task(other.write(insert(2)))
            assert await other.read(numbers) == []
            waits = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
            while not await one.read(lambda tx: tx.fetch(waits)):
                assert not second.done()
            held.release.set()
        assert await one.read(numbers) == [1, 2]
        late = await asyncpg.connect(url)
        begun = late.transaction()
        await begun.start()
        await late.execute("INSERT INTO numbers (number) VALUES (3)")
        await (hasty := await asyncpg.connect(url)).execute("INSERT INTO numbers (number) VALUES (4)")
        assert await one.read(numbers) == [1, 2, 4]
        await begun.commit()
        assert await one.read(numbers) == [1, 2, 3, 4]
        await late.close()
        await hasty.close()


async def test_a_consumer_sees_every_event_and_result_of_several_processes(url: str) -> None:
    """The consumer reads pages by cursor while three stores write, and misses nothing."""
    writers, groups = 3, 20

    async def write(store: Store, number: int) -> None:
        for index in range(groups):
            name = f"g{number}-{index}"
            await submit(store, group_row(name, n=1))
            await start(store, f"{name}.0")
            await store.finish(f"{name}.0", 1, result(f"{name}.0", 1))

    async def consume(store: Store, writing: asyncio.Task[list[None]]) -> tuple[list[int], list[int]]:
        events, results = [0], [0]
        while True:
            last = writing.done()
            events += [event.cursor for event in await store.events(after=events[-1], limit=7)]
            results += [group.cursor or 0 for group in await store.results(after=results[-1], limit=3)]
            if last and len(results) > writers * groups and not await store.events(after=events[-1], limit=1):
                return events[1:], results[1:]

    async with (
        postgresql_store(url, sole=False) as first,
        postgresql_store(url, sole=False) as second,
        postgresql_store(url) as third,
        asyncio.TaskGroup() as tasks,
    ):
        writing = asyncio.gather(*(write(store, n) for n, store in enumerate((first, second, third))))
        events, results = await consume(first, tasks.create_task(_wait(writing)))
        assert events == [event.cursor for event in await first.events(after=0, limit=1000)]
        assert len(events) == writers * groups * 4
        assert results == list(range(1, writers * groups + 1))


async def _wait(writing: asyncio.Future[list[None]]) -> list[None]:
    return await writing


async def test_a_transaction_whose_connection_is_lost_is_run_again(url: str, postgresql: PostgresqlServer) -> None:
    async with numbered(url) as database:
        held = Held(1)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(database.write(held.body))
            await held.entered.wait()
            await end_backends(postgresql, url)
            held.release.set()
        assert held.runs == 2
        assert await database.read(numbers) == [1]
        await end_backends(postgresql, url)
        assert await database.read(numbers) == [1]


async def test_a_restart_of_the_server_delays_changes(url: str, postgresql: PostgresqlServer) -> None:
    async with numbered(url) as database:
        await database.read(numbers)
        for number, ending in enumerate((signal.SIGKILL, signal.SIGINT)):
            postgresql.kill(ending)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(database.write(insert(number)))
                seen = tasks.create_task(database.read(numbers))
                for _ in range(100):  # in these rounds, both calls detect that the server is down
                    await asyncio.sleep(0)
                postgresql.start()
            assert set(seen.result()) <= {0, 1}
            assert await database.read(numbers) == list(range(number + 1))


async def test_a_server_that_stays_away_is_a_service_error(url: str, postgresql: PostgresqlServer) -> None:
    async with numbered(url, patience=0.0) as database:
        postgresql.kill()
        try:
            for call in (database.write(insert(1)), database.read(numbers)):
                with pytest.raises(ServiceError) as caught:
                    await call
                assert caught.value.hint
            with pytest.raises(ServiceError, match="cannot connect"):
                async with postgresql_store(url):
                    pass
        finally:
            postgresql.start()
        await database.write(insert(1))
        assert await database.read(numbers) == [1]


class Proxy:
    """A proxy between a `PostgresqlDatabase` and the server. `fault` is the fault of the next commit: with `lose the
    reply`, the connection ends after the server has committed; with `lose the request`, before the server gets the
    commit; with `hang`, the commit is held back and the connection stays open."""

    def __init__(self, url: str, folder: Path) -> None:
        self._server = f"{url.rpartition('host=')[2]}/.s.PGSQL.5432"
        self._folder = folder
        self.url = f"{url.rpartition('host=')[0]}host={folder}"
        self.fault: str | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        server = await asyncio.start_unix_server(self._serve, self._folder / ".s.PGSQL.5432")
        async with server:
            yield
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        server, forth = await asyncio.open_unix_connection(self._server)
        try:
            async with asyncio.TaskGroup() as tasks:
                replies = tasks.create_task(self._pump(server, back))
                while data := await client.read(1 << 16):
                    if b"INSERT INTO writers" in data and self.fault is not None:
                        fault, self.fault = self.fault, None
                        replies.cancel()
                        if fault == "hang":
                            await asyncio.Event().wait()
                        elif fault == "lose the reply":
                            await asyncio.wait([replies])
                            forth.write(data)
                            while b"COMMIT" not in await server.read(1 << 16):
                                pass
                        return
                    forth.write(data)
                replies.cancel()
        finally:
            self._tasks.discard(task)
            for writer in (back, forth):
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            sink.write(data)
        sink.close()


@pytest.mark.parametrize(
    ("fault", "runs"), [("lose the reply", 1), ("lose the request", 2), ("hang", 2)], ids=lambda value: str(value)
)
async def test_nothing_is_committed_twice_when_the_reply_is_lost(
    url: str, tmp_path_factory: pytest.TempPathFactory, fault: str, runs: int
) -> None:
    """If a commit is not acknowledged, the database is searched for the write. The write is run again only if it is
    missing."""
    proxy = Proxy(url, tmp_path_factory.mktemp("pg"))
    async with proxy.running(), numbered(proxy.url, limit=3.0) as database:
        await database.write(insert(0))
        held = Held(1)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(database.write(held.body))
            await held.entered.wait()
            proxy.fault = fault
            held.release.set()
        assert held.runs == runs
        await database.write(insert(2))
        assert await database.read(numbers) == [0, 1, 2]


async def test_a_second_service_is_refused_by_name(url: str) -> None:
    async with postgresql_store(url) as first:
        await submit(first, group_row())
        name = r"another service is using .*: outrider writer \w+, process \d+ on "
        with pytest.raises(ServiceError, match=name) as caught:
            async with Store(PostgresqlDatabase(url, sole=True, patience=0.0)):
                pass
        assert "--store" in str(caught.value.hint)
        async with postgresql_store(url, sole=False) as node:
            await start(node, "g.0")
    async with postgresql_store(url) as second:
        assert (await second.session("g.0")).attempt == 1


async def test_a_service_that_was_replaced_writes_no_more(url: str, postgresql: PostgresqlServer) -> None:
    """The old service loses its connection, and another service takes the lock before the old one reconnects. The old
    service can write again after the other one has closed its store."""
    async with Store(PostgresqlDatabase(url, sole=True, patience=0.0)) as old:
        await submit(old, group_row())
        attempt = await start(old, "g.0")
        postgresql.restart()
        async with postgresql_store(url) as new:
            with pytest.raises(ServiceError, match="another service"):
                await old.add_turn("g.0", attempt, turn())
            assert await new.turns("g.0") == []
        await old.add_turn("g.0", attempt, turn())


async def test_a_connection_that_only_the_server_still_has_is_ended(
    url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A connection that hangs still holds the service's lock. When the service reconnects, it ends the old connection
    and takes the lock again."""
    proxy = Proxy(url, tmp_path_factory.mktemp("pg"))
    async with proxy.running(), Store(PostgresqlDatabase(proxy.url, sole=True, limit=1.0)) as store:
        await submit(store, group_row())
        proxy.fault = "hang"
        await start(store, "g.0")
        assert (await store.session("g.0")).attempt == 1


async def test_services_that_start_at_once_migrate_once(url: str) -> None:
    stores = [postgresql_store(url, sole=False) for _ in range(4)]
    await asyncio.gather(*(store.__aenter__() for store in stores))
    connection = await asyncpg.connect(url)
    try:
        versions = [row[0] for row in await connection.fetch("SELECT version FROM migrations ORDER BY version")]
        assert versions == list(range(FIRST, FIRST + len(MIGRATIONS)))
    finally:
        await connection.close()
        for store in stores:
            await store.__aexit__(None, None, None)


async def test_a_nul_character_is_refused_in_names_and_kept_in_what_was_said(url: str) -> None:
    async with postgresql_store(url) as store:
        with pytest.raises(InvalidField, match="NUL"):
            await submit(store, group_row("g\0"))
        with pytest.raises(InvalidField, match="NUL"):
            await store.group("g\0")
        await submit(store, group_row(key="a\\u0000b"))
        attempt = await start(store, "g.0")
        await store.add_turn("g.0", attempt, turn(text="a\0b\ud800".encode("utf-8", "replace").decode()))
        assert (await store.turns("g.0"))[0].reply.content == "a\0b?"
        with pytest.raises(NotFound):
            await store.group("nobody")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:secret@host:5433/db", "postgresql://me:***@host:5433/db"),
        ("postgresql://me:se%40c:ret@host/db?sslmode=require", "postgresql://me:***@host/db?sslmode=require"),
        ("postgresql:///db?host=/run/pg&user=me&password=secret", "postgresql:///db?host=/run/pg&user=me&password=***"),
        ("postgresql://host/db", "postgresql://host/db"),
        ("postgresql://me:not/quoted@all@host/db", "postgresql://me:***@host/db"),
    ],
)
def test_a_password_is_not_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize("url", ["postgresql://me:sec/ret@host/db", "postgresql://me:secret@host:x/db"])
async def test_a_url_that_cannot_be_read_is_told_without_its_password(url: str) -> None:
    with pytest.raises(InvalidField) as caught:
        async with postgresql_store(url):
            pass
    assert "sec" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert "%2F" in str(caught.value.hint)


@pytest.mark.parametrize(("changed", "hint"), [("/nothing?", "createdb"), ("@nowhere.invalid:1/x?", "running")])
async def test_a_database_that_cannot_be_used_says_why(url: str, changed: str, hint: str) -> None:
    if changed[0] == "/":
        url = url.replace(f"/{database_of(url)}?", changed)
    else:
        url = "postgresql://outrider:secret@localhost:1/x"
    with pytest.raises(ServiceError) as caught:
        async with postgresql_store(url):
            pass
    assert hint in str(caught.value.hint)
    assert "secret" not in str(caught.value)
