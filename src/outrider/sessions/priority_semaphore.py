"""A queue for shares of a limited resource, such as the slots of a lane, or the processors, memory and GPUs of a node.

Every request has an owner, for example a tenant. Owners take turns: the owner that holds the least is served next.
Among owners that hold equally much, the owner that was served longest ago is next. An owner's requests are served by
priority, then in order of arrival. URGENT requests come before all others; any other priority has no effect on other
owners.

While a request waits for some resource, such as memory, no later request may take any memory, because small requests
could otherwise starve a large one. A later request that needs no memory may be served before the waiting request, if
enough of the other resources is left for the first request in line.

Invariants: no more is taken than exists, no owner takes more than its share, and no later request delays the first in
line.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from operator import add, sub
from typing import NamedTuple, Self

Quantities = tuple[int, ...]
"""One number for each resource, such as (millicpus, MiB). Integers are used, because sums of integers are exact."""


URGENT = 1 << 20
"""Requests with at least this priority are URGENT. They come before all other requests."""


def fits(needs: Quantities, room: Quantities) -> bool:
    return all(need <= have or not need for need, have in zip(needs, room, strict=True))


def room_behind(needs: Quantities, room: Quantities, *, first: bool) -> Quantities:
    """Return the part of `room` that later requests may use while a request with these `needs` waits. Later requests
    get nothing of a resource that is too scarce for the waiting request. They may use whatever is free of every other
    resource, but if the waiting request is the first in line, the amount that it needs is subtracted."""
    return tuple(0 if need > have else have - need if first else have for need, have in zip(needs, room, strict=True))


class Slot:
    """Quantities that a request has taken. `release`, or the end of the `async with` block, gives them back by calling
    `give_back`. `release` is idempotent."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()


