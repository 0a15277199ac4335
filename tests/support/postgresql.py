"""A PostgreSQL server for the tests, in a new folder, over a Unix socket, run by an unprivileged user."""

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
    "fsync": "off",  # without fsync, data is lost only if the machine crashes, not if the server is killed
    "shared_buffers": "16MB",
    "max_connections": "50",
    "autovacuum": "off",
    "lc_messages": "C",
}


class PostgresqlServer:
    """A server that can be started and killed any number of times. Its databases stay."""

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
        """Start the server. Call this in the main thread: the server is killed when the thread that started it ends."""
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
            # A killed server's child processes exit shortly after the server. Until then, the data folder is in use.
            assert "still in use" in "".join(lines), "".join(lines)

    @property
    def pid(self) -> int:
        """Id of the server's first process."""
        assert self._process is not None
        return self._process.pid

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Stop the server. SIGKILL acts like a crash, SIGINT like a stop by an operator that does not wait for
        clients."""
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait()
        self._reader.join()

    @staticmethod
    def _read(process: subprocess.Popen[str], said: queue.SimpleQueue[str | None]) -> None:
        """Read the log to its end, because a server blocks if its log is not read."""
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
        """The folder of the server's files."""
        return self._folder / "data"

    def url(self, database: str) -> str:
        return f"postgresql://{USER}@/{database}?host={self._folder}"

    async def new_database(self) -> str:
        """Return the URL of an empty database. One database is emptied and reused, because creating one writes 300
        files."""
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
        """Return the command for a program. The program runs as an unprivileged user, because the server refuses root,
        and is killed when its parent thread ends."""
        user = ["--reuid=nobody", "--regid=nogroup", "--clear-groups"] if os.geteuid() == 0 else []
        return ["setpriv", *user, "--pdeathsig=KILL", str(self._programs / program)]


def programs() -> Path | None:
    """Return the folder with the programs of the newest installed version, or None."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found else None


@contextmanager
def postgresql_server(settings: dict[str, str] = SETTINGS) -> Iterator[PostgresqlServer]:
    """Yield a running server. Skips the test on machines without PostgreSQL."""
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
