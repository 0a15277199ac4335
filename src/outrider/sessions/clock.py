"""Clocks of a session: a budget limits working time, a cutoff ends a run, a timeout can be paused, and a stopwatch
measures the stages.

Invariant: no budget is charged while the event loop is blocked or the policy is paused, or outside of a `spend` block,
for example during a wait for a slot.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from outrider.timeline import EntryKind, Timeline

LOOK_AGAIN = 0.02
"""Minimum seconds between two checks of a budget. Without a minimum, the timer would fire continuously while the policy
is paused and almost no time is left."""


class Budget:
    """Seconds left to spend. `async with budget.spend():` raises TimeoutError when they run out inside the block.

    `exhausted` is True after the seconds have run out. `stalled_seconds` returns the total seconds so far in which the
    clock was stopped.
    """

    def __init__(self, seconds: float, stalled_seconds: Callable[[], float]) -> None:
        self.remaining = seconds
        self.exhausted = False
        self._stalled_seconds = stalled_seconds

    @asynccontextmanager
    async def spend(self) -> AsyncIterator[None]:
        spending = _Spending(self, self.remaining, self._stalled_seconds)
        try:
            async with spending.timeout:
                yield
        finally:
            spending.end()
            self.exhausted = self.exhausted or spending.timeout.expired()


class _Spending:
    """One `spend` block. A fixed deadline would be too early after a stall. So a timer checks the budget, and is set
    again while seconds are left. Once the timer is cancelled, no reference cycle is left (see
    concurrency/garbage.py)."""

    def __init__(self, budget: Budget, seconds: float, stalled_seconds: Callable[[], float]) -> None:
        self.timeout = asyncio.timeout(None)
        self._budget = budget
        self._seconds = seconds
        self._stalled_seconds = stalled_seconds
        self._loop = asyncio.get_running_loop()
        self._started, self._stood = self._loop.time(), stalled_seconds()
        self._timer = self._loop.call_later(max(0.0, seconds), self._end_or_wait)

    def end(self) -> None:
        self._timer.cancel()
        self._charge()

    def _charge(self) -> None:
        worked = self._loop.time() - self._started - (self._stalled_seconds() - self._stood)
        self._budget.remaining = self._seconds - max(0.0, worked)

    def _end_or_wait(self) -> None:
        self._charge()
        if self._budget.remaining <= 0:
            self.timeout.reschedule(self._loop.time())
        else:
            self._timer = self._loop.call_later(max(LOOK_AGAIN, self._budget.remaining), self._end_or_wait)


class Cutoff:
    """A switch that ends a block. In `async with cutoff.block():`, a call of `cut` raises TimeoutError in the block.
    While no block runs, `cut` does nothing."""

    def __init__(self) -> None:
        self._timeout: asyncio.Timeout | None = None

    def cut(self) -> None:
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def block(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(None) as self._timeout:
                yield
        finally:
            self._timeout = None


class PausableTimeout:
    """A time limit for one block that can be paused. `async with timeout.block:` raises TimeoutError after `seconds`.
    Time inside a `paused` block does not count."""

    def __init__(self, seconds: float) -> None:
        self.block = asyncio.timeout(seconds)
        self._pauses = 0
        self._left = seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        end = self.block.when()
        if end is not None:  # the clock runs, so no other pause is active
            self._left = end - loop.time()
        self._pauses += 1
        self._set_end(None)
        try:
            yield
        finally:
            self._pauses -= 1
            if self._pauses == 0:
                self._set_end(loop.time() + self._left)

    def _set_end(self, when: float | None) -> None:
        with suppress(RuntimeError):  # raised by `reschedule` if the time is over or the block has ended
            self.block.reschedule(when)


class Stopwatch:
    """Measures the seconds of each stage. `lap(name)` adds the time since the last lap to `seconds[name]`, and to the
    timeline if there is one."""

    def __init__(self, timeline: Timeline | None = None) -> None:
        self._last = time.monotonic()
        self._last_noted = time.time()
        self._timeline = timeline
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now, noted = time.monotonic(), time.time()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        if self._timeline is not None:
            self._timeline.add(EntryKind.STAGE, name, self._last_noted, noted)
        self._last, self._last_noted = now, noted
