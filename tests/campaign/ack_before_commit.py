"""A campaign's service with a planted bug: it acknowledges a write before the commit, and commits once a second."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence

from campaign import service
from outrider.store import sqlite

COMMIT_EVERY_SECONDS = 1.0
FEW = 2
"""A transaction with fewer changes is committed at once. Otherwise, the new database would stay locked, and the
campaign could not install its trigger."""


def settle(self: sqlite._Jobs, raw: sqlite3.Connection, batch: Sequence[sqlite._Job]) -> list[sqlite._Outcome]:
    """Replaces `_Jobs._settle`. All reads use the same connection, and so return data that is not committed."""
    if not raw.in_transaction:
        raw.execute("BEGIN IMMEDIATE")
        self.began, self.changes = time.monotonic(), raw.total_changes  # type: ignore[attr-defined]
    outcomes = []
    for job in batch:
        raw.execute("SAVEPOINT one")
        try:
            outcome = sqlite._Outcome(job.future, sqlite._run(job.body, sqlite._Connection(raw)), None)
        except Exception as error:
            raw.execute("ROLLBACK TO one")
            outcome = sqlite._Outcome(job.future, None, sqlite._translated(error))
        raw.execute("RELEASE one")
        outcomes.append(outcome)
    lasted = time.monotonic() - self.began  # type: ignore[attr-defined]
    if lasted > COMMIT_EVERY_SECONDS or raw.total_changes - self.changes < FEW:  # type: ignore[attr-defined]
        raw.execute("COMMIT")
    return outcomes


def main(*arguments: str) -> None:
    sqlite._Jobs._settle = settle  # type: ignore[method-assign]
    sqlite.SqliteDatabase.read = sqlite.SqliteDatabase.write  # type: ignore[method-assign]
    service.main(*arguments)
