"""Simulated rollouts for the tests of the sampler: prompts, durations and rewards, on a virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from bench.simulated_service import Played, SimulatedService, VirtualLoop

from outrider.schemas import GroupView

Task = Mapping[str, Any]


LIMIT_SECONDS = 100_000.0
"""A test that takes more seconds of the virtual clock raises TimeoutError. Without this limit, a deadlock would spin
for ever."""


def run(main: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:

        async def work() -> None:
            async with asyncio.timeout(LIMIT_SECONDS):
                await main()

        runner.run(work())


def task(number: int) -> Task:
    return {"number": number}


def informative(number: int) -> bool:
    """Return True if the rewards of the prompt's samples differ. Two thirds of the prompts are informative."""
    return number % 3 != 1


def even(task: Task, index: int, version: int) -> Played:
    """Every session takes one second. The samples of an informative prompt have different rewards."""
    return Played(1.0, float(index % 2 and informative(task["number"])))


def heavy_tailed(task: Task, index: int, version: int) -> Played:
    """Most sessions take one to two seconds, and some a hundred times as long. The duration does not depend on whether
    the prompt is informative."""
    draw = random.Random(f"{task['number']}/{index}")
    return Played(min(draw.paretovariate(1.1), 200.0), float(index % 2 and informative(task["number"])))


class Holding(SimulatedService):
    """A service that answers the calls in `holds` only after `go` is set: `submit`, `cancel`, or `group ID`. The first
    of these calls sets `asked`."""

    holds: frozenset[str] = frozenset()

    def __init__(self, play: Callable[[Task, int, int], Played], *, slots: int, holds: Iterable[str]) -> None:
        super().__init__(play, slots=slots)
        self.holds = frozenset(holds)
        self.asked = asyncio.Event()
        self.go = asyncio.Event()

    async def _hold(self, name: str) -> None:
        if name in self.holds:
            self.asked.set()
            await self.go.wait()

    async def submit(self, group: Task) -> GroupView:
        await self._hold("submit")
        return await super().submit(group)

    async def cancel(self, group_id: str) -> GroupView:
        await self._hold("cancel")
        return await super().cancel(group_id)

    async def group(self, group_id: str, *, wait: float = 0.0, samples: bool = False) -> GroupView:
        await self._hold(f"group {group_id}")
        return await super().group(group_id, wait=wait, samples=samples)


def first(prompts: int) -> Callable[[int], Task]:
    def source(number: int) -> Task:
        if number >= prompts:
            raise IndexError(number)
        return task(number)

    return source
