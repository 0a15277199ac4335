"""Fills a data folder with a large number of sessions, by copying the rows of one finished group."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path


def multiply(data: Path, group_id: str, copies: int) -> None:
    """Copy the rows of a group and its sessions, without turns and events. Copy number `n` is `n` seconds older than
    the group."""
    with closing(sqlite3.connect(data / "outrider.sqlite3")) as database, database:

        def columns(table: str) -> list[str]:
            return [row[1] for row in database.execute(f"PRAGMA table_info({table})")]

        def copy(table: str, changed: dict[str, str], where: str) -> None:
            names = columns(table)
            values = ", ".join(changed.get(name, name) for name in names)
            sql = f"INSERT INTO {table} ({', '.join(names)}) SELECT {values} FROM numbers, {table} WHERE {where}"
            database.execute(sql, {"group": group_id})

        database.execute("CREATE TEMP TABLE numbers (number INTEGER PRIMARY KEY)")
        database.executemany("INSERT INTO numbers VALUES (?)", ((number,) for number in range(1, copies + 1)))
        new = "printf('g-%016x', number)"
        copy(
            "groups",
            {"id": new, "created": "created - number", "finished": "finished - number", "cursor": "-number",
             "idempotency_key": "NULL"},
            "id = :group",
        )  # fmt: skip
        session = "printf('s-%016x-%d', number, sample_index)"
        changed = {"id": session, "group_id": new, "created": "created - number", "updated": "updated - number"}
        copy("sessions", changed, "group_id = :group")
