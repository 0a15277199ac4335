"""docs/queries.md: the tables of the views match the code, and each query runs; all but two find rows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from outrider.cli.run_filter import OPTIONS
from outrider.schemas import QueryReply
from outrider.store.run_index import queries
from outrider.store.run_index.index import RunIndex
from outrider.store.run_index.queries import Queries
from outrider.store.run_index.tables import VIEWS
from outrider.store.sqlite import sqlite_store
from store.test_run_index import a_done_group

from .pages import code, page

PAGE = page("docs/queries.md")


@asynccontextmanager
async def some_runs(folder: Path) -> AsyncIterator[Queries]:
    async with sqlite_store(folder / "store.sqlite3") as store, RunIndex(store, folder / "runs.sqlite3") as index:
        for number in range(3):
            await a_done_group(store, f"g{number}", reward=number / 2)
        yield Queries(index)


def test_each_view_has_its_table() -> None:
    for view in VIEWS:
        [text] = [part for part in PAGE.text.split("\n### ")[1:] if part.startswith(f"{view.name}\n")]
        assert f"\n{view.about[0].upper()}{view.about[1:]}.\n" in text
        rows = [line for line in text.split("\n## ")[0].splitlines() if line.startswith("| `")]
        assert rows == [f"| `{column.name}` | {column.about} |" for column in view.columns]


async def test_the_ten_queries_run(tmp_path: Path) -> None:
    asked = [block.text for block in PAGE.blocks if block.info == "sql"]
    assert len(asked) == 10
    empty: list[Any] = []
    async with some_runs(tmp_path) as runs:
        for sql in asked:
            reply = msgspec.json.decode(await runs.run(sql, "operator"), type=QueryReply)
            if not reply.rows:
                empty.append(sql)
    # No turn of the test reports cached tokens, and no session has tokens of several versions.
    assert ["cached_tokens" in sql or "max_version >" in sql for sql in empty] == [True] * 2


def test_the_limits_and_the_filters_are_those_of_the_code() -> None:
    [table] = PAGE.tables("Limit")
    limits = {name: text for name, text, *_ in table.rows}
    assert limits["rows"].startswith(f"{queries.LIMITS.rows:,};")
    assert limits["bytes of rows"].startswith(f"{queries.LIMITS.bytes >> 20} MiB;")
    assert limits["time"] == f"{queries.LIMITS.seconds:.0f} seconds"
    assert limits["memory"] == f"{queries.LIMITS.memory >> 20} MiB"
    waiting = queries.MAX_WAITING - 1
    assert limits["queries at once"].startswith(f"{queries.AT_ONCE}, and 1 of each tenant; {waiting} more")
    [table] = PAGE.tables("HTTP")
    documented = [code(cell) for cell in table.column("Command line")]
    assert documented == ["--group" if name == "of_group" else f"--{name.replace('_', '-')}" for name in OPTIONS]
