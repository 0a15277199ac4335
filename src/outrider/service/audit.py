"""Writes the audit log: one JSON line with the caller, the time and the outcome of each call that may change data.

The log is a file in the data folder instead of a table, because log collectors can read files, and API clients cannot
change them. Invariants: the files stay within `AuditLimits`; a failed write leaves no part of its line.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from outrider.concurrency.chores import Failures
from outrider.errors import may_come_from_machine

log = logging.getLogger("outrider.audit")


class AuditLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the audit log.

    - `file_bytes`: a file is full at this size in bytes. It may be longer by one line.
    - `files`: maximum number of files.
    """

    file_bytes: int = 16 << 20
    files: int = 8


LIMITS = AuditLimits()


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the audit log.

    at: seconds since the epoch.
    who, role: the name and role of the caller's token.
    place: the caller's address.
    call: the method and route.
    ids: the ids in the request, and the ids of the objects that the call created.
    status: the HTTP status of the reply.
    """

    at: float
    who: str
    role: str
    place: str | None = None
    call: str
    ids: Mapping[str, str] = {}
    status: int


class AuditLog:
    """Appends lines to audit.jsonl in `folder`. A full file is renamed to audit.1.jsonl, an older audit.1.jsonl to
    audit.2.jsonl, and so on."""

    def __init__(self, folder: Path, failures: Failures | None = None, *, limits: AuditLimits = LIMITS) -> None:
        self._limits = limits
        self._failures = failures or Failures()
        self._path = folder / "audit.jsonl"
        self._one_at_a_time = asyncio.Lock()

    async def add(self, entry: AuditEntry) -> None:
        """Write a line. If a resource such as disk space is exhausted, write the line to the service's log instead, and
        raise no error, because clients must still be able to cancel work."""
        async with self._one_at_a_time:
            try:
                await asyncio.to_thread(self._write, msgspec.json.encode(entry) + b"\n")
            except Exception as error:
                if not may_come_from_machine(error):
                    raise
                self._failures.note("audit log", error)
                log.error("the audit log cannot be written (%s): %s", error, msgspec.json.encode(entry).decode())
            else:
                self._failures.note_success("audit log")

    def _write(self, line: bytes) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            size = os.fstat(file).st_size
            try:
                while line:  # an almost full disk may accept only part of the line
                    line = line[os.write(file, line) :]
            except OSError:
                os.ftruncate(file, size)
                raise
            full = os.fstat(file).st_size >= self._limits.file_bytes
        finally:
            os.close(file)
        if full:
            for number in range(self._limits.files - 2, -1, -1):
                older = self._numbered(number)
                if older.exists():
                    older.replace(self._numbered(number + 1))

    def _numbered(self, number: int) -> Path:
        return self._path.with_suffix(f".{number}.jsonl") if number else self._path
