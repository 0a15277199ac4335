"""Runs SQL queries of users over the index of runs. Each query runs in its own process (`query_program.py`), so that
the query cannot slow down the service or read another tenant's rows."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import msgspec

from outrider.errors import Busy, InvalidField, OutriderError, ServiceError
from outrider.store.run_index.index import RunIndex
from outrider.store.run_index.tables import READ_TABLES, VIEWS

MAX_SQL = 100_000
"""Maximum length of a query, in characters."""
AT_ONCE = 2
"""Maximum number of queries that run at the same time. Of one tenant, one query runs at a time, so that the queries of
one tenant hardly delay those of another."""
MAX_WAITING = 16
"""Maximum number of queries of one tenant that run or wait. A further query gets Busy."""
PROGRAM = Path(__file__).with_name("query_program.py")


class QueryLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one query.

    - `rows`: maximum number of rows in a reply. Further rows are left out.
    - `bytes`: maximum size of a reply's rows, in bytes. Further rows are left out.
    - `seconds`: maximum duration of the query.
    - `start_seconds`: seconds for the start of the query's process and for writing the reply, in addition to `seconds`.
    - `memory`: maximum address space of the query's process, in bytes.
    - `heap`: maximum memory of SQLite in the query's process, in bytes.
    """

    rows: int = 10_000
    bytes: int = 8 << 20
    seconds: float = 5.0
    start_seconds: float = 5.0
    memory: int = 256 << 20
    heap: int = 160 << 20


LIMITS = QueryLimits()


class _Head(msgspec.Struct):
    code: str = ""
    message: str = ""
    hint: str | None = None


class Queries:
    """Runs queries over one index. `run` raises InvalidField for a query that is wrong, forbidden or too expensive. It
    raises Busy if too many queries of the tenant are waiting."""

    def __init__(self, index: RunIndex, *, limits: QueryLimits = LIMITS) -> None:
        self._index = index
        self._limits = limits
        # The query's process runs in another folder, so a relative path would not work there.
        self._path = str(index.path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._turns_of: dict[str | None, asyncio.Lock] = {}
        self._waiting: Counter[str | None] = Counter()
        """Number of queries that run or wait, by tenant. None stands for callers who see the rows of all tenants."""

    async def run(self, sql: str, tenant: str | None) -> bytes:
        """Run a query, and return the JSON of a `schemas.QueryReply`. The query sees the rows of the tenant, or all
        rows if `tenant` is None. The rows reflect every event that was stored before this call, and include the turns
        of all sessions that were done by then."""
        if not sql.strip():
            raise InvalidField("the query is empty", field="sql", hint="such as SELECT * FROM sessions LIMIT 10")
        if len(sql) > MAX_SQL or "\0" in sql:
            raise InvalidField(f"a query has at most {MAX_SQL} characters, and no zero byte", field="sql")
        if (waiting := self._waiting[tenant]) >= MAX_WAITING:
            raise Busy(f"{waiting} queries wait for their turn: one more is not accepted yet", hint="ask again")
        self._waiting[tenant] += 1
        try:
            async with self._turns_of.setdefault(tenant, asyncio.Lock()), self._turns:
                await self._index.catch_up(turns=True)
                return await self._in_process(sql, tenant)
        finally:
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant], self._turns_of[tenant]

    async def _in_process(self, sql: str, tenant: str | None) -> bytes:
        job = {
            "path": self._path,
            "sql": sql.encode("utf-8", "replace").decode(),
            "views": {view.name: view.select(tenant) for view in VIEWS},
            "tables": READ_TABLES,
            "limits": self._limits,
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
            async with asyncio.timeout(self._limits.seconds + self._limits.start_seconds):
                output, _ = await process.communicate(msgspec.json.encode(job))
        except TimeoutError:
            raise self._too_long() from None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        head, newline, reply = output.partition(b"\n")
        if not newline:
            raise self._too_long() if process.returncode in (-24, -9) else self._failed(process.returncode)
        refused = msgspec.json.decode(head, type=_Head)
        if refused.code:
            raise _error(refused)
        return reply

    def _too_long(self) -> InvalidField:
        return InvalidField(
            f"the query took longer than {self._limits.seconds:g} s",
            field="sql",
            hint="narrow it: a WHERE on `created`",
        )

    def _failed(self, code: int | None) -> InvalidField:
        return InvalidField(
            f"the query needs more than {self._limits.memory >> 20} MiB of memory, or its process failed ({code})",
            field="sql",
            hint="narrow it, or add up instead of listing",
        )


def _error(head: _Head) -> OutriderError:
    match head.code:
        case "busy":
            return Busy(head.message, hint=head.hint)
        case "unfit":
            return ServiceError(head.message, hint=head.hint)
        case _:
            return InvalidField(head.message, field="sql", hint=head.hint)