class PrioritySemaphore:
    """A queue for one or several resources, such as millicpus and MiB. A request takes all its quantities at once.

    At most `capacity` of each resource is given out, and one owner gets at most the fraction `share` of `capacity`.
    `served` and `waited_seconds` are totals over all requests that were served.
    """

    def __init__(self, *capacity: int, share: float = 1.0) -> None:
        self.capacity: Quantities = capacity
        self.taken: Quantities = (0,) * len(capacity)
        self.served = 0
        self.waited_seconds = 0.0
        self._most = None if share >= 1 else tuple(int(share * each) for each in capacity)
        """The maximum quantity of each resource for one owner, or None without a limit."""
        self._owners: dict[str, _Owner] = {}
        """Owners that hold something or wait for something."""
        self._urgent = _Owner(len(capacity))
        """The queue of all URGENT requests. What such a request takes still counts as taken by its owner."""
        self._order = count()

    @property
    def waiting(self) -> int:
        return sum(len(line.waiters) for line in self._lines())

    async def take(self, quantities: Quantities, priority: int = 0, owner: str = "") -> Slot:
        """Wait in line, then take all quantities at once. A cancelled wait takes nothing."""
        started = time.monotonic()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line = self._urgent if priority >= URGENT else self._owners.setdefault(owner, _Owner(len(self.capacity)))
        entry = _Waiter(-priority, next(self._order), turn, quantities, owner)
        heapq.heappush(line.waiters, entry)
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back(quantities, owner)  # `_serve` had already granted the request
                raise
            if entry in line.waiters:
                line.waiters.remove(entry)
                heapq.heapify(line.waiters)
            self._serve()  # a request behind the cancelled request may now be served
            self._drop_idle_owner(owner)
            raise
        self.served += 1
        self.waited_seconds += time.monotonic() - started
        return self._slot(quantities, owner)

    def try_take(self, quantities: Quantities, owner: str = "") -> Slot | None:
        """Take the quantities now. Returns None if the request would have to wait."""
        room, first = self._free(), True
        for line in sorted(self._lines(), key=self._rank):
            for _, _, turn, needs, _ in sorted(line.waiters):
                if not turn.done():
                    room, first = room_behind(needs, room, first=first), False
        if not fits(quantities, room) or not self._may_have(owner, quantities):
            return None
        self._give(quantities, owner)
        self.served += 1
        return self._slot(quantities, owner)

    def _lines(self) -> list[_Owner]:
        return [self._urgent, *self._owners.values()]

    def _rank(self, line: _Owner) -> tuple[bool, float, int]:
        """Return the sort key of a line, which is one owner's queue or the urgent queue. The urgent queue comes first.
        Then come the owners' queues, sorted by two numbers: the largest fraction that the owner holds of any resource,
        and the number of the owner's last turn. The smallest numbers are first."""
        parts = (has / most for has, most in zip(line.taken, self.capacity, strict=True) if most)
        return line is not self._urgent, max(parts, default=0.0), line.last

    def _may_have(self, owner: str, quantities: Quantities) -> bool:
        if self._most is None:
            return True
        known = self._owners.get(owner)
        has = (0,) * len(quantities) if known is None else known.taken
        return fits(tuple(map(add, has, quantities)), self._most)

    def _give(self, quantities: Quantities, owner: str) -> None:
        known = self._owners.setdefault(owner, _Owner(len(self.capacity)))
        known.taken, known.last = tuple(map(add, known.taken, quantities)), next(self._order)
        self.taken = tuple(map(add, self.taken, quantities))

    def _slot(self, quantities: Quantities, owner: str) -> Slot:
        return Slot(partial(self._give_back, quantities, owner))

    def _free(self) -> Quantities:
        return tuple(map(sub, self.capacity, self.taken))

    def _give_back(self, quantities: Quantities, owner: str) -> None:
        self.taken = tuple(map(sub, self.taken, quantities))
        known = self._owners[owner]
        known.taken = tuple(map(sub, known.taken, quantities))
        self._serve()
        self._drop_idle_owner(owner)

    def _drop_idle_owner(self, owner: str) -> None:
        """Delete an owner that neither holds nor waits for anything, because the number of owners is unlimited."""
        known = self._owners.get(owner)
        if known is not None and not known.waiters and not any(known.taken):
            del self._owners[owner]

    def _serve(self) -> None:
        """Grant the requests that fit, in the order of the queue."""
        waiting = [line for line in self._lines() if line.waiters]
        if not waiting:
            return
        room, first = self._free(), True
        passed: list[tuple[_Owner, _Waiter]] = []
        while waiting and any(room):
            line = waiting[0] if len(waiting) == 1 else min(waiting, key=self._rank)
            entry = heapq.heappop(line.waiters)
            if not line.waiters:
                waiting.remove(line)
            _, _, turn, quantities, owner = entry
            if turn.done():  # the wait was cancelled, and its entry is not yet removed
                continue
            if not self._may_have(owner, quantities):
                # The rest of the owner's line waits as well. In the urgent line, the next request may be another
                # owner's.
                passed.append((line, entry))
                if line is not self._urgent and line.waiters:
                    waiting.remove(line)
            elif fits(quantities, room):
                self._give(quantities, owner)
                room = tuple(map(sub, room, quantities))
                turn.set_result(None)
            else:
                room, first = room_behind(quantities, room, first=first), False
                passed.append((line, entry))
        for line, entry in passed:
            heapq.heappush(line.waiters, entry)


class _Waiter(NamedTuple):
    """A waiting request as an entry of a heap, sorted by priority from high to low, then by age."""

    below: int
    number: int
    turn: asyncio.Future[None]
    needs: Quantities
    owner: str


class _Owner:
    """The amount that an owner has taken, the number of the owner's last turn, and the heap of its waiting requests."""

    __slots__ = ("last", "taken", "waiters")

    def __init__(self, kinds: int) -> None:
        self.taken: Quantities = (0,) * kinds
        self.last = -1
        self.waiters: list[_Waiter] = []
