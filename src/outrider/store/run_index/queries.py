"""Runs SQL queries of users over the index of runs. Each query runs in its own process (`query_program.py`), so that it
cannot slow down the service or read another tenant's rows."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from outrider.errors import Busy, InvalidField, OutriderError, ServiceError
from outrider.store.run_index.index import RunIndex
from outrider.store.run_index.tables import READ_TABLES, VIEWS

MAX_ROWS = 10_000
MAX_SECONDS = 5.0
MAX_MEMORY = 256 << 20
"""Maximum address space of a query's process, in bytes."""
MAX_HEAP = 160 << 20
"""Maximum memory of SQLite in a query's process, in bytes."""
MAX_REPLY = 8 << 20
"""Maximum size of a reply's rows, in bytes. Further rows are left out."""
MAX_SQL = 100_000
"""Maximum length of a query, in characters."""
AT_ONCE = 2
"""Maximum number of queries that run at the same time."""
MAX_WAITING = 16
"""Maximum number of queries that run or wait. A further query gets Busy."""
START_SECONDS = 5.0
"""How many seconds the query's process has, besides MAX_SECONDS, to start and to write its reply."""
PROGRAM = Path(__file__).with_name("query_program.py")


class _Head(msgspec.Struct):
    code: str = ""
    message: str = ""
    hint: str | None = None


class Queries:
    """Runs queries over one index. `run` raises InvalidField for a query that is wrong, forbidden or too expensive. It
    raises Busy if too many queries are waiting."""

    def __init__(self, index: RunIndex) -> None:
        self._index = index
        # The query's process runs in another folder, so a relative path would not work there.
        self._path = str(index.path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0

    async def run(self, sql: str, tenant: str | None) -> bytes:
        """Run a query, and return the JSON of a `schemas.QueryReply`. The query sees the rows of the tenant, or all
        rows if `tenant` is None. The rows reflect every event that was stored before this call, and include the turns
        of all sessions that were done by then."""
        if not sql.strip():
            raise InvalidField("the query is empty", field="sql", hint="such as SELECT * FROM sessions LIMIT 10")
        if len(sql) > MAX_SQL or "\0" in sql:
            raise InvalidField(f"a query has at most {MAX_SQL} characters, and no zero byte", field="sql")
        if self._waiting >= MAX_WAITING:
            raise Busy(f"{self._waiting} queries wait for their turn: one more is not accepted yet", hint="ask again")
        self._waiting += 1
        try:
            async with self._turns:
                await self._index.catch_up(turns=True)
                return await self._in_process(sql, tenant)
        finally:
            self._waiting -= 1

    async def _in_process(self, sql: str, tenant: str | None) -> bytes:
        job = {
            "path": self._path,
            "sql": sql.encode("utf-8", "replace").decode(),
            "views": {view.name: view.select(tenant) for view in VIEWS},
            "tables": READ_TABLES,
            "limits": {
                "rows": MAX_ROWS,
                "seconds": MAX_SECONDS,
                "memory": MAX_MEMORY,
                "heap": MAX_HEAP,
                "bytes": MAX_REPLY,
            },
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            str(PROGRAM),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={},
            cwd="/",
        )
        try:
            async with asyncio.timeout(MAX_SECONDS + START_SECONDS):
                output, _ = await process.communicate(msgspec.json.encode(job))
        except TimeoutError:
            raise _too_long() from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        head, newline, reply = output.partition(b"\n")
        if not newline:
            raise _too_long() if process.returncode in (-24, -9) else _failed(process.returncode)
        refused = msgspec.json.decode(head, type=_Head)
        if refused.code:
            raise _error(refused)
        return reply


def _error(head: _Head) -> OutriderError:
    match head.code:
        case "busy":
            return Busy(head.message, hint=head.hint)
        case "unfit":
            return ServiceError(head.message, hint=head.hint)
        case _:
            return InvalidField(head.message, field="sql", hint=head.hint)


def _too_long() -> InvalidField:
    return InvalidField(
        f"the query took longer than {MAX_SECONDS:.0f} s", field="sql", hint="narrow it: a WHERE on `created`"
    )


def _failed(code: int | None) -> InvalidField:
    return InvalidField(
        f"the query needs more than {MAX_MEMORY >> 20} MiB of memory, or its process failed ({code})",
        field="sql",
        hint="narrow it, or add up instead of listing",
    )
