"""Detects stalls of the event loop, counts the stalls, and logs the loop's stack.

All sessions share one event loop, so a blocked loop stops all sessions. A late timer shows that the loop was blocked,
or that the process got no processor. While the loop is blocked, a thread samples the loop's stack. Invariant: a stall
of STALL seconds or more is counted exactly once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from types import FrameType
from typing import NamedTuple, Self

from outrider.schemas import StallStats

log = logging.getLogger("outrider.concurrency.watchdog")

PERIOD = 0.01
"""Seconds between two runs of the timer."""
STALL = 0.05
"""Minimum length of a stall in seconds. Shorter delays are normal when many sessions run."""
LOOK = STALL / 2
"""Seconds between two samples of the sampling thread."""
LOG_SECONDS = 60.0
"""Minimum seconds between two log lines. The first stall gets its own line. Later stalls are summed up in one line per
minute."""
FRAMES = 4
"""Number of innermost frames of the loop's stack in a log line."""
MOST = 0.5
"""The fraction of a stall that `kind_of` takes for "most of the time"."""


class StallKind(StrEnum):
    """The cause of a stall: the loop was blocked from within the process, or the process did not run."""

    BLOCKED = "blocked"
    STARVED = "starved"


class StallEvidence(NamedTuple):
    """Measurements of one stall.

    `stalled`: the length of the stall in seconds.
    `waited`: the seconds that the loop's thread spent in the kernel's run queue, or None if the kernel does not report
        them.
    `worked`: the processor time of all threads together, in seconds.
    `looks`: the number of samples by the sampling thread.
    """

    stalled: float
    waited: float | None
    worked: float
    looks: int


def kind_of(seen: StallEvidence) -> StallKind:
    """Return the kind of a stall, by the first rule that applies:

    - This process worked most of the time: something in the process held the loop, the interpreter or the processors
      (blocked).
    - The loop's thread was ready to run most of the time and got no processor (starved).
    - The sampling thread ran most of the time: the loop's thread waited for a system call (blocked).
    - Otherwise the whole process did not run: stopped by a signal, suspended with its machine, throttled, or swapped
      out (starved).
    """
    most = seen.stalled * MOST
    if seen.worked >= most:
        return StallKind.BLOCKED
    if seen.waited is not None and seen.waited >= most:
        return StallKind.STARVED
    return StallKind.BLOCKED if seen.looks * LOOK >= most else StallKind.STARVED


class Witness:
    """The stalls since the witness was created: their total length, and the length of the longest, in seconds."""

    def __init__(self) -> None:
        self.total = 0.0
        self.longest = 0.0


