"""A lane: a counted stage of the session coroutine, with a bound, a priority order and statistics.

It knows nothing of what happens in it. Invariant: at most `size` slots are out, and a slot given back goes to
the waiter with the highest priority, first come first served among equals.
"""

from __future__ import annotations

from outrider.schemas import LaneStats
from outrider.sessions.resources import Room
from outrider.sessions.shares import Slot, Stock


class Lane:
    """`await lane.take(priority)` waits for a slot; a cancelled wait leaves no trace."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self._stock = Stock(size)

    async def take(self, priority: int = 0) -> Slot:
        return await self._stock.take((1,), priority)

    def stats(self) -> LaneStats:
        (in_use,) = self._stock.out
        return LaneStats(
            name=self.name,
            size=self.size,
            in_use=in_use,
            waiting=self._stock.waiting,
            served=self._stock.served,
            waited_seconds=self._stock.waited,
        )


class Lanes:
    """The lanes of a node, and the room that it has for what its sandboxes need. `grading` bounds how many sandboxes
    for grading start at once, besides those of `init` for agents."""

    def __init__(self, *, init: int, run: int, evaluate: int, room: Room) -> None:
        self.init = Lane("init", init)
        self.run = Lane("run", run)
        self.eval = Lane("eval", evaluate)
        self.grading = Lane("grading", max(1, init // 2))
        self.room = room

    @property
    def capacity(self) -> int:
        """Sessions that can be somewhere in the lanes at once without queueing behind one another."""
        return self.init.size + self.run.size + self.eval.size

    def stats(self) -> tuple[LaneStats, ...]:
        return tuple(lane.stats() for lane in (self.init, self.run, self.eval, self.grading))
