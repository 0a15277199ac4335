"""An SQL query reads only the views and its tenant's rows, within its limits. Each way out that SQLite offers is tried,
and is refused with a clear error."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from outrider.errors import Busy, InvalidField
from outrider.store.run_index.index import RunIndex
from outrider.store.run_index.queries import LIMITS, MAX_WAITING, Queries, QueryLimits
from outrider.store.run_index.tables import READ_TABLES, VIEWS
from outrider.store.sqlite import sqlite_store

from .test_run_index import a_done_group

SECRET = "bobs"
"""Id of the other tenant's group. The ids of the group's sessions begin with it."""


@asynccontextmanager
async def alices_queries(folder: Path, limits: QueryLimits = LIMITS) -> AsyncIterator[Queries]:
    async with sqlite_store(folder / "store.sqlite3") as store, RunIndex(store, folder / "runs.sqlite3") as index:
        await a_done_group(store, "alices", tenant="alice")
        await a_done_group(store, SECRET, tenant="bob")
        yield Queries(index, limits=limits)


TABLES = [
    sql
    for table in (*READ_TABLES, "marks", "unread_turns", "sqlite_schema", "sqlite_master", "sqlite_temp_schema")
    for sql in (
        f"SELECT * FROM {table}",
        f"SELECT count(*) FROM {table}",
        f"SELECT 1 FROM main.{table}",
        f"SELECT (SELECT count(*) FROM {table}) FROM sessions",
        f"SELECT * FROM sessions WHERE EXISTS (SELECT 1 FROM {table})",
    )
]
NAMED_AS_VIEWS = [
    sql
    for view in (*(view.name for view in VIEWS), "hidden_", "temp", "hidden_sessions")
    for sql in (
        f"WITH {view} AS (SELECT * FROM kept_sessions) SELECT * FROM {view}",
        f"WITH {view} AS (SELECT count(*) FROM kept_sessions) SELECT * FROM {view}",
        f"WITH {view}(a) AS (SELECT id FROM kept_sessions UNION SELECT id FROM kept_groups) SELECT a FROM {view}",
        f"WITH RECURSIVE {view}(a) AS (SELECT 1 UNION ALL SELECT no FROM kept_groups, {view}) SELECT a FROM {view}",
        f"SELECT * FROM (WITH {view} AS MATERIALIZED (SELECT id FROM kept_sessions) SELECT * FROM {view}) AS {view}",
        f"SELECT * FROM (SELECT id FROM kept_sessions) AS {view}",
    )
]
WAYS_OUT = [
    "ATTACH DATABASE '{path}' AS other",
    "ATTACH ':memory:' AS other",
    "DETACH main",
    "PRAGMA database_list",
    "PRAGMA query_only=0",
    "PRAGMA hard_heap_limit=0",
    "SELECT * FROM pragma_database_list",
    "SELECT * FROM pragma_table_info('kept_sessions')",
    "SELECT * FROM pragma_table_list()",
    "SELECT * FROM dbstat",
    "SELECT * FROM bytecode('SELECT 1')",
    "SELECT * FROM sqlite_dbpage",
    "SELECT * FROM fts5vocab",
    "SELECT load_extension('/tmp/x')",
    "SELECT readfile('/etc/passwd')",
    "SELECT writefile('/tmp/x', 'x')",
    "SELECT edit('x')",
    "SELECT fts3_tokenizer('x')",
    "SELECT sqlite_version()",
    "SELECT last_insert_rowid()",
    "SELECT randomblob(1000)",
    "SELECT zeroblob(1000)",
    "INSERT INTO kept_groups (id) VALUES ('x')",
    "INSERT INTO sessions (id) VALUES ('x')",
    "UPDATE sessions SET reward = 1",
    "DELETE FROM kept_sessions",
    "DELETE FROM sessions RETURNING id",
    "WITH x AS (SELECT 1) DELETE FROM kept_groups",
    "REPLACE INTO marks VALUES ('cursor', 0)",
    "CREATE TABLE x (y)",
    "CREATE TEMP TABLE x AS SELECT * FROM kept_sessions",
    "CREATE TEMP VIEW mine AS SELECT * FROM kept_sessions",
    "CREATE VIRTUAL TABLE x USING fts5(y)",
    "CREATE TEMP TRIGGER t INSTEAD OF INSERT ON sessions BEGIN SELECT 1; END",
    "DROP VIEW sessions",
    "ALTER TABLE kept_groups RENAME TO x",
    "REINDEX",
    "ANALYZE",
    "VACUUM",
    "VACUUM INTO '/tmp/x'",
    "BEGIN",
    "COMMIT",
    "SAVEPOINT a",
    "SELECT 1; SELECT 2",
    "SELECT 1; ATTACH 'x' AS y",
    "SELECT id FROM kept_sessions /* WHERE */",
    "SELECT * FROM json_each((SELECT json_group_array(id) FROM kept_sessions))",
    "SELECT value FROM kept_groups, json_each(kept_groups.labels)",
    "SELECT value FROM json_tree((SELECT labels FROM kept_groups LIMIT 1))",
    "SELECT first_value((SELECT id FROM kept_groups ORDER BY id DESC)) OVER () FROM sessions",
    "SELECT id, count(*) OVER (PARTITION BY (SELECT id FROM kept_groups)) FROM sessions",
    "SELECT sum(reward) FILTER (WHERE EXISTS (SELECT 1 FROM kept_groups)) OVER w FROM sessions WINDOW w AS ()",
    "SELECT * FROM sessions NATURAL JOIN kept_groups",
    "SELECT * FROM sessions LEFT JOIN kept_groups ON 0",
    "SELECT * FROM sessions WHERE id IN kept_groups",
    "SELECT (VALUES ((SELECT id FROM kept_groups)))",
    "SELECT id FROM sessions UNION ALL SELECT id FROM kept_groups",
    "SELECT id FROM sessions EXCEPT SELECT id FROM kept_groups ORDER BY (SELECT max(id) FROM kept_groups)",
    "SELECT 1 LIMIT (SELECT count(*) FROM kept_groups)",
    "EXPLAIN SELECT * FROM kept_sessions",
    "SELECT ?",
    "SELECT CAST(x'ff' AS TEXT)",
    "SELECT :tenant",
    "SELECT",
    "not SQL at all",
    ";",
    "-- only a comment",
    "SELECT 'unfinished",
    "(" * 5000,
    "SELECT " + "(" * 900 + "1" + ")" * 900,
    "SELECT " + "-" * 100 + "1" + "+1" * 50_000,
    "SELECT " + " UNION ALL SELECT ".join(["1"] * 2000),
]
COSTLY = {
    "endless recursion": "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c",
    "endless rows": "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c WHERE x < 0",
    "cross join": "SELECT count(*) FROM " + ", ".join(f"turns AS t{n}" for n in range(30)),
    "large sort": "WITH RECURSIVE c(x, y) AS"
    " (SELECT 1, printf('%.*c', 100000, 'x') UNION ALL SELECT x + 1, y || x FROM c) SELECT * FROM c ORDER BY y DESC",
    "large set": "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)"
    " SELECT count(DISTINCT printf('%.*c', 9000, 'x') || x) FROM c",
    "large text": "WITH RECURSIVE c(x) AS (SELECT 'x' UNION ALL SELECT x || x FROM c) SELECT x FROM c",
}


@pytest.mark.parametrize("tenant", [pytest.param("alice", marks=pytest.mark.deep), None])
async def test_every_way_out_is_refused(tmp_path: Path, tenant: str | None) -> None:
    path = tmp_path / "runs.sqlite3"
    async with alices_queries(tmp_path) as asked:
        before = await asked.run("SELECT * FROM sessions", tenant)
        content = path.read_bytes()
        for sql in [*TABLES, *NAMED_AS_VIEWS, *WAYS_OUT][:: 1 if tenant else 40]:
            with pytest.raises(InvalidField) as refused:
                print(sql[:200], await asked._in_process(sql.format(path=path) if "{path}" in sql else sql, tenant))
            assert refused.value.field == "sql", sql
            assert refused.value.hint, sql
            assert "hidden_" not in refused.value.message or "hidden_" in sql
        assert path.read_bytes() == content
        assert (
            msgspec.json.decode(await asked.run("SELECT * FROM sessions", tenant))["rows"]
            == (msgspec.json.decode(before)["rows"])
        )


async def test_what_a_query_may_do(tmp_path: Path) -> None:
    async with alices_queries(tmp_path) as asked:

        async def rows(sql: str) -> Any:
            return msgspec.json.decode(await asked.run(sql, "alice"))["rows"]

        for view in VIEWS:
            found = await rows(f"SELECT * FROM {view.name}")
            assert found
            assert SECRET not in str(found)
            assert await rows(f"SELECT count(*) FROM {view.name}") == [[len(found)]]
            assert await rows(f"WITH x AS (SELECT * FROM {view.name}) SELECT count(*) FROM x") == [[len(found)]]
        assert await rows("SELECT value FROM groups, json_each(groups.labels) WHERE key = 'run'") == [["r"]]
        assert await rows(
            "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 9) SELECT sum(x) FROM c"
        ) == [[45]]
        assert await rows("SELECT id, row_number() OVER (ORDER BY id) FROM sessions") == [
            ["alices.0", 1],
            ["alices.1", 2],
        ]
        # A common table expression may have the name of a view, but it too reads nothing except views.
        assert await rows("WITH sessions AS (SELECT id FROM groups) SELECT * FROM sessions") == [["alices"]]
        assert await rows("SELECT 9e999, x'00ff', NULL") == [["inf", "00ff", None]]


async def test_rows_and_bytes_are_limited(tmp_path: Path) -> None:
    count = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 20000)"
    async with alices_queries(tmp_path) as asked:
        for sql, least in (
            (f"{count} SELECT x FROM c", 10_000),
            (f"{count} SELECT printf('%.*c', 9000, 'x') FROM c", 900),
        ):
            answer = await asked.run(sql, "alice")
            reply = msgspec.json.decode(answer)
            assert reply["truncated"]
            assert least <= len(reply["rows"]) <= 10_000
            assert len(answer) < (8 << 20) + 1000
        assert not msgspec.json.decode(await asked.run(f"{count} SELECT x FROM c LIMIT 10000", "alice"))["truncated"]


@pytest.mark.deep
@pytest.mark.parametrize("cost", COSTLY)
async def test_a_costly_query_ends_with_an_error(tmp_path: Path, cost: str) -> None:
    async with alices_queries(tmp_path, QueryLimits(seconds=0.3, start_seconds=3.0)) as asked:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        began = asyncio.get_running_loop().time()
        with pytest.raises(InvalidField, match=r"took longer|memory|too big"):
            await asked.run(COSTLY[cost], "alice")
        seconds = asyncio.get_running_loop().time() - began
        ticking.cancel()
        assert ticks > 20 * seconds - 5  # the event loop was not blocked; a low bound, because the machine may be busy


@pytest.mark.deep
async def test_queries_wait_for_their_turn_and_not_without_a_bound(tmp_path: Path) -> None:
    async with alices_queries(tmp_path) as asked:
        asks = [asyncio.create_task(asked.run("SELECT 1", "alice")) for _ in range(MAX_WAITING + 4)]
        done = await asyncio.gather(*asks, return_exceptions=True)
        assert sum(isinstance(each, bytes) for each in done) == MAX_WAITING
        assert sum(isinstance(each, Busy) for each in done) == 4


async def test_the_queries_of_one_tenant_do_not_refuse_those_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = asyncio.Event()

    async def slowly(sql: str, tenant: str | None) -> bytes:
        await (over.wait() if tenant == "alice" else asyncio.sleep(0))
        return sql.encode()

    async with alices_queries(tmp_path) as asked, asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        monkeypatch.setattr(asked, "_in_process", slowly)
        for _ in range(MAX_WAITING):
            tasks.create_task(asked.run("SELECT 1", "alice"))
        await asyncio.sleep(0)
        assert await asked.run("SELECT 2", "bob") == b"SELECT 2"
        with pytest.raises(Busy):
            await asked.run("SELECT 3", "alice")
        over.set()


@pytest.mark.deep
@pytest.mark.parametrize("number_of_queries", [150, pytest.param(500, marks=pytest.mark.nightly)])
async def test_random_queries_never_show_another_tenant(tmp_path: Path, number_of_queries: int) -> None:
    draw = random.Random(34)
    words = [
        *[
            "SELECT",
            "FROM",
            "WHERE",
            "WITH",
            "AS",
            "UNION",
            "ALL",
            "RECURSIVE",
            "JOIN",
            "ON",
            "ORDER",
            "BY",
            "LIMIT",
            "GROUP",
            "EXISTS",
            "IN",
            "NULL",
        ],
        *[
            "(",
            ")",
            ",",
            "*",
            "1",
            "=",
            ".",
            ";",
            "--",
            "/*",
            "'",
            "count(*)",
            "json_each(labels)",
            "sessions",
            "turns",
            "groups",
            "id",
            "s",
            "c",
            "no",
            "labels",
        ],
        *["kept_sessions", "kept_groups", "main.", "temp."],
    ]
    async with alices_queries(tmp_path) as asked:
        assert SECRET.encode() in await asked.run("SELECT id FROM sessions", None)
        views = [f"SELECT * FROM {view.name} AS s JOIN sessions AS c ON 1 WHERE s.rowid IN ( 1 )" for view in VIEWS]
        views += [f"WITH c AS ( SELECT * FROM {view.name} ) SELECT count(*) FROM c , sessions AS s" for view in VIEWS]
        answered = 0
        for number in range(number_of_queries):
            parts = draw.choice(views if number % 2 else [*TABLES, *NAMED_AS_VIEWS, *WAYS_OUT[:60]]).split()
            for _ in range(draw.randrange(1, 3)):
                at = draw.randrange(len(parts) + 1)
                parts[at : at + draw.randrange(2)] = draw.choices(words, k=draw.randrange(1, 3))
            try:
                reply = await asked._in_process(" ".join(parts), "alice")
            except InvalidField:
                continue
            answered += 1
            assert SECRET.encode() not in reply, parts
        assert answered > number_of_queries / 50
