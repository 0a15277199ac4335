"""Announces the commands that a sandbox runs.

Invariant: each command is announced once when it begins and once when it ends, even if it fails or is cancelled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from outrider.concurrency.events import Feed

MOST_CHARACTERS = 1000
"""Maximum number of characters of a command in an announcement. Longer commands are cut."""


class CommandRun(msgspec.Struct, frozen=True, kw_only=True):
    """A command that a sandbox runs, or one input of a live shell.

    - `number` is unique within the sandbox.
    - `start` and `end` are seconds since the epoch. `end` is None while the command runs.
    - `exit_code` is None while the command runs. It stays None if the command was killed at its time limit or its
      caller was cancelled."""

    number: int
    text: str
    start: float
    end: float | None = None
    exit_code: int | None = None


class CommandFeed(Feed[CommandRun]):
    """Publishes the commands of one sandbox."""

    def __init__(self) -> None:
        super().__init__()
        self._begun = 0

    @contextmanager
    def running(self, text: str) -> Iterator[Callable[[int | None], None]]:
        """Announce a command's beginning when the block is entered, and its end when the block is left. The block
        passes the command's exit code to the yielded function."""
        self._begun += 1
        command = CommandRun(number=self._begun, text=text[:MOST_CHARACTERS], start=time.time())
        code: int | None = None

        def note_exit(exit_code: int | None) -> None:
            nonlocal code
            code = exit_code

        self.publish(command)
        try:
            yield note_exit
        finally:
            self.publish(msgspec.structs.replace(command, end=time.time(), exit_code=code))
