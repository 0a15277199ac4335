"""Faults that have to be injected inside a process: a clock that jumps, a slow disk, a silent or slow engine.

`install` patches the standard library for the first two, before Outrider is imported: `time.time` and `time.time_ns`
get an offset, and a COMMIT of SQLite first waits. Offset and wait are set from outside, in a file that the processes
share; both are 0 in a process that has not called `Knobs.apply_state`. The engine reads its own faults from the file.
Nothing else of the service is changed.
"""

from __future__ import annotations

import mmap
import sqlite3
import struct
import time
from functools import partial
from pathlib import Path
from typing import Any

_OFFSET, _DELAY, _SILENT, _CHUNK = 0, 8, 16, 24
_SIZE = 32
_NUMBER = struct.Struct("d")


class Knobs:
    """The numbers in the shared file at `path`, all 0 at first."""

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(_SIZE)
            self._shared = mmap.mmap(file.fileno(), _SIZE)

    @property
    def clock_offset(self) -> float:
        """Seconds by which `time.time` is ahead of the true time."""
        return self._get(_OFFSET)

    @clock_offset.setter
    def clock_offset(self, seconds: float) -> None:
        _NUMBER.pack_into(self._shared, _OFFSET, seconds)

    @property
    def commit_seconds(self) -> float:
        """Seconds that each commit waits before it is written."""
        return self._get(_DELAY)

    @commit_seconds.setter
    def commit_seconds(self, seconds: float) -> None:
        _NUMBER.pack_into(self._shared, _DELAY, seconds)

    @property
    def engine_silent(self) -> bool:
        """True while the model generates nothing, although the engine's server still responds."""
        return self._get(_SILENT) != 0

    @engine_silent.setter
    def engine_silent(self, silent: bool) -> None:
        _NUMBER.pack_into(self._shared, _SILENT, float(silent))

    @property
    def chunk_seconds(self) -> float:
        """Minimum seconds between two chunks of a reply."""
        return self._get(_CHUNK)

    @chunk_seconds.setter
    def chunk_seconds(self, seconds: float) -> None:
        _NUMBER.pack_into(self._shared, _CHUNK, seconds)

    def apply_state(self) -> None:
        """Apply these numbers, and all later changes of the file, to the clock and the commits of this process."""
        _OBEYED.append(self)

    def close(self) -> None:
        self._shared.close()

    def _get(self, offset: int) -> float:
        number: float = _NUMBER.unpack_from(self._shared, offset)[0]
        return number


_OBEYED: list[Knobs] = []


class _SlowConnection(sqlite3.Connection):
    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        if sql == "COMMIT" and _OBEYED and (seconds := _OBEYED[-1].commit_seconds):
            time.sleep(seconds)
        return super().execute(sql, *values)


def install() -> None:
    """Patch the standard library. Must run before the first import of Outrider, whose classes take `time.time` as a
    default."""
    true_time, true_time_ns = time.time, time.time_ns

    def shifted() -> float:
        return true_time() + (_OBEYED[-1].clock_offset if _OBEYED else 0.0)

    def shifted_ns() -> int:
        return true_time_ns() + (int(_OBEYED[-1].clock_offset * 1e9) if _OBEYED else 0)

    time.time, time.time_ns = shifted, shifted_ns
    sqlite3.connect = partial(sqlite3.connect, factory=_SlowConnection)  # type: ignore[assignment]
