"""Runs one SQL query over the index of runs, in a process of its own. It uses only the standard library.

The service starts the program with `python -I -S FILE`, without environment variables, and kills it after a time limit.
The program reads a job (JSON) from standard input. It writes one line of JSON, which is `{}` or an error, and then the
reply.

A query may come from an attacker. These measures confine it:
- The file is opened read-only. SQLite asks an authoriser about each action, and the authoriser allows only SELECT,
  recursion, the functions in FUNCTIONS, and reads of the views.
- The views show only the rows of the caller's tenant. Each view reads a hidden view, and only hidden views may read
  tables. For a read of a table, SQLite gives the authoriser only the name of the innermost view or common table
  expression that contains the read. A query can choose the name of a common table expression, as in
  `WITH sessions AS (SELECT * FROM kept_sessions) ...`. So hidden views have random names, which no query can guess.
- SQLite's memory, the process's address space and processor time, and the number and size of rows are limited.

Before the program runs the query, it tries such attacks itself. If one of them works, the program refuses the query.
"""

from __future__ import annotations

import json
import math
import os
import resource
import secrets
import sqlite3
import sys
import time

TYPE_CHECKING = False  # importing `typing` would make up a tenth of the program's start
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

FUNCTIONS = frozenset(
    [
        "abs",
        "avg",
        "changes",
        "char",
        "coalesce",
        "count",
        "cume_dist",
        "date",
        "datetime",
        "dense_rank",
        "first_value",
        "floor",
        "format",
        "glob",
        "group_concat",
        "hex",
        "ifnull",
        "iif",
        "instr",
        "json",
        "json_array",
        "json_array_length",
        "json_each",
        "json_extract",
        "json_group_array",
        "json_group_object",
        "json_object",
        "json_quote",
        "json_tree",
        "json_type",
        "json_valid",
        "julianday",
        "lag",
        "last_value",
        "lead",
        "length",
        "like",
        "likelihood",
        "likely",
        "ln",
        "log",
        "log10",
        "log2",
        "lower",
        "ltrim",
        "max",
        "min",
        "nth_value",
        "ntile",
        "nullif",
        "percent_rank",
        "pow",
        "power",
        "printf",
        "quote",
        "rank",
        "replace",
        "round",
        "row_number",
        "rtrim",
        "sign",
        "sqrt",
        "strftime",
        "substr",
        "substring",
        "sum",
        "time",
        "total",
        "total",
        "trim",
        "trunc",
        "typeof",
        "unicode",
        "unixepoch",
        "unlikely",
        "upper",
        "->",
        "->>",
        "ceil",
        "ceiling",
        "exp",
        "mod",
        "row_number",
        "string_agg",
        "concat",
        "concat_ws",
    ]
)
TABLE_FUNCTIONS = frozenset({"json_each", "json_tree"})
STEPS_BETWEEN_CLOCK_CHECKS = 2000
"""A query checks its time limit after this many steps of SQLite's virtual machine."""
MAX_TEXT = 1_000_000
"""Maximum size of one value, and of the query, in bytes."""
NAMES = {value: name[7:] for name, value in vars(sqlite3).items() if name.startswith("SQLITE_") and name[7:] in {
    "CREATE_INDEX", "CREATE_TABLE", "CREATE_TEMP_INDEX", "CREATE_TEMP_TABLE", "CREATE_TEMP_TRIGGER", "CREATE_TEMP_VIEW",
    "CREATE_TRIGGER", "CREATE_VIEW", "DELETE", "DROP_INDEX", "DROP_TABLE", "DROP_TEMP_INDEX", "DROP_TEMP_TABLE",
    "DROP_TEMP_TRIGGER", "DROP_TEMP_VIEW", "DROP_TRIGGER", "DROP_VIEW", "INSERT", "PRAGMA", "READ", "SELECT",
    "TRANSACTION", "UPDATE", "ATTACH", "DETACH", "ALTER_TABLE", "REINDEX", "ANALYZE", "CREATE_VTABLE", "DROP_VTABLE",
    "FUNCTION", "SAVEPOINT", "RECURSIVE",
}}  # fmt: skip
"""Names of the actions that an authoriser decides on, by number."""


