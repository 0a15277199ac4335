"""Formats log lines, as text for people or as JSON for programs. A line about a session names the session.

Invariant: no line contains keys or tokens of Outrider, the token given to the formatter, secrets of the session's task,
or values in places where secrets usually are, such as after `password=`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import msgspec

from outrider.errors import storable
from outrider.printable import indented, printable
from outrider.redaction import SHORTEST, redacted


class LoggedSession(msgspec.Struct, frozen=True, kw_only=True):
    """The session attempt that a log line belongs to. `secrets` are texts that no line may contain."""

    group: str
    session: str
    attempt: int
    secrets: Sequence[str] = ()


SESSION: ContextVar[LoggedSession | None] = ContextVar("session of the log", default=None)
"""The session that log lines of the current asyncio task belong to. Set this variable with `logged_for`. Only the
gateway sets it directly, because a context manager for each model call would cost time."""


@contextmanager
def logged_for(session: LoggedSession | None) -> Iterator[None]:
    """Add the session to all lines that are logged in the block, and in asyncio tasks and threads that the block
    starts."""
    reset = SESSION.set(session)
    try:
        yield
    finally:
        SESSION.reset(reset)


class LogFormatter(logging.Formatter):
    """Formats log records and their tracebacks, without secrets and control characters.

    All lines of a record except the first are indented, so that an agent's text in a message cannot look like a
    separate record. If `process` is given, each record contains it as the name of the process. A record about a session
    contains the session's id and attempt, unless the message already contains the id.
    """

    def __init__(self, token: str | None = None, *, process: str = "") -> None:
        named = f"{process.replace('%', '%%')} " if process else ""
        super().__init__(f"%(asctime)s %(levelname)-7s {named}%(name)s: %(message)s")
        self._secrets = _long_enough(token)

    def format(self, record: logging.LogRecord) -> str:
        session = SESSION.get()
        # first, because the session's id would come into the middle of a secret of several lines
        text = redacted(super().format(record), _secrets_of(session, self._secrets))
        if session is not None and session.session not in text:
            first, newline, rest = text.partition("\n")
            text = f"{first} [{session.session}, attempt {session.attempt}]{newline}{rest}"
        return indented(text)


class JsonLogFormatter(logging.Formatter):
    """Formats each log record as one line of JSON. It has `at` (seconds since the epoch), `time` (UTC), `level`,
    `logger` and `message`, and, if they apply, `process`, `group`, `session`, `attempt` and `traceback`."""

    def __init__(self, token: str | None = None, *, process: str = "") -> None:
        super().__init__()
        self._process = process
        self._secrets = _long_enough(token)

    def format(self, record: logging.LogRecord) -> str:
        session = SESSION.get()
        secrets = _secrets_of(session, self._secrets)

        def clean(text: str) -> str:
            return printable(redacted(storable(text), secrets))

        line: dict[str, Any] = {
            "at": record.created,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": clean(record.getMessage()),
        }
        if self._process:
            line["process"] = self._process
        if session is not None:
            line |= {"group": session.group, "session": session.session, "attempt": session.attempt}
        if record.exc_info and record.exc_info[0] is not None:
            line["traceback"] = clean(self.formatException(record.exc_info))
        return msgspec.json.encode(line).decode()


def _long_enough(token: str | None) -> list[str]:
    return [token] if token and len(token) >= SHORTEST else []


def _secrets_of(session: LoggedSession | None, others: Sequence[str]) -> list[str]:
    return [*(() if session is None else session.secrets), *others]
