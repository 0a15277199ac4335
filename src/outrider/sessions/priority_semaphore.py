"""A line for shares of something bounded: slots of a lane, processors and memory of a node.

It knows nothing of what is done with a share. Whoever waits is served by priority, first come first served among
equals, and nobody overtakes the first in line: small requests that would fit cannot starve a large one. Invariant: no
more is taken than there is.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from operator import add, sub
from types import TracebackType
from typing import Self

Quantities = tuple[int, ...]
"""So much of each kind. Whole numbers, because their sums are exact."""


class Slot:
    """What was taken, until `give_back` is called: by `release`, which is idempotent, or by leaving the `async with`
    block."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class PrioritySemaphore:
    """Counts one or several kinds of things, such as millicpus and MiB; all that a slot needs is taken at once.

    More than `capacity` of any kind is never given. `served` and `waited_seconds` are totals over all slots taken.
    """

    def __init__(self, *capacity: int) -> None:
        self.capacity: Quantities = capacity
        self.taken: Quantities = (0,) * len(capacity)
        self.served = 0
        self.waited_seconds = 0.0
        self._waiters: list[tuple[int, int, asyncio.Future[None], Quantities]] = []
        """A heap: the highest priority first, then the oldest."""
        self._order = count()

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    async def take(self, quantities: Quantities, priority: int = 0) -> Slot:
        """Wait for the turn. A cancelled wait takes nothing."""
        started = time.monotonic()
        if not self._waiters and self._fits(quantities):
            self.taken = tuple(map(add, self.taken, quantities))
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            entry = (-priority, next(self._order), turn, quantities)
            heapq.heappush(self._waiters, entry)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._give_back(quantities)  # the cancellation came after `_serve` had given it to this waiter
                    raise
                if entry in self._waiters:
                    self._waiters.remove(entry)
                    heapq.heapify(self._waiters)
                self._serve()  # the next in line may fit where this one did not
                raise
        self.served += 1
        self.waited_seconds += time.monotonic() - started
        return self._slot(quantities)

    def try_take(self, quantities: Quantities) -> Slot | None:
        """None if it would have to wait."""
        if self._waiters or not self._fits(quantities):
            return None
        self.taken = tuple(map(add, self.taken, quantities))
        self.served += 1
        return self._slot(quantities)

    def _slot(self, quantities: Quantities) -> Slot:
        return Slot(partial(self._give_back, quantities))

    def _fits(self, quantities: Quantities) -> bool:
        return all(
            taken + more <= most for taken, more, most in zip(self.taken, quantities, self.capacity, strict=True)
        )

    def _give_back(self, quantities: Quantities) -> None:
        self.taken = tuple(map(sub, self.taken, quantities))
        self._serve()

    def _serve(self) -> None:
        """Serve the first in line for as long as they fit."""
        while self._waiters:
            _, _, turn, quantities = self._waiters[0]
            if not turn.done():  # done: cancelled, and its task has not run since to leave the line
                if not self._fits(quantities):
                    return
                self.taken = tuple(map(add, self.taken, quantities))
                turn.set_result(None)
            heapq.heappop(self._waiters)
