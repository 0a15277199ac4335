"""A PostgreSQL server of the tests' own, in a new folder, over a Unix socket, run by an ordinary user."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import pytest

USER = "outrider"
READY = "database system is ready to accept connections"
SETTINGS = {
    "fsync": "off",  # a server that is killed loses nothing by it, only one whose machine stops
    "shared_buffers": "16MB",
    "max_connections": "50",
    "autovacuum": "off",
    "lc_messages": "C",
}


class PostgresqlServer:
    """`start` and `kill` it as often as wanted; the databases stay."""

    def __init__(self, programs: Path, folder: Path, settings: dict[str, str]) -> None:
        self._programs = programs
        self._settings = settings | {"listen_addresses": "", "unix_socket_directories": str(folder)}
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def create(self) -> None:
        self._folder.chmod(0o755)
        if os.geteuid() == 0:
            shutil.chown(self._folder, "nobody")
        self._run("initdb", "--no-sync", "--username", USER, "--auth=trust", "--encoding=UTF8", "--locale=C", "data")

    def start(self) -> None:
        """Call it in the main thread: the server ends with the thread that has started it."""
        settings = [f"-c{name}={value}" for name, value in self._settings.items()]
        command = [*self._command("postgres"), "-D", "data", *settings]
        while True:
            self._process = subprocess.Popen(command, cwd=self._folder, stderr=subprocess.PIPE, text=True)
            said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
            self._reader = threading.Thread(target=self._read, args=(self._process, said))
            self._reader.start()
            lines = []
            while (line := said.get()) is not None:
                lines.append(line)
                if READY in line:
                    return
            self.kill()
            # The processes of a killed server end a moment after it.
            assert "still in use" in "".join(lines), "".join(lines)

    @property
    def pid(self) -> int:
        """Of the server's first process."""
        assert self._process is not None
        return self._process.pid

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End it: SIGKILL as a crash does, SIGINT as an operator who waits for no client."""
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait()
        self._reader.join()

    @staticmethod
    def _read(process: subprocess.Popen[str], said: queue.SimpleQueue[str | None]) -> None:
        """Read the log to its end: a server whose log is not read stops."""
        assert process.stderr is not None
        with process.stderr as log:
            for line in log:
                said.put(line)
        said.put(None)

    def restart(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.kill(number)
        self.start()

    @property
    def data(self) -> Path:
        """The folder of its files."""
        return self._folder / "data"

    def url(self, database: str) -> str:
        return f"postgresql://{USER}@/{database}?host={self._folder}"

    async def new_database(self) -> str:
        """The URL of an empty database, which was that of the test before: to make one takes 300 files."""
        if not await self.execute("SELECT 1 FROM pg_database WHERE datname = 'test'"):
            await self.execute("CREATE DATABASE test")
        await self.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'test'")
        await self.execute("DROP SCHEMA public CASCADE", "test")
        await self.execute("CREATE SCHEMA public", "test")
        return self.url("test")

    async def execute(self, sql: str, database: str = "postgres") -> list[asyncpg.Record]:
        connection = await asyncpg.connect(self.url(database))
        try:
            return list(await connection.fetch(sql))
        finally:
            await connection.close()

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [*self._command(program), *arguments], cwd=self._folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def _command(self, program: str) -> list[str]:
        """As an ordinary user, because the server refuses to be run by root; it does not outlive the tests."""
        user = ["--reuid=nobody", "--regid=nogroup", "--clear-groups"] if os.geteuid() == 0 else []
        return ["setpriv", *user, "--pdeathsig=KILL", str(self._programs / program)]


def programs() -> Path | None:
    """The folder of the newest version's programs."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found else None


@contextmanager
def postgresql_server(settings: dict[str, str] = SETTINGS) -> Iterator[PostgresqlServer]:
    """A started server; the test is skipped where there is none."""
    folder = programs()
    if folder is None:
        pytest.skip("no PostgreSQL server here (Debian and Ubuntu: apt-get install postgresql)")
    with tempfile.TemporaryDirectory(prefix="outrider-postgresql-") as home:
        server = PostgresqlServer(folder, Path(home), settings)
        server.create()
        server.start()
        try:
            yield server
        finally:
            server.kill(signal.SIGQUIT)
