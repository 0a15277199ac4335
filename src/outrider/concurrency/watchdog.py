"""Detects stalls of the event loop, counts them, and logs what the loop was doing.

All sessions share one event loop, so whatever blocks it stops them all. A late timer shows that the loop was blocked,
or that the process got no processor time; a thread samples the loop's stack meanwhile. It knows nothing of sessions.
Invariant: a stall of STALL seconds or more is counted exactly once.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from outrider.schemas import StallStats

log = logging.getLogger("outrider.concurrency.watchdog")

PERIOD = 0.01
"""Seconds between two runs of the timer."""
STALL = 0.05
"""Seconds. Shorter delays are the normal work of many sessions."""
LOG_SECONDS = 10.0
"""Minimum time between two log lines."""
FRAMES = 4
"""Innermost frames of the loop's stack in a log line."""


class Witness:
    """Stalls since the witness was made: total seconds, and the longest."""

    def __init__(self) -> None:
        self.total = 0.0
        self.longest = 0.0


class Watchdog:
    """`async with Watchdog() as watchdog` on the event loop to be watched; `stalls` counts its stalls."""

    def __init__(self) -> None:
        self.stalls = StallStats()
        self._noted = 0.0
        self._seen = 0.0
        self._worked = 0.0
        self._loop_thread = 0
        self._where = ""
        self._logged = -LOG_SECONDS
        self._witnesses: set[Witness] = set()
        self._ended = threading.Event()
        self._timer: asyncio.TimerHandle | None = None

    def stood_still(self) -> float:
        """Total seconds of all stalls until now, including one that has just ended, after which the timer has not run
        yet, and those noted."""
        now = time.monotonic() - self._seen - PERIOD
        return self.stalls.total + self._noted + (now if now >= STALL else 0.0)

    def note(self, seconds: float) -> None:
        """Another process, for which what runs here had to wait, has stood still for so long. `stalls` does not have
        it: it is not this loop's."""
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
        self._seen, self._worked = time.monotonic(), time.thread_time()
        self._look_later()
        self._sampler = threading.Thread(target=self._sample, name="outrider-watchdog", daemon=True)
        self._sampler.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._ended.set()
        await asyncio.to_thread(self._sampler.join)

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(PERIOD, self._look)

    def _look(self) -> None:
        """Count a stall if the timer is late."""
        now, worked = time.monotonic(), time.thread_time()
        stalled, held = now - self._seen - PERIOD, worked - self._worked
        self._seen, self._worked = now, worked
        if stalled >= STALL:
            seen = self.stalls
            self.stalls = StallStats(
                count=seen.count + 1,
                total=seen.total + stalled,
                longest=max(seen.longest, stalled),
                held=max(seen.held, held),
            )
            self._tell(stalled)
            if now - self._logged >= LOG_SECONDS:
                self._logged = now
                # No sample means that one call held the interpreter, so that the sampling thread could not run either.
                where = self._where or "in one call"
                log.warning(
                    "the event loop was blocked for %.2f s, with %.2f s of processor time: %s", stalled, held, where
                )
        self._where = ""
        self._look_later()

    def _sample(self) -> None:
        """Note the loop's stack once it has been blocked for STALL. Runs in a thread of its own."""
        while not self._ended.wait(STALL / 2):
            if not self._where and time.monotonic() - self._seen >= STALL:
                frame = sys._current_frames().get(self._loop_thread)
                stack = traceback.extract_stack(frame)[-FRAMES:] if frame is not None else []
                self._where = " < ".join(f"{one.name} ({one.filename}:{one.lineno})" for one in reversed(stack))