class QueryRefused(Exception):
    """The query is refused. `args` are a code (`field`, `busy` or `unfit`), a message and a hint."""


class QueryGuard:
    """SQLite's authoriser for one query, which allows or denies actions."""

    def __init__(self, views: Iterable[str], tables: Iterable[str], real: Iterable[str]) -> None:
        """views: the views that the query may read.
        tables: the tables that these views read.
        real: names of all tables and indexes in the file, in lower case."""
        self._real = frozenset((*real, *views))
        self.hidden = {name: f"hidden_{secrets.token_hex(16)}" for name in views}
        self._readable = frozenset((*views, *self.hidden.values()))
        self._within = frozenset(self.hidden.values())
        self._tables = frozenset(tables)
        self.refusal: str | None = None
        """The last refused action, in words."""

    def __call__(
        self, action: int, first: str | None, second: str | None, schema: str | None, within: str | None
    ) -> int:
        if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE):
            return sqlite3.SQLITE_OK
        if action == sqlite3.SQLITE_READ:
            if schema == "temp" and first in self._readable:
                return sqlite3.SQLITE_OK
            if schema == "main" and first in self._tables and within in self._within:
                return sqlite3.SQLITE_OK
            if first in TABLE_FUNCTIONS:
                return sqlite3.SQLITE_OK
            # Allow a query to read a common table expression without any of its columns, as in `SELECT count(*) FROM
            # ...`. For such a read, SQLite's report names neither a column nor a schema.
            if (
                first
                and not second
                and schema is None
                and first.lower() not in self._real
                and not first.startswith("sqlite_")
            ):
                return sqlite3.SQLITE_OK
            self.refusal = f"the table {first} cannot be read"
        elif action == sqlite3.SQLITE_FUNCTION:
            if (second or "").lower() in FUNCTIONS:
                return sqlite3.SQLITE_OK
            self.refusal = f"the function {second} is not allowed"
        else:
            self.refusal = f"a query only reads: {NAMES.get(action, 'this statement').replace('_', ' ')} is not allowed"
        return sqlite3.SQLITE_DENY


def main() -> None:
    job = json.load(sys.stdin)
    try:
        reply = answer(job)
    except QueryRefused as refused:
        head, reply = dict(zip(("code", "message", "hint"), refused.args, strict=True)), ""
    except sqlite3.OperationalError as error:  # for example, the file was just being replaced
        head, reply = {"code": "busy", "message": f"the index of runs: {error}", "hint": "ask again"}, ""
    else:
        head = {}
    sys.stdout.write(f"{json.dumps(head)}\n{reply}")
    sys.stdout.flush()
    os._exit(0)


def answer(job: dict[str, Any]) -> str:
    """Run a job's query, and return the reply as JSON. Raises QueryRefused."""
    limits = job["limits"]
    began = time.monotonic()
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limits["seconds"]) + 1,) * 2)
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory"],) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    db = sqlite3.connect(f"file:{job['path']}?mode=ro", uri=True, isolation_level=None, timeout=2.0)
    for pragma in (f"hard_heap_limit={limits['heap']}", "temp_store=MEMORY", "cache_size=-32768", "mmap_size=0"):
        db.execute(f"PRAGMA {pragma}").fetchall()
    real = [name.lower() for (name,) in db.execute("SELECT name FROM sqlite_schema").fetchall()]
    guard = QueryGuard(job["views"], job["tables"], real)
    for name, sql in job["views"].items():
        db.execute(f"CREATE TEMP VIEW {guard.hidden[name]} AS {sql}")
        db.execute(f"CREATE TEMP VIEW {name} AS SELECT * FROM {guard.hidden[name]}")
    # Use each allowed table function once before the authoriser is set. SQLite creates a table function when the
    # function is first used, and the authoriser would refuse some of the actions of the creation.
    for name in TABLE_FUNCTIONS:
        db.execute(f"SELECT * FROM {name}('[]')").fetchall()
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_TEXT)
    db.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, MAX_TEXT)
    db.setlimit(sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 200)
    db.setlimit(sqlite3.SQLITE_LIMIT_COMPOUND_SELECT, 50)
    db.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    db.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 200)
    db.set_authorizer(guard)
    check_confinement(db, job["tables"], next(iter(job["views"])))
    until = began + limits["seconds"]
    db.set_progress_handler(lambda: time.monotonic() > until, STEPS_BETWEEN_CLOCK_CHECKS)
    guard.refusal = None
    try:
        cursor = db.execute(job["sql"])
        if cursor.description is None:
            raise QueryRefused("field", "the query has no columns", "write one SELECT")
        return encoded(cursor, limits, began)
    except (sqlite3.Error, sqlite3.Warning, MemoryError, OverflowError, ValueError) as error:
        raise refusal_of(error, guard, limits) from None


