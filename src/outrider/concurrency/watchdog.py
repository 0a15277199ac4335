"""Detects stalls of the event loop, counts them, and logs the stack at which the loop was blocked.

All sessions share one event loop, so a blocked loop stops all of them. A timer runs on the loop. If the timer is late,
the loop was blocked or the process got no processor. While the loop is blocked, another thread records (samples) the
loop's stack.
Invariant: a stall of STALL seconds or more is counted exactly once.
"""

from __future__ import annotations

import asyncio
import gc
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
"""Minimum delay of the timer that counts as a stall, in seconds. Shorter delays are normal when many sessions run."""
LOOK = STALL / 2
"""Seconds between two checks by the sampling thread."""
LOG_SECONDS = 60.0
"""Minimum seconds between two log lines. If the last line is older than this, a stall is logged at once. Other stalls
are summed up in one line per minute."""
FRAMES = 4
"""How many of the innermost frames of the loop's stack a log line shows."""
MOST = 0.5
"""The smallest fraction of a stall that counts as "most of the time" in `kind_of`."""


class StallKind(StrEnum):
    """The cause of a stall. BLOCKED: this process itself blocked the loop. STARVED: the process did not get to run."""

    BLOCKED = "blocked"
    STARVED = "starved"


class StallEvidence(NamedTuple):
    """Measurements of one stall.

    `stalled`: its length in seconds.
    `waited`: for how many seconds the loop's thread was ready to run but got no processor, or None if the kernel does
        not report it.
    `worked`: seconds of processor time of all threads together.
    `looks`: how often the sampling thread ran during the stall.
    """

    stalled: float
    waited: float | None
    worked: float
    looks: int


def kind_of(seen: StallEvidence) -> StallKind:
    """Return the kind of a stall, by the first rule that applies:

    1. BLOCKED, if the process used a processor most of the time: its own code held the loop, the interpreter or the
       processors.
    2. STARVED, if the loop's thread was ready to run most of the time and got no processor.
    3. BLOCKED, if the sampling thread ran most of the time: the loop's thread waited for a system call.
    4. STARVED otherwise: the process was stopped by a signal, suspended with its machine, throttled, or swapped out.
    """
    most = seen.stalled * MOST
    if seen.worked >= most:
        return StallKind.BLOCKED
    if seen.waited is not None and seen.waited >= most:
        return StallKind.STARVED
    return StallKind.BLOCKED if seen.looks * LOOK >= most else StallKind.STARVED


class Witness:
    """The total length of the stalls since this object was created or restarted, and the length of the longest, both in
    seconds. Time recorded with `Watchdog.note` counts as a stall here."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget the stalls until now."""
        self.total = 0.0
        self.longest = 0.0


class Watchdog:
    """Counts the stalls of the event loop on which it runs: `async with Watchdog() as watchdog`. `stalls` has the
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
        """How often the sampling thread has run until now (`_looks`), and until the last run of the timer
        (`_looked`)."""
        self._where = ""
        self._schedstat: int | None = None
        self._report = _Report()
        self._witnesses: set[Witness] = set()
        self._ended = threading.Event()
        self._timer: asyncio.TimerHandle | None = None

    def stalled_seconds(self) -> float:
        """Return the total seconds of all stalls until now. The total includes the stalls recorded with `note`, and a
        stall that has just ended but is not counted yet."""
        latest = time.monotonic() - self._seen - PERIOD
        return self.stalls.total + self._noted + (latest if latest >= STALL else 0.0)

    def note(self, seconds: float) -> None:
        """Record that this process waited `seconds` seconds for another process whose loop stalled. `stalls` excludes
        these seconds, because this process's own loop did not stall."""
        self._noted += seconds
        self._record(seconds)

    def _record(self, stalled: float) -> None:
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
        with suppress(OSError):  # some kernels do not have this file
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
        """Count a stall if the timer is late. The timer calls this."""
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
            self._record(stalled)
            # `_where` is empty if a single call held the interpreter lock, so that the sampling thread could not run.
            self._report.note(now, kind, stalled, held, self._where or "in one call")
        self._report.sum_up(now)
        self._where = ""

    def _note_now(self, now: float, worked: float) -> None:
        self._seen, self._worked = now, worked
        self._process_worked, self._looked = time.process_time(), self._looks
        if self._schedstat is not None:
            # Reading the file takes two microseconds. It has three numbers: the nanoseconds on a processor, the
            # nanoseconds in the run queue, and the number of time slices.
            self._waited = int(os.pread(self._schedstat, 64, 0).split()[1]) / 1e9

    def _sample(self) -> None:
        """Record the loop's stack once the loop has been blocked for STALL seconds. Runs in its own thread."""
        while not self._ended.wait(LOOK):
            self._looks += 1
            if not self._where and time.monotonic() - self._seen >= STALL:
                self._where = _stack(frame_of(self._loop_thread))


def frame_of(thread: int) -> FrameType | None:
    """Return the innermost frame of a thread, or None if the thread has ended.

    Garbage collection is off during the call, because it could stop the whole process for ever in Python 3.11
    (CPython's issue 106883): `sys._current_frames` holds a lock of the interpreter while it allocates. A collection at
    this point may switch to another thread. If this other thread starts a thread, it waits for the same lock without
    releasing the GIL, so neither thread can continue."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if enabled:
            gc.enable()


def _stack(frame: FrameType | None) -> str:
    """Return the innermost frames as text. The module `traceback` is not used: it opens source files, which fails when
    the process has no free file descriptors."""
    shown: list[str] = []
    while frame is not None and len(shown) < FRAMES:
        shown.append(f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})")
        frame = frame.f_back
    return " < ".join(shown)


class _Report:
    """Logs stalls. A stall gets its own line if there was no line in the last minute. Other stalls are counted, and
    summed up in at most one line per minute."""

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
