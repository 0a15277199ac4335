"""The processors and the memory of a node, of which parts are set aside for the sandboxes that ask for them.

Nothing is measured or enforced here: a runtime bounds its sandbox, and this keeps the bounds' sum within what there
is. Invariant: what is set aside is never more than the whole.
"""

from __future__ import annotations

import msgspec

from outrider.errors import RuntimeUnavailable
from outrider.schemas import RoomStats
from outrider.sessions.shares import Part, Slot, Stock
from outrider.spec import Resources

MILLI = 1000


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """Processors' worth of time, and MiB of memory."""

    cpus: float = 0.0
    memory_mb: int = 0

    def within(self, other: Amount) -> bool:
        return all(mine <= theirs for mine, theirs in zip(_part(self), _part(other), strict=True))


def asked(resources: Resources) -> Amount:
    """What a task's resources set aside; what it does not bound is not counted."""
    return Amount(cpus=resources.cpus or 0.0, memory_mb=resources.memory_mb or 0)


class Room:
    """`await room.take(amount, priority)` waits for its turn, as in a `Stock`."""

    def __init__(self, whole: Amount) -> None:
        self.whole = whole
        self._stock = Stock(*_part(whole))

    async def take(self, amount: Amount, priority: int = 0) -> Slot:
        """What asks for nothing waits for nobody. Raises RuntimeUnavailable for more than the whole."""
        part = _part(amount)
        if not any(part):
            return Slot(self._stock, part)
        if not amount.within(self.whole):
            raise RuntimeUnavailable(
                f"the sandbox needs {amount.cpus:g} cpus and {amount.memory_mb} MiB of memory; "
                f"the node has {self.whole.cpus:g} and {self.whole.memory_mb}",
                hint="submit the task again with less, or serve it with more: sandboxes.cpus, sandboxes.memory_mb",
            )
        return await self._stock.take(part, priority)

    def take_now(self, amount: Amount) -> Slot | None:
        """For what one can do without: None when there is not enough left, or others wait."""
        part = _part(amount)
        return self._stock.take_now(part) if any(part) else Slot(self._stock, part)

    def stats(self) -> RoomStats:
        millicpus, memory_mb = self._stock.out
        return RoomStats(
            cpus=self.whole.cpus,
            cpus_set_aside=millicpus / MILLI,
            memory_mb=self.whole.memory_mb,
            memory_mb_set_aside=memory_mb,
            waiting=self._stock.waiting,
            served=self._stock.served,
            waited_seconds=self._stock.waited,
        )


def whole_of(stats: RoomStats) -> Amount:
    return Amount(cpus=stats.cpus, memory_mb=stats.memory_mb)


def left_of(stats: RoomStats) -> Amount:
    return Amount(cpus=stats.cpus - stats.cpus_set_aside, memory_mb=stats.memory_mb - stats.memory_mb_set_aside)


def _part(amount: Amount) -> Part:
    """In whole numbers, whose sums are exact."""
    return round(amount.cpus * MILLI), amount.memory_mb