def check_confinement(db: sqlite3.Connection, tables: list[str], view: str) -> None:
    """Raise QueryRefused if SQLite allows one of three attacks: reading a table by its name, reading a table under the
    name of a view, or reading the schema."""
    for sql in (
        f"SELECT no FROM {tables[0]}",
        f"WITH {view} AS (SELECT no FROM {tables[0]}) SELECT no FROM {view}",
        "SELECT name FROM sqlite_schema",
    ):
        try:
            db.execute(sql)
        except sqlite3.DatabaseError:
            continue
        raise QueryRefused("unfit", f"SQLite {sqlite3.sqlite_version} does not confine queries", "use another Python")


def encoded(cursor: sqlite3.Cursor, limits: Mapping[str, float], began: float) -> str:
    """Return the columns and rows as JSON, up to the maximum number of rows or bytes."""
    columns = [column[0] for column in cursor.description]
    rows: list[str] = []
    size, truncated = 0, False
    for row in cursor:
        if len(rows) == limits["rows"]:
            truncated = True
            break
        text = json.dumps([plain(value) for value in row])
        size += len(text) + 1
        if size > limits["bytes"]:
            truncated = True
            break
        rows.append(text)
    head = json.dumps({"columns": columns, "truncated": truncated, "seconds": round(time.monotonic() - began, 4)})
    return f'{head[:-1]}, "rows": [{",".join(rows)}]}}'


def plain(value: object) -> object:
    """Convert a value that JSON cannot express: bytes to hexadecimal digits, infinity to text."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def refusal_of(error: Exception, guard: QueryGuard, limits: Mapping[str, float]) -> QueryRefused:
    text = str(error)
    if text.startswith("vtable constructor failed: "):
        return QueryRefused("field", f"the table function {text[27:]} is not allowed", "json_each and json_tree are")
    if guard.refusal is not None and any(each in text for each in ("prohibited", "not authorized", "denied")):
        return QueryRefused("field", guard.refusal, "a query reads the views of docs/queries.md")
    if text.startswith("cannot modify"):
        return QueryRefused("field", "a query only reads: no view can be changed", "write one SELECT")
    if "interrupted" in text:
        message = f"the query took longer than {limits['seconds']:g} s"
        return QueryRefused("field", message, "narrow it: a WHERE on `created`, fewer joins, an end for a recursion")
    if isinstance(error, MemoryError) or "out of memory" in text:
        message = f"the query needs more than {limits['memory'] / (1 << 20):.0f} MiB of memory"
        return QueryRefused("field", message, "narrow it, or add up instead of listing")
    if "locked" in text or "busy" in text:
        return QueryRefused("busy", f"the index of runs is busy: {text}", "ask again")
    if "You can only execute one statement" in text:
        return QueryRefused("field", "only one statement is run", "write one SELECT")
    if "bindings" in text or "binding" in text:
        return QueryRefused(
            "field", "the query has placeholders, and no values are taken", "write the values as literals"
        )
    return QueryRefused("field", f"SQLite refuses the query: {text}", "the views and columns are in docs/queries.md")


if __name__ == "__main__":
    main()
