"""The lanes of a node: the stages of its sessions, each with a bounded number of slots, a line and statistics."""

from __future__ import annotations

from outrider.schemas import LaneStats
from outrider.sessions.priority_semaphore import PrioritySemaphore, Slot


class Lane:
    """A stage of the session coroutine with `size` slots, as settings and statistics name it."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self._slots = PrioritySemaphore(size)

    async def take(self, priority: int = 0) -> Slot:
        """Wait for a slot. A cancelled wait takes none."""
        return await self._slots.take((1,), priority)

    def stats(self) -> LaneStats:
        (in_use,) = self._slots.taken
        return LaneStats(
            name=self.name,
            size=self.size,
            in_use=in_use,
            waiting=self._slots.waiting,
            served=self._slots.served,
            waited_seconds=self._slots.waited_seconds,
        )


class Lanes:
    """The lanes of a node.

    A session has a slot of `ready` from before its sandbox is prepared until it has one of `run`: so many sandboxes are
    prepared or wait for their run, by default twice as many as are prepared at once (`init`), and none that waits
    keeps others from being prepared. `grading` bounds how many sandboxes for grading start at once; those for agents
    start in `init`.
    """

    def __init__(self, *, init: int, run: int, evaluate: int, ready: int | None = None) -> None:
        self.init = Lane("init", init)
        self.ready = Lane("ready", 2 * init if ready is None else ready)
        self.run = Lane("run", run)
        self.eval = Lane("eval", evaluate)
        self.grading = Lane("grading", max(1, init // 2))

    @property
    def capacity(self) -> int:
        """How many sessions can be in the lanes at once."""
        return self.ready.size + self.run.size + self.eval.size

    def stats(self) -> tuple[LaneStats, ...]:
        return tuple(lane.stats() for lane in (self.init, self.ready, self.run, self.eval, self.grading))
