"""A stock of one kind of thing or of several, of which parts are given out in order.

It knows nothing of what they are. Who waits is served by priority, first come first served among equals, and nobody
passes the first in line: a large part is not starved by small ones, which wait behind it although they would fit.
Invariant: what is out is never more than there is.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from itertools import count
from operator import add, sub
from types import TracebackType
from typing import Self

Part = tuple[int, ...]
"""So much of each kind."""


class Slot:
    """A part that was taken. `release` is idempotent; leaving the `async with` block releases."""

    def __init__(self, stock: Stock, part: Part) -> None:
        self._stock: Stock | None = stock
        self._part = part

    def release(self) -> None:
        stock, self._stock = self._stock, None
        if stock is not None:
            stock._give_back(self._part)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Stock:
    """`await stock.take(part, priority)` waits for its turn; a cancelled wait leaves no trace. A part that is larger
    than the whole is never given."""

    def __init__(self, *whole: int) -> None:
        self.whole: Part = whole
        self.out: Part = (0,) * len(whole)
        self.served = 0
        self.waited = 0.0
        self._waiters: list[tuple[int, int, asyncio.Future[None], Part]] = []
        self._order = count()

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    async def take(self, part: Part, priority: int = 0) -> Slot:
        started = time.monotonic()
        if not self._waiters and self._fits(part):
            self._give(part)
        else:
            await self._wait(part, priority)
        self.served += 1
        self.waited += time.monotonic() - started
        return Slot(self, part)

    def take_now(self, part: Part) -> Slot | None:
        """None when it would have to wait."""
        if self._waiters or not self._fits(part):
            return None
        self._give(part)
        self.served += 1
        return Slot(self, part)

    async def _wait(self, part: Part, priority: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (-priority, next(self._order), turn, part)
        heapq.heappush(self._waiters, entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(part)  # it had just been handed over
                raise
            if entry in self._waiters:
                self._waiters.remove(entry)
                heapq.heapify(self._waiters)
            self._serve()  # there may be enough for the next in line
            raise

    def _fits(self, part: Part) -> bool:
        return all(out + more <= whole for out, more, whole in zip(self.out, part, self.whole, strict=True))

    def _give(self, part: Part) -> None:
        self.out = tuple(map(add, self.out, part))

    def _give_back(self, part: Part) -> None:
        self.out = tuple(map(sub, self.out, part))
        self._serve()

    def _serve(self) -> None:
        """Give those first in line their parts, as far as the stock goes."""
        while self._waiters:
            _, _, turn, part = self._waiters[0]
            if not turn.done():
                if not self._fits(part):
                    return
                self._give(part)
                turn.set_result(None)
            heapq.heappop(self._waiters)
