"""A line for shares of something bounded: slots of a lane; processors, memory and GPUs of a node.

It knows nothing of what is done with a share. Whoever waits is served by priority, first come first served among
equals. Who waits for a kind of thing keeps all behind it from taking any, so that small requests that would fit cannot
starve a large one; who wants none of it may pass, as long as the first in line would still find the rest of what it
wants. Invariants: no more is taken than there is, and nobody who passes delays the first in line.
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


def fits(needs: Quantities, room: Quantities) -> bool:
    return all(need <= have or not need for need, have in zip(needs, room, strict=True))


def room_behind(needs: Quantities, room: Quantities, *, first: bool) -> Quantities:
    """What is left of `room` for those behind one that waits there: nothing of what it is short of; and all of the
    rest, but for what it needs itself if it is the first in line."""
    return tuple(0 if need > have else have - need if first else have for need, have in zip(needs, room, strict=True))


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
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (-priority, next(self._order), turn, quantities)
        heapq.heappush(self._waiters, entry)
        self._serve()
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
        room, first = self._free(), True
        for _, _, turn, needs in sorted(self._waiters):
            if not turn.done():
                room, first = room_behind(needs, room, first=first), False
        if not fits(quantities, room):
            return None
        self.taken = tuple(map(add, self.taken, quantities))
        self.served += 1
        return self._slot(quantities)

    def _slot(self, quantities: Quantities) -> Slot:
        return Slot(partial(self._give_back, quantities))

    def _free(self) -> Quantities:
        return tuple(map(sub, self.capacity, self.taken))

    def _give_back(self, quantities: Quantities) -> None:
        self.taken = tuple(map(sub, self.taken, quantities))
        self._serve()

    def _serve(self) -> None:
        """Serve those who fit, in the order of the line."""
        room = self._free()
        passed: list[tuple[int, int, asyncio.Future[None], Quantities]] = []
        while self._waiters and any(room):
            entry = heapq.heappop(self._waiters)
            _, _, turn, quantities = entry
            if turn.done():  # cancelled, and its task has not run since to leave the line
                continue
            if fits(quantities, room):
                self.taken = tuple(map(add, self.taken, quantities))
                room = tuple(map(sub, room, quantities))
                turn.set_result(None)
            else:
                room = room_behind(quantities, room, first=not passed)
                passed.append(entry)
        for entry in passed:
            heapq.heappush(self._waiters, entry)
