"""A line for shares of something bounded: slots of a lane; processors, memory and GPUs of a node; memory for bodies.

It knows nothing of what is done with a share. Owners (tenants) take turns: of those that wait, the owner that holds the
least is served next, then the one that was served the longest time ago. Those of one owner are served by priority,
first come first served among equals; a priority orders the work of one owner, and none of another's. URGENT ones come
before all.

Who waits for a kind of thing keeps all behind it from taking any, so that small requests that would fit cannot starve a
large one; who wants none of it may pass, as long as the first in line would still find the rest of what it wants.
Invariants: no more is taken than there is, by one owner no more than its share, and nobody who passes delays the first
in line.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from operator import add, sub
from types import TracebackType
from typing import NamedTuple, Self

Quantities = tuple[int, ...]
"""So much of each kind. Whole numbers, because their sums are exact."""


URGENT = 1 << 20
"""The least priority that comes before all owners."""


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

    More than `capacity` of any kind is never given, and to one owner not more than `share` of it. `served` and
    `waited_seconds` are totals over all slots taken.
    """

    def __init__(self, *capacity: int, share: float = 1.0) -> None:
        self.capacity: Quantities = capacity
        self.taken: Quantities = (0,) * len(capacity)
        self.served = 0
        self.waited_seconds = 0.0
        self._most = None if share >= 1 else tuple(int(share * each) for each in capacity)
        """Of each kind, what one owner may have."""
        self._owners: dict[str, _Owner] = {}
        """Who has something, or waits for it."""
        self._urgent = _Owner(len(capacity))
        """The line of all URGENT ones. What they take counts as their owners'."""
        self._order = count()

    @property
    def waiting(self) -> int:
        return sum(len(line.waiters) for line in self._lines())

    async def take(self, quantities: Quantities, priority: int = 0, owner: str = "") -> Slot:
        """Wait for the turn. A cancelled wait takes nothing."""
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
                self._give_back(quantities, owner)  # the cancellation came after `_serve` had given it to this waiter
                raise
            if entry in line.waiters:
                line.waiters.remove(entry)
                heapq.heapify(line.waiters)
            self._serve()  # the next in line may fit where this one did not
            self._forget(owner)
            raise
        self.served += 1
        self.waited_seconds += time.monotonic() - started
        return self._slot(quantities, owner)

    def try_take(self, quantities: Quantities, owner: str = "") -> Slot | None:
        """None if it would have to wait."""
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

    def _lines(self) -> Iterator[_Owner]:
        yield self._urgent
        yield from self._owners.values()

    def _rank(self, line: _Owner) -> tuple[bool, float, int]:
        """The order in which lines are served: an owner has as much as of the kind of which it has the most."""
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
        self._forget(owner)

    def _forget(self, owner: str) -> None:
        """An owner that neither has anything nor waits is not kept: there may be any number of them."""
        known = self._owners.get(owner)
        if known is not None and not known.waiters and not any(known.taken):
            del self._owners[owner]

    def _serve(self) -> None:
        """Serve those who fit, in the order of the line."""
        room = self._free()
        passed: list[tuple[_Owner, _Waiter]] = []
        first = True
        waiting = [line for line in self._lines() if line.waiters]
        while waiting and any(room):
            line = min(waiting, key=self._rank)
            entry = heapq.heappop(line.waiters)
            if not line.waiters:
                waiting.remove(line)
            _, _, turn, quantities, owner = entry
            if turn.done():  # cancelled, and its task has not run since to leave the line
                continue
            if not self._may_have(owner, quantities):  # all behind it are of the same owner, unless it is urgent
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
    """Entries of a heap: the highest priority first, then the oldest."""

    below: int
    number: int
    turn: asyncio.Future[None]
    needs: Quantities
    owner: str


class _Owner:
    """What an owner has taken, when it was served last, and its line."""

    __slots__ = ("last", "taken", "waiters")

    def __init__(self, kinds: int) -> None:
        self.taken: Quantities = (0,) * kinds
        self.last = -1
        self.waiters: list[_Waiter] = []
