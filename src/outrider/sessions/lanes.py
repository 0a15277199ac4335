"""The lanes of a node. A lane is one stage that sessions pass through. It has a queue, statistics, and a limited number
of slots."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from outrider.config import LanesConfig
from outrider.schemas import LaneStats
from outrider.sessions.priority_semaphore import URGENT, PrioritySemaphore, Slot


class Lane:
    """A stage that sessions pass through, with `size` slots. `name` identifies the stage in the settings and
    statistics."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self._slots = PrioritySemaphore(size)

    async def take(self, priority: int = 0, tenant: str = "") -> Slot:
        """Wait for a slot, in the order of `PrioritySemaphore`, and take it. A cancelled wait takes no slot."""
        return await self._slots.take((1,), priority, tenant)

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


class HeldSlot:
    """A slot that a session holds during an `async with` block. Within the block, the session can release the slot for
    some time (`off_the_clock`)."""

    def __init__(self, lane: Lane, priority: int, tenant: str = "") -> None:
        self._lane = lane
        self._priority = priority
        self._tenant = tenant
        self._slot: Slot | None = None
        self._over = False

    async def __aenter__(self) -> Self:
        self._slot = await self._lane.take(self._priority, self._tenant)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over = True
        self._release()

    @asynccontextmanager
    async def off_the_clock(self) -> AsyncIterator[None]:
        """Release the slot while the block runs. Afterwards, take a slot again, with URGENT priority, because the
        session has already waited once. If the block raises, no slot is taken again."""
        self._release()
        yield
        slot = await self._lane.take(URGENT, self._tenant)
        if self._over or self._slot is not None:  # the outer block has ended, or the session already has a slot again
            slot.release()
        else:
            self._slot = slot

    def _release(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.release()


class Lanes:
    """The lanes of a node.

    init: for agents' sandboxes while they are being prepared. A prepared sandbox holds no slot of `init`, so it does
        not delay the preparation of others.
    ready: for agents' sandboxes while they are being prepared or wait for a slot of `run`. By default the lane `ready`
        has twice as many slots as `init`.
    grading: for the starts of sandboxes for grading.
    """

    def __init__(self, sizes: LanesConfig) -> None:
        self.init = Lane("init", sizes.init)
        self.ready = Lane("ready", 2 * sizes.init if sizes.ready is None else sizes.ready)
        self.run = Lane("run", sizes.run)
        self.eval = Lane("eval", sizes.eval)
        self.grading = Lane("grading", max(1, sizes.init // 2))

    @property
    def capacity(self) -> int:
        """Maximum number of sessions that can be in the lanes at once."""
        return self.ready.size + self.run.size + self.eval.size

    def stats(self) -> tuple[LaneStats, ...]:
        return tuple(lane.stats() for lane in (self.init, self.ready, self.run, self.eval, self.grading))
