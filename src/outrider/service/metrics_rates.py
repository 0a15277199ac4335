"""Keeps a service's counts over the last hour in memory, as one point every few seconds, for the charts of the web
page.

Invariant: every event is counted in exactly one point.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from outrider.concurrency.chores import Chores, Failures
from outrider.lifecycle import SessionState
from outrider.schemas import RateList, RatePoint

STEP_SECONDS = 5.0
KEPT_SECONDS = 3600.0


class Totals(NamedTuple):
    """Counts since the service's start. The fields have the same meaning as in RatePoint."""

    sessions_done: int = 0
    sessions_failed: int = 0
    groups_done: int = 0
    calls: int = 0
    calls_failed: int = 0
    tokens_sampled: int = 0


class RateHistory:
    """Adds a point every STEP_SECONDS while `run` runs. `totals` returns the counts since the service's start, and
    `states` returns the number of sessions in each state."""

    def __init__(
        self,
        totals: Callable[[], Totals],
        states: Callable[[], Awaitable[dict[SessionState, int]]],
        failures: Failures,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._read_totals = totals
        self._read_states = states
        self._failures = failures
        self._clock = clock
        self._before = Totals()
        self._points: deque[RatePoint] = deque(maxlen=int(KEPT_SECONDS / STEP_SECONDS))

    async def run(self) -> None:
        async with Chores(self._failures) as chores:
            await chores.begin("rates", self.take, every=STEP_SECONDS)

    async def take(self) -> None:
        """Add a point with the counts since the previous point. If `states` raises an error, no point is added, and the
        next point includes these counts."""
        states = await self._read_states()
        now, before = self._read_totals(), self._before
        self._before = now
        queued, done = states[SessionState.QUEUED], states[SessionState.DONE]
        steps = {name: getattr(now, name) - getattr(before, name) for name in Totals._fields}
        running = sum(states.values()) - queued - done
        self._points.append(RatePoint(at=self._clock(), queued=queued, running=running, **steps))

    def view(self) -> RateList:
        return RateList(now=self._clock(), step_seconds=STEP_SECONDS, points=tuple(self._points))
