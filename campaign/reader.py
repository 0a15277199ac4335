"""A consumer that reads the results by cursor, and stores each page together with its cursor.

`main(url, file)` runs the consumer as a process, which may be killed at any moment. Invariant: a page and the cursor
after the page are stored in one transaction, so that the file has each group as often as the service returned it.
"""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import msgspec

from outrider.client.client import AsyncClient
from outrider.errors import OutriderError
from outrider.schemas import GroupView

PAUSE_SECONDS = 0.1


class Reader:
    """A reader of all results. `read` runs until it is cancelled."""

    def __init__(self, file: Path) -> None:
        self._kept = sqlite3.connect(file, isolation_level=None, timeout=30)
        # SQLite need not sync: a kill of the process loses no commit, and the campaign does not crash the machine.
        self._kept.execute("PRAGMA journal_mode=WAL")
        self._kept.execute("PRAGMA synchronous=OFF")
        self._kept.execute("CREATE TABLE IF NOT EXISTS pages (cursor INTEGER, groups BLOB)")
        self._groups: list[GroupView] = []
        self._decoded = 0
        """The rowid of the last page in `_groups`."""

    async def read(self, url: str) -> None:
        async with AsyncClient(url) as client:
            (after,) = self._kept.execute("SELECT COALESCE(MAX(cursor), 0) FROM pages").fetchone()
            while True:
                try:
                    page = await client.results(after=after, wait=5, limit=8, samples=True)
                except OutriderError:
                    await asyncio.sleep(PAUSE_SECONDS)
                    continue
                if page.groups:
                    self._kept.execute(
                        "INSERT INTO pages VALUES (?, ?)", (page.cursor, msgspec.json.encode(page.groups))
                    )
                    after = page.cursor

    def groups(self) -> list[GroupView]:
        """All groups read so far, in order, including groups read by an earlier process with the same file."""
        new = "SELECT rowid, groups FROM pages WHERE rowid > ? ORDER BY rowid"
        for row, page in self._kept.execute(new, (self._decoded,)).fetchall():
            self._groups += msgspec.json.decode(page, type=list[GroupView])
            self._decoded = row
        return list(self._groups)

    def close(self) -> None:
        self._kept.close()


def main(url: str, file: str) -> None:
    asyncio.run(Reader(Path(file)).read(url))