class Watchdog:
    """Counts the stalls of the event loop on which `async with Watchdog() as watchdog` runs. `stalls` has the
    counts."""

    def __init__(self) -> None:
        self.stalls = StallStats()
        self._noted = 0.0
        self._seen = 0.0
        self._worked = 0.0
        self._loop_thread = 0
        self._process_worked = 0.0
        self._waited: float | None = None
        self._looks = 0
        self._looked = 0
        """Number of samples until now (`_looks`), and until the last run of the timer (`_looked`)."""
        self._where = ""
        self._schedstat: int | None = None
        self._report = _Report()
        self._witnesses: set[Witness] = set()
        self._ended = threading.Event()
        self._timer: asyncio.TimerHandle | None = None

    def stalled_seconds(self) -> float:
        """Return the total seconds of all stalls until now: the counted stalls, the stalls recorded with `note`, and a
        stall that has just ended and is not counted yet."""
        latest = time.monotonic() - self._seen - PERIOD
        return self.stalls.total + self._noted + (latest if latest >= STALL else 0.0)

    def note(self, seconds: float) -> None:
        """Record that this process waited `seconds` seconds for another process that was stalled. `stalls` excludes
        these seconds, because this process's loop did not stall."""
        self._noted += seconds
        self._tell(seconds)

    def _tell(self, stalled: float) -> None:
        for witness in self._witnesses:
            witness.total += stalled
            witness.longest = max(witness.longest, stalled)

    @contextmanager
    def witness(self) -> Iterator[Witness]:
        witness = Witness()
        self._witnesses.add(witness)
        try:
            yield witness
        finally:
            self._witnesses.discard(witness)

    async def __aenter__(self) -> Self:
        self._loop_thread = threading.get_ident()
        with suppress(OSError):  # the file does not exist on every kernel
            self._schedstat = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        self._note_now(time.monotonic(), time.thread_time())
        self._look_later()
        self._sampler = threading.Thread(target=self._sample, name="outrider-watchdog", daemon=True)
        self._sampler.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._ended.set()
        await asyncio.to_thread(self._sampler.join)
        if self._schedstat is not None:
            os.close(self._schedstat)

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(PERIOD, self._look)

    def _look(self) -> None:
        """Count a stall if the timer is late."""
        self._look_later()
        now, worked = time.monotonic(), time.thread_time()
        stalled, held = now - self._seen - PERIOD, worked - self._worked
        before, process_worked, looked = self._waited, self._process_worked, self._looked
        self._note_now(now, worked)
        if stalled >= STALL:
            waited = None if before is None or self._waited is None else self._waited - before
            evidence = StallEvidence(stalled, waited, self._process_worked - process_worked, self._looked - looked)
            kind = kind_of(evidence)
            seen = self.stalls
            self.stalls = StallStats(
                count=seen.count + 1,
                total=seen.total + stalled,
                longest=max(seen.longest, stalled),
                held=max(seen.held, held),
                starved=seen.starved + (kind is StallKind.STARVED),
            )
            self._tell(stalled)
            # If there is no sample, a single call held the interpreter lock, so that the sampling thread could not run.
            self._report.note(now, kind, stalled, held, self._where or "in one call")
        self._report.sum_up(now)
        self._where = ""

    def _note_now(self, now: float, worked: float) -> None:
        self._seen, self._worked = now, worked
        self._process_worked, self._looked = time.process_time(), self._looks
        if self._schedstat is not None:
            # Reading the file takes two microseconds. Its fields are the nanoseconds on a processor, the nanoseconds in
            # the run queue, and the number of time slices.
            self._waited = int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9

    def _sample(self) -> None:
        """Record the loop's stack once the loop has been blocked for STALL seconds. Runs in its own thread."""
        while not self._ended.wait(LOOK):
            self._looks += 1
            if not self._where and time.monotonic() - self._seen >= STALL:
                self._where = _stack(sys._current_frames().get(self._loop_thread))


def _stack(frame: FrameType | None) -> str:
    """Return the innermost frames as text. `traceback` is not used, because it opens the source files, and all
    descriptors may be in use."""
    shown: list[str] = []
    while frame is not None and len(shown) < FRAMES:
        shown.append(f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})")
        frame = frame.f_back
    return " < ".join(shown)


class _Report:
    """Writes the log lines: one line for the first stall, then at most one line per minute with the number of stalls
    since the previous line."""

    def __init__(self) -> None:
        self._logged = -LOG_SECONDS
        self._since: dict[StallKind, list[float]] = {}

    def note(self, now: float, kind: StallKind, stalled: float, held: float, where: str) -> None:
        if self._since or now - self._logged < LOG_SECONDS:
            self._since.setdefault(kind, []).append(stalled)
            return
        self._logged = now
        if kind is StallKind.BLOCKED:
            log.warning(
                "the event loop was blocked for %.2f s, with %.2f s of processor time: %s", stalled, held, where
            )
        else:
            log.warning(
                "this process got no processor for %.2f s: the machine is overloaded, or it was stopped", stalled
            )

    def sum_up(self, now: float) -> None:
        if not self._since or now - self._logged < LOG_SECONDS:
            return
        since, self._since, self._logged = self._since, {}, now
        counts = "; ".join(f"{kind} {len(all)} times, {max(all):.2f} s at most" for kind, all in since.items())
        log.warning("the event loop stood still in the last minute: %s", counts)
