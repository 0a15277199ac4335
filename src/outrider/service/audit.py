"""The audit log: who called what to change something, when, and with which outcome, as JSON lines in the data folder.

A file and not a table: whoever collects logs can read it, and the API cannot change it. It knows no HTTP. Invariant:
it holds no more than FILES files of FILE_BYTES each, and a line more.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from outrider.concurrency.chores import Failures
from outrider.errors import lacks_means

log = logging.getLogger("outrider.audit")

FILE_BYTES = 16 << 20
FILES = 8


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line. `who` is the name of a token, `place` the address it came from, `call` the method and route, `ids` what
    it named and what it made, `status` how it was answered. `at` is in seconds since the epoch."""

    at: float
    who: str
    role: str
    place: str | None = None
    call: str
    ids: Mapping[str, str] = {}
    status: int


class AuditLog:
    """Appends to `folder`/audit.jsonl; a full file becomes audit.1.jsonl, that one audit.2.jsonl, and so on."""

    def __init__(self, folder: Path, failures: Failures | None = None) -> None:
        self._failures = failures or Failures()
        self._path = folder / "audit.jsonl"
        self._one_at_a_time = asyncio.Lock()

    async def add(self, entry: AuditEntry) -> None:
        """Write a line. A failure is noted and not raised: on a full disk, work must still be possible to cancel. The
        line goes to the log then, each of them."""
        async with self._one_at_a_time:
            try:
                await asyncio.to_thread(self._write, msgspec.json.encode(entry) + b"\n")
            except Exception as error:
                if not lacks_means(error):
                    raise
                self._failures.note("audit log", error)
                log.error("the audit log cannot be written (%s): %s", error, msgspec.json.encode(entry).decode())
            else:
                self._failures.note_success("audit log")

    def _write(self, line: bytes) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, line)
            full = os.fstat(file).st_size >= FILE_BYTES
        finally:
            os.close(file)
        if full:
            for number in range(FILES - 2, -1, -1):
                older = self._numbered(number)
                if older.exists():
                    older.replace(self._numbered(number + 1))

    def _numbered(self, number: int) -> Path:
        return self._path.with_suffix(f".{number}.jsonl") if number else self._path
