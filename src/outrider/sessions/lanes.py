"""A lane: a counted stage of the session coroutine, with a bound, a priority order and statistics.

It knows nothing of what happens in it. Invariant: at most `size` slots are out, and a slot given back goes to
the waiter with the highest priority, first come first served among equals.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from itertools import count
from types import TracebackType
from typing import Self

from outrider.wire import LaneStats


class Slot:
    """A place in a lane. `release` is idempotent; leaving the `async with` block releases."""

    def __init__(self, lane: Lane) -> None:
        self._lane: Lane | None = lane

    def release(self) -> None:
        lane, self._lane = self._lane, None
        if lane is not None:
            lane._give_back()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Lane:
    """`await lane.take(priority)` waits for a slot; a cancelled wait leaves no trace."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self._in_use = 0
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = count()
        self._served = 0
        self._waited = 0.0

    async def take(self, priority: int = 0) -> Slot:
        started = time.monotonic()
        if self._in_use < self.size and not self._waiters:
            self._in_use += 1
        else:
            await self._wait(priority)
        self._served += 1
        self._waited += time.monotonic() - started
        return Slot(self)

    async def _wait(self, priority: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (-priority, next(self._order), turn)
        heapq.heappush(self._waiters, entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back()  # the slot had just been handed over
            elif entry in self._waiters:
                self._waiters.remove(entry)
                heapq.heapify(self._waiters)
            raise

    def _give_back(self) -> None:
        while self._waiters:
            _, _, turn = heapq.heappop(self._waiters)
            if not turn.done():
                turn.set_result(None)
                return
        self._in_use -= 1

    def stats(self) -> LaneStats:
        return LaneStats(
            name=self.name,
            size=self.size,
            in_use=self._in_use,
            waiting=len(self._waiters),
            served=self._served,
            waited_seconds=self._waited,
        )


class Lanes:
    """The three lanes of a node."""

    def __init__(self, *, init: int, run: int, evaluate: int) -> None:
        self.init = Lane("init", init)
        self.run = Lane("run", run)
        self.eval = Lane("eval", evaluate)

    @property
    def capacity(self) -> int:
        """Sessions that can be somewhere in the lanes at once without queueing behind one another."""
        return self.init.size + self.run.size + self.eval.size

    def stats(self) -> tuple[LaneStats, LaneStats, LaneStats]:
        return (self.init.stats(), self.run.stats(), self.eval.stats())
