"""The database of a run: opened for the checks, and watched by a trigger for writes that come too late."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import asyncpg
from tests.support.postgresql import PostgresqlServer, programs

from campaign.checks import Finding, Harm
from campaign.starter import descendants
from outrider.store.postgresql import postgresql_store
from outrider.store.sqlite import sqlite_store
from outrider.store.store import Store

TABLE = "CREATE TABLE campaign_stale (session_id TEXT, attempt INTEGER, newest INTEGER, state TEXT);"
STALE = "(SELECT attempt <> NEW.attempt OR lease_until IS NULL FROM sessions WHERE id = NEW.session_id)"
NOTE = "INSERT INTO campaign_stale SELECT id, NEW.attempt, attempt, state FROM sessions WHERE id = NEW.session_id;"
FOUND = "SELECT session_id, attempt, newest, state FROM campaign_stale"
# A trigger checks each turn within the transaction that stores the turn, because only there the current attempt is
# certain.
SQLITE = f"{TABLE} CREATE TRIGGER campaign_watch AFTER INSERT ON turns WHEN {STALE} BEGIN {NOTE} END;"
POSTGRESQL = f"""{TABLE}
    CREATE FUNCTION campaign_note() RETURNS trigger LANGUAGE plpgsql AS
        $$BEGIN IF {STALE} THEN {NOTE} END IF; RETURN NEW; END$$;
    CREATE TRIGGER campaign_watch AFTER INSERT ON turns FOR EACH ROW EXECUTE FUNCTION campaign_note();"""


class StoreUnderTest(Protocol):
    """The store of a run. `url` is the setting of the service, empty for the file in the service's data folder."""

    url: str

    async def watch_turns(self) -> None:
        """Install the trigger. Call this once the service has created its tables."""
        ...

    def open(self) -> Store:
        """Open the store for the checks, when no service uses it."""
        ...

    async def close(self) -> list[Finding]:
        """Return the turns that were stored for an attempt that was not under way, and the resources that the services
        left."""
        ...


class SqliteUnderTest:
    url = ""

    def __init__(self, data: Path) -> None:
        self._file = data / "outrider.sqlite3"

    async def watch_turns(self) -> None:
        raw = sqlite3.connect(self._file, timeout=30)
        raw.executescript(SQLITE)
        raw.close()

    def open(self) -> Store:
        return sqlite_store(self._file)

    async def close(self) -> list[Finding]:
        raw = sqlite3.connect(self._file)
        found = raw.execute(FOUND).fetchall()
        raw.close()
        return [_stale(*row) for row in found]


class Cluster:
    """A PostgreSQL server of the campaign, with a database for each run."""

    def __init__(self, server: PostgresqlServer) -> None:
        self._server = server
        self._breaking = asyncio.Lock()
        """Allows one fault at a time: a server that is down cannot be restarted."""

    async def new_database(self, name: str) -> PostgresqlUnderTest:
        await self._server.execute(f"CREATE DATABASE {name}")
        return PostgresqlUnderTest(self._server, name)

    async def restart(self, number: signal.Signals, *, away: float = 0.0) -> None:
        """Stop the server, and start it again `away` seconds later. The start blocks the event loop, including the
        campaign's consumers. It must run in the main thread, because the server is killed when its starting thread
        ends."""
        async with self._breaking:
            self._server.kill(number)
            await asyncio.sleep(away)
            self._server.start()

    async def freeze(self, seconds: float) -> None:
        """Freeze all processes of the server for `seconds`."""
        async with self._breaking:
            pids = {self._server.pid, *descendants(self._server.pid)}
            _signal_all(pids, signal.SIGSTOP)
            try:
                await asyncio.sleep(seconds)
            finally:
                _signal_all(pids, signal.SIGCONT)


class PostgresqlUnderTest:
    def __init__(self, server: PostgresqlServer, name: str) -> None:
        self.url = server.url(name)
        self._server = server
        self._name = name

    async def watch_turns(self) -> None:
        raw = await asyncpg.connect(self.url)
        await raw.execute(POSTGRESQL)
        await raw.close()

    def open(self) -> Store:
        return postgresql_store(self.url)

    async def close(self) -> list[Finding]:
        """Return the findings, and remove the database."""
        findings = [_stale(*row) for row in await self._server.execute(FOUND, self._name)]
        connected = await self._server.execute(f"SELECT pid FROM pg_stat_activity WHERE datname = '{self._name}'")
        if connected:
            findings.append(Finding(Harm.LEAKED, f"left behind: {len(connected)} connections to the database"))
        await self._server.execute(f"DROP DATABASE {self._name} WITH (FORCE)")
        return findings


def _signal_all(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _stale(session: str, attempt: int, newest: int, state: str) -> Finding:
    return Finding(Harm.STALE_WRITE, f"{session}: a turn of attempt {attempt}, while {newest} was {state}")


@contextmanager
def a_cluster() -> Iterator[Cluster]:
    """Start a PostgreSQL server for the block. Raises SystemExit if PostgreSQL is not installed."""
    folder = programs()
    if folder is None:
        raise SystemExit("no PostgreSQL server here (Debian and Ubuntu: apt-get install postgresql)")
    with tempfile.TemporaryDirectory(prefix="outrider-postgresql-") as home:
        # No settings, so that commits are durable, unlike in the tests' servers.
        server = PostgresqlServer(folder, Path(home), {})
        server.create()
        server.start()
        try:
            yield Cluster(server)
        finally:
            server.kill(signal.SIGQUIT)
