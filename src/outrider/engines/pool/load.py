"""Which engine is least loaded: a min-heap by load whose entries may change.

Pure; it knows no engine. Invariant: `least` is the smallest of the loads last given, oldest name first among
equals.
"""

from __future__ import annotations

import heapq
import itertools

Load = tuple[bool, float, int]
"""Whether it is suspect, so that it comes after all that are not; the load itself; then what decides between equal
loads (sessions already there)."""

SLACK = 64
"""How many outdated entries the heap may hold per live one before it is rebuilt."""


class LoadHeap:
    """Names by load. A changed load leaves its old entry in the heap, skipped when it comes up."""

    def __init__(self) -> None:
        self._heap: list[tuple[Load, int, str]] = []
        self._current: dict[str, tuple[Load, int]] = {}
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._current)

    def put(self, name: str, load: Load) -> None:
        """Add a name, or change its load."""
        known = self._current.get(name)
        if known is not None and known[0] == load:
            return
        order = next(self._order) if known is None else known[1]
        self._current[name] = (load, order)
        heapq.heappush(self._heap, (load, order, name))
        if len(self._heap) > SLACK * len(self._current):
            self._heap = [(load, order, name) for name, (load, order) in self._current.items()]
            heapq.heapify(self._heap)

    def drop(self, name: str) -> None:
        """Forget a name, known or not."""
        self._current.pop(name, None)

    def least(self) -> str | None:
        """The least loaded name, which stays; None when there is none."""
        while self._heap:
            load, order, name = self._heap[0]
            if self._current.get(name) == (load, order):
                return name
            heapq.heappop(self._heap)
        return None
