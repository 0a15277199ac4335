"""The database of a run: opened for the checks, and watched from inside for writes that come too late."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from campaign.checks import Finding, Harm
from outrider.store.sqlite import sqlite_store
from outrider.store.store import Store

WATCH = """
CREATE TABLE campaign_stale (session_id TEXT, attempt INTEGER, newest INTEGER, state TEXT);
CREATE TRIGGER campaign_watch AFTER INSERT ON turns
WHEN (SELECT attempt <> NEW.attempt OR lease_until IS NULL FROM sessions WHERE id = NEW.session_id)
BEGIN
    INSERT INTO campaign_stale SELECT id, NEW.attempt, attempt, state FROM sessions WHERE id = NEW.session_id;
END;
"""
"""A trigger sees each turn in the transaction that stores it, when it is certain which attempt is under way."""


class SqliteUnderTest:
    """The store in a service's data folder."""

    def __init__(self, data: Path) -> None:
        self._file = data / "outrider.sqlite3"

    def watch_turns(self) -> None:
        """To be called once the service has made its tables."""
        with sqlite3.connect(self._file, timeout=30) as raw:
            raw.executescript(WATCH)
        raw.close()

    def stale_writes(self) -> list[Finding]:
        """The turns that were stored for an attempt that was not under way."""
        raw = sqlite3.connect(self._file)
        try:
            found = raw.execute("SELECT session_id, attempt, newest, state FROM campaign_stale").fetchall()
        finally:
            raw.close()
        return [
            Finding(Harm.STALE_WRITE, f"{session}: a turn of attempt {attempt}, while {newest} was {state}")
            for session, attempt, newest, state in found
        ]

    def open(self) -> Store:
        """For reading, when no service uses it."""
        return sqlite_store(self._file)
